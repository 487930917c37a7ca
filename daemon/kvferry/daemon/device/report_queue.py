"""Reports of the device worker on their way to the event loop.

The loop is woken once for all reports that are there by then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from kvferry.daemon.core.actions import Report


class ReportQueue:
    """FIFO. `put` from the device worker's thread, `take` from the event loop's.

    wake: called in the event loop when there are reports; it calls `take`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._reports: deque[Report] = deque()
        self._woken = False

    def put_reports(self, reports: list[Report]) -> None:
        self._reports.extend(reports)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def take_reports(self) -> Iterator[Report]:
        """All reports, including those that arrive meanwhile."""
        # First: a report that arrives from here on is either taken here or wakes the loop.
        self._woken = False
        while self._reports:
            yield self._reports.popleft()
