"""Direct copies: every page is one fragment on the link.

The copy engines do the work: other processes' kernels do not feel it. Below some hundred KiB the
engines' own cost for a fragment shows, see staged.py.

No load comes while the lane finds out where the fragments of a piece lie. So that is done for a
stretch of them at once, and a piece takes what its driver calls take.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvferry.daemon.core.geometry import Run
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda.link import FEW, Link, Listed
from kvferry.proto.libcuda import Driver, Event
from kvferry.proto.specs import Direction

STRETCH = 1024
"""Fragments made ready at once, for the pieces to come: numpy takes hardly longer for a thousand
than for the few of one piece."""
STRETCHES = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Blocks `begin` to `end` of a run, made ready."""

    run: Run
    begin: int
    end: int
    listed: Listed

    def has(self, run: Run, begin: int, end: int) -> bool:
        return self.run is run and self.begin <= begin and end <= self.end


class DirectCopy:
    """Enqueues pieces on one stream a direction. A second stream, to fill the pauses that a copy
    engine makes between two fragments, is slower: the engine pauses where streams take turns."""

    def __init__(self, driver: Driver, link: Link) -> None:
        self._driver = driver
        self._link = link
        self._stretches: deque[_Stretch] = deque(maxlen=STRETCHES)
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
            stretch = self._stretch(direction, mapping, run, pool)
            first = (run.at - stretch.begin) * pages
            self._link.enqueue_listed(stretch.listed, stream, first, count)
        return begun, self._driver.record(stream)

    def _stretch(self, direction: Direction, mapping: Mapping, run: Run, pool: int) -> _Stretch:
        """One that has a piece: made for one before it, or now."""
        whole, begin, end = run.of or run, run.at, run.at + run.gpu_blocks.size
        for stretch in self._stretches:
            if stretch.has(whole, begin, end):
                return stretch
        geometry = mapping.geometry
        blocks = STRETCH // geometry.refs[run.group].pages.size
        last = max(end, min(begin + blocks, whole.gpu_blocks.size))
        fragments = geometry.fragments(whole.cut(begin, last), mapping.bases, pool)
        stretch = _Stretch(whole, begin, last, self._link.listed(direction, fragments))
        if last > end:
            self._stretches.append(stretch)
        return stretch
