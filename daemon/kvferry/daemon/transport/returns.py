"""What the lane reports, on its way to the loop: woken once for all that is there by then."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from kvferry.daemon.core.actions import Report


class Returns:
    """`put` in the lane's thread, `take` in the loop's, which `take_in` makes do so."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take_in: Callable[[], None]) -> None:
        self._loop = loop
        self._take_in = take_in
        self._reports: deque[Report] = deque()
        self._rung = False

    def put(self, reports: list[Report]) -> None:
        self._reports.extend(reports)
        if not self._rung:
            self._rung = True
            self._loop.call_soon_threadsafe(self._take_in)

    def take(self) -> Iterator[Report]:
        """All there are, and those that come meanwhile."""
        self._rung = False  # first: what is put from here on either is taken here, or rings
        while self._reports:
            yield self._reports.popleft()
