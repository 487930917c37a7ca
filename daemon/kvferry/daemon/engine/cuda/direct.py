"""Direct copies: every page is one fragment on the link.

The copy engines do the work: other processes' kernels do not feel it. Below some hundred KiB the
engines' own cost for a fragment shows, see staged.py.
"""

from __future__ import annotations

from kvferry.daemon.core.geometry import Run
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda.link import FEW, Link
from kvferry.proto.libcuda import Driver, Event
from kvferry.proto.specs import Direction


class DirectCopy:
    """Enqueues pieces on one stream a direction. A second stream, to fill the pauses that a copy
    engine makes between two fragments, is slower: the engine pauses where streams take turns."""

    def __init__(self, driver: Driver, link: Link) -> None:
        self._driver = driver
        self._link = link
        self.streams = {
            direction: driver.create_stream(urgent=direction is Direction.LOAD)
            for direction in Direction
        }

    def enqueue(
        self, direction: Direction, mapping: Mapping, run: Run, pool: int
    ) -> tuple[Event, Event]:
        """Enqueue a piece; returns the events before and behind it."""
        geometry, stream = mapping.geometry, self.streams[direction]
        few = run.gpu_blocks.size * geometry.refs[run.group].pages.size <= FEW
        pages = geometry.rows if few else geometry.fragments
        begun = self._driver.record(stream)
        self._link.enqueue(direction, pages(run, mapping.bases, pool), stream)
        return begun, self._driver.record(stream)
