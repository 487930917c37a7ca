"""The queue of reports to the core, from other threads and from the daemon's flows.

The event loop is woken once for all reports that arrive until it takes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator

from kvferry.daemon.core.actions import Report


class ReportQueue:
    """FIFO. `put_reports`: any thread. The other methods: the event loop that created the queue."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reports: deque[Report] = deque()
        self._arrived = asyncio.Event()
        self._woken = False

    def put_reports(self, reports: Iterable[Report]) -> None:
        self._reports.extend(reports)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def wait_for_reports(self) -> None:
        """Return when there are reports, or were until they were taken."""
        await self._arrived.wait()
        self._arrived.clear()

    def take_reports(self) -> Iterator[Report]:
        """All reports, including those that arrive meanwhile."""
        # First: a later report is either yielded below or wakes the loop.
        self._woken = False
        while self._reports:
            yield self._reports.popleft()
