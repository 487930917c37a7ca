"""Pieces as they lie packed in a slot of the staging buffer, and in host memory.

In the slot block follows block. So do many of them in host memory: those of one host block, and of
host blocks that are neighbours. Each such row is one fragment on the link.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from kvferry.daemon.core.geometry import Fragments, Rows, Run
from kvferry.daemon.engine.cuda.stretches import Stretches

FEW = 32
"""Of so many blocks, or rows of them, Python has found the fragments before numpy has begun."""
STRETCH = 4096
"""Blocks that are looked through at once."""


class Packing:
    """Finds how the pieces of runs lie."""

    def __init__(self) -> None:
        self._stretches = Stretches[_Joints]()

    def fragments(self, run: Run, block_bytes: int, slot: int, pool: int) -> Fragments | Rows:
        """A piece between slot and pool: as few fragments as the host blocks' places allow."""
        if run.host_offsets.size <= FEW:
            return _rows(run.host_offsets.tolist(), block_bytes, slot, pool)
        joints, first = self._stretches.find(run, STRETCH, lambda some: _Joints(some, block_bytes))
        return joints.fragments(first, run.gpu_blocks.size, slot, pool)


class _Joints:
    """The blocks of a stretch that do not lie behind the one before them in host memory."""

    def __init__(self, run: Run, block_bytes: int) -> None:
        breaks = np.flatnonzero(np.diff(run.host_offsets) != block_bytes) + 1
        self._block_bytes = block_bytes
        self._at = np.concatenate(([0], breaks, [run.host_offsets.size]))
        """Their numbers; the first is one of them, and behind the last comes the stretch's end."""
        self._offsets = run.host_offsets[self._at[:-1]]
        """Bytes from the start of the pool."""
        self._numbers: list[int] = self._at.tolist()
        self._places: list[int] = self._offsets.tolist()

    def fragments(self, first: int, count: int, slot: int, pool: int) -> Fragments | Rows:
        """Of `count` blocks from number `first` on."""
        end = first + count
        begin, behind = bisect_right(self._numbers, first) - 1, bisect_left(self._numbers, end)
        if behind - begin > FEW:
            return self._arrays(first, end, slice(begin, behind), slot, pool)
        nbytes, rows = self._block_bytes, list[tuple[int, int, int]]()
        for joint in range(begin, behind):
            number = self._numbers[joint]
            start, stop = max(first, number), min(end, self._numbers[joint + 1])
            host = self._places[joint] + (start - number) * nbytes + pool
            rows.append((slot + (start - first) * nbytes, host, (stop - start) * nbytes))
        return rows

    def _arrays(self, first: int, end: int, these: slice, slot: int, pool: int) -> Fragments:
        numbers, nbytes = self._at[these], self._block_bytes
        starts = np.maximum(numbers, first)
        stops = np.minimum(self._at[these.start + 1 : these.stop + 1], end)
        hosts = self._offsets[these] + (starts - numbers) * nbytes + pool
        return Fragments((starts - first) * nbytes + slot, hosts, (stops - starts) * nbytes)


def _rows(offsets: list[int], block_bytes: int, slot: int, pool: int) -> Rows:
    rows: Rows = []
    first, behind = 0, offsets[0]
    for position, offset in enumerate([*offsets, -1]):
        if offset != behind:
            size = (position - first) * block_bytes
            rows.append((slot + first * block_bytes, offsets[first] + pool, size))
            first, behind = position, offset
        behind += block_bytes
    return rows
