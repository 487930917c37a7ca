"""A circuit breaker: turns a tier off that fails, and tries it again later.

closed     requests are sent. MAX_ERRORS errors in a row, or a death: open
open       for a while, each time twice as long, up to a limit; then half open
half open  a probe is sent, for which no request waits. Answered: closed, otherwise open
closed after a probe: one error opens it again, for twice as long. A block that was read or
           written ends that
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

MAX_ERRORS = 3


class CircuitBreaker:
    """now: returns the time in seconds. first_off, longest_off: seconds for which it is open, at
    first and at most. counts: in which the openings are counted.
    """

    def __init__(
        self,
        now: Callable[[], float],
        first_off: float,
        longest_off: float,
        counts: Counter[str],
    ) -> None:
        self._now, self._counts = now, counts
        self._first_off, self._longest_off = first_off, longest_off
        # Errors in a row, and lookups in a row that were late.
        self._errors = self._late = 0
        self._off_for = first_off
        # Until when it is open; None if it is closed.
        self._until: float | None = None
        self._opened = asyncio.Event()
        self._probing = False

    @property
    def state(self) -> str:
        """ "closed", "open" or "half_open"."""
        if self._until is None:
            return "closed"
        return "open" if self._now() < self._until else "half_open"

    async def until_half_open(self) -> None:
        """Return when a probe can begin. Without an opening no timer runs."""
        while self.state != "half_open":
            if self._until is None:
                self._opened.clear()
                await self._opened.wait()
            else:
                await asyncio.sleep(self._until - self._now())

    def begin_probe(self) -> bool:
        """Whether to send the probe now. If so, `end_probe` or `trip` follows."""
        if self._probing or self.state != "half_open":
            return False
        self._probing = True
        return True

    def end_probe(self, answered: bool) -> None:
        """The probe has ended. Ignored if the breaker was tripped meanwhile."""
        if not self._probing:
            return
        if not answered:
            self.trip()
            return
        self._until, self._probing = None, False
        self._errors, self._late = MAX_ERRORS - 1, 0

    def record_success(self) -> None:
        """A block was read or written."""
        if self._until is None:
            self._errors, self._off_for = 0, self._first_off

    def record_error(self) -> None:
        self._errors += 1
        self._judge()

    def record_lookup(self, in_time: bool) -> None:
        """A lookup has ended. In time, it says nothing about reads and writes."""
        self._late = 0 if in_time else self._late + 1
        self._judge()

    def trip(self) -> None:
        """Open at once. If it is open and nothing is being probed, nothing changes."""
        if self._until is not None and not self._probing:
            return
        seconds = self._off_for
        self._until = self._now() + seconds
        self._off_for = min(self._longest_off, 2 * seconds)
        self._errors, self._late, self._probing = 0, 0, False
        self._counts["openings"] += 1
        self._opened.set()

    def _judge(self) -> None:
        if self._until is None and self._errors + self._late >= MAX_ERRORS:
            self.trip()
