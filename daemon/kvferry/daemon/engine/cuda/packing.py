"""Pieces as they lie packed in a slot of the staging buffer, and in host memory.

In the slot block follows block. So do many of them in host memory: those of one host block, and of
host blocks that are neighbours. Each such row is one fragment on the link.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial

import numpy as np

from kvferry.daemon.core.layout import Extent, Fragments, Int64s, Rows
from kvferry.daemon.engine.cuda.link import Link, Ruler, Scattered, Some
from kvferry.daemon.engine.cuda.stretches import Stretches

FEW = 32
"""Of so many blocks, or rows of them, Python has found the fragments before numpy has begun."""
STRETCH = 4096
"""Blocks that are looked through at once."""


class Packing:
    """Finds how the pieces of runs lie in their slots, and in the pool. ruler: of the buffer that
    the slots are in."""

    def __init__(self, link: Link, ruler: Ruler) -> None:
        self._link = link
        self._ruler = ruler
        self._stretches = Stretches[_Joints]()

    def fragments(self, run: Extent, block_bytes: int, slot: int) -> Fragments | Rows | Some:
        """A piece: as few fragments as the host blocks' places allow."""
        if _few(run.of or run):
            return _rows(run.host_offsets.tolist(), block_bytes, slot, self._link.pool)
        make = partial(self._joints, block_bytes)
        joints, first = self._stretches.find(run, STRETCH, make)
        return joints.fragments(first, run.gpu_blocks.size, slot)

    def _joints(self, block_bytes: int, run: Extent) -> _Joints:
        return _Joints(self._link, self._ruler, run.host_offsets, block_bytes)


class _Joints:
    """The blocks of a stretch that do not lie behind the one before them in host memory."""

    def __init__(self, link: Link, ruler: Ruler, offsets: Int64s, block_bytes: int) -> None:
        joined = offsets[1:] - offsets[:-1] == block_bytes
        self._ruler = ruler
        self._block_bytes = block_bytes
        self._scattered: Scattered | None = None
        if ruler.measures(block_bytes) and not joined.any():
            self._scattered = link.scattered(offsets, block_bytes)
        if self._scattered is None:
            breaks = np.flatnonzero(~joined) + 1
            self._at = np.concatenate(([0], breaks, [offsets.size]))
            """Their numbers; the first is one of them, and behind the last the stretch's end."""
            self._hosts = offsets[self._at[:-1]] + link.pool
            """Addresses."""
            self._numbers: list[int] = self._at.tolist()
            self._places: list[int] = self._hosts.tolist()

    def fragments(self, first: int, count: int, slot: int) -> Fragments | Rows | Some:
        """Of `count` blocks from number `first` on."""
        if self._scattered is not None:
            return Some(self._scattered, first, count, slot, self._ruler)
        end = first + count
        begin, behind = bisect_right(self._numbers, first) - 1, bisect_left(self._numbers, end)
        if behind - begin > FEW:
            return self._arrays(first, end, slice(begin, behind), slot)
        nbytes, rows = self._block_bytes, list[tuple[int, int, int]]()
        for joint in range(begin, behind):
            number = self._numbers[joint]
            start, stop = max(first, number), min(end, self._numbers[joint + 1])
            host = self._places[joint] + (start - number) * nbytes
            rows.append((slot + (start - first) * nbytes, host, (stop - start) * nbytes))
        return rows

    def _arrays(self, first: int, end: int, these: slice, slot: int) -> Fragments:
        numbers, nbytes = self._at[these], self._block_bytes
        starts = np.maximum(numbers, first)
        stops = np.minimum(self._at[these.start + 1 : these.stop + 1], end)
        hosts = self._hosts[these] + (starts - numbers) * nbytes
        return Fragments.of((starts - first) * nbytes + slot, hosts, (stops - starts) * nbytes)


def _few(run: Extent) -> bool:
    return run.host_offsets.size <= FEW


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
