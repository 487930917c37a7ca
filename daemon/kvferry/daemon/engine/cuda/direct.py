"""Direct copies: every page is one fragment on the link.

The copy engines do the work: other processes' kernels do not feel it. Below some hundred KiB the
engines' own cost for a fragment shows, see staged.py.
"""

from __future__ import annotations

from kvferry.daemon.core.geometry import Run
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda.link import FEW, Link, Listed
from kvferry.daemon.engine.cuda.stretches import Stretches
from kvferry.proto.libcuda import Driver, Event
from kvferry.proto.specs import Direction

STRETCH = 1024
"""Fragments that are made ready at once."""


class DirectCopy:
    """Enqueues pieces on one stream a direction. A second stream, to fill the pauses that a copy
    engine makes between two fragments, is slower: the engine pauses where streams take turns."""

    def __init__(self, driver: Driver, link: Link) -> None:
        self._driver = driver
        self._link = link
        self._stretches = Stretches[Listed]()
        self.streams = {
            direction: driver.create_stream(urgent=direction is Direction.LOAD)
            for direction in Direction
        }

    def enqueue(
        self, direction: Direction, mapping: Mapping, run: Run, pool: int
    ) -> tuple[Event, Event]:
        """Enqueue a piece; returns the events before and behind it."""
        geometry, stream = mapping.geometry, self.streams[direction]
        pages = geometry.refs[run.group].pages.size
        count = run.gpu_blocks.size * pages
        begun = self._driver.record(stream)
        if count <= FEW:
            self._link.enqueue(direction, geometry.rows(run, mapping.bases, pool), stream)
        else:
            listed, first = self._stretches.find(
                run,
                STRETCH // pages,
                lambda whole: self._link.listed(
                    direction, geometry.fragments(whole, mapping.bases, pool)
                ),
            )
            self._link.enqueue_listed(listed, stream, first * pages, count)
        return begun, self._driver.record(stream)
