"""The queue of reports from the device worker to the event loop.

The loop is woken once for all reports that arrive until it runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from kvferry.daemon.core.actions import Report


class ReportQueue:
    """FIFO. `put_reports`: the device worker's thread. `take_reports`: the event loop.

    wake: called on the event loop when there are reports; it must call `take_reports`.
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
        # First: a later report is either yielded below or wakes the loop.
        self._woken = False
        while self._reports:
            yield self._reports.popleft()
