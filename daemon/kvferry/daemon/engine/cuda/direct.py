"""Direct copies: every page is one fragment on the link.

The copy engines do the work: other processes' kernels do not feel it. Below some hundred KiB the
engines' own cost for a fragment shows, see staged.py.
"""

from __future__ import annotations

from functools import partial

from kvferry.cuda.driver import Driver, Event
from kvferry.daemon.core.layout import Extent
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda.link import FEW, Link, Listed
from kvferry.daemon.engine.cuda.stretches import Stretches
from kvferry.proto.specs import Direction

# Bytes of a chunk.
CHUNK = 32 << 20
# Bytes in flight in one direction: 1.7 ms of the link, while the device worker looks every 0.1 ms.
MAX_IN_FLIGHT = 3 * CHUNK
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
        self, direction: Direction, mapping: Mapping, run: Extent, pool: int
    ) -> tuple[Event | None, Event]:
        """Enqueue a piece; returns the events before it, if it is a run's first, and behind it."""
        geometry, stream = mapping.geometry, self.streams[direction]
        pages = geometry.refs[run.group].pages.size
        count = run.gpu_blocks.size * pages
        begun = None if run.at else self._driver.record(stream)
        if count <= FEW:
            self._link.enqueue(direction, geometry.rows(run, mapping.bases, pool), stream)
        else:
            make = partial(self._listed, direction, mapping, pool)
            listed, first = self._stretches.find(run, STRETCH // pages, make)
            self._link.enqueue_listed(listed, stream, first * pages, count)
        return begun, self._driver.record(stream)

    def _listed(self, direction: Direction, mapping: Mapping, pool: int, run: Extent) -> Listed:
        geometry = mapping.geometry
        fragments = geometry.fragments(run, mapping.bases, pool)
        return self._link.listed(direction, fragments, whole=self._link.whole(geometry))
