"""Direct copies: every page is one fragment on the link.

The copy engines do the work: other processes' kernels do not feel it. Below some tens of KiB the
engines' own cost for a fragment shows, see staged.py.
"""

from __future__ import annotations

import numpy as np

from kvferry.daemon.core.geometry import Geometry, Run
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda.link import FEW, Link
from kvferry.proto.libcuda import Driver, Event
from kvferry.proto.specs import Direction


class DirectCopy:
    """Enqueues pieces on two streams a direction: between two fragments a copy engine pauses, and
    the other stream's fragment fills the pause.

    Which of the two a GPU block takes depends on the block that is written alone, so that two
    transfers that write to one block are done in order.
    """

    def __init__(self, driver: Driver, link: Link) -> None:
        self._driver = driver
        self._link = link
        self.streams = {
            direction: [driver.create_stream(urgent=direction is Direction.LOAD) for _ in range(2)]
            for direction in Direction
        }

    def enqueue(
        self, direction: Direction, mapping: Mapping, run: Run, pool: int
    ) -> tuple[list[Event], list[Event]]:
        """Enqueue a piece; returns the events before and behind it, one a stream that it uses."""
        begun, done = [], []
        for odd, half in _halves(direction, mapping.geometry, run):
            stream = self.streams[direction][odd]
            begun.append(self._driver.record(stream))
            geometry = mapping.geometry
            few = half.gpu_blocks.size * geometry.refs[half.group].pages.size <= FEW
            pages = geometry.rows if few else geometry.fragments
            self._link.enqueue(direction, pages(half, mapping.bases, pool), stream)
            done.append(self._driver.record(stream))
        return begun, done


def _halves(direction: Direction, geometry: Geometry, run: Run) -> list[tuple[int, Run]]:
    """The blocks of a piece by the block that they write to: (0, even ones), (1, odd ones)."""
    written = run.gpu_blocks
    if direction is Direction.STORE:
        written = run.host_offsets // geometry.host_block_bytes
    if written.size == 1:
        return [(int(written[0]) & 1, run)]
    odd = (written & 1).astype(bool)
    odds = int(np.count_nonzero(odd))
    if odds in (0, odd.size):
        return [(1 if odds else 0, run)]
    return [
        (0, Run(run.group, run.gpu_blocks[~odd], run.host_offsets[~odd])),
        (1, Run(run.group, run.gpu_blocks[odd], run.host_offsets[odd])),
    ]
