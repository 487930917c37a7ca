"""A circuit breaker: turns a tier off that fails, and tries it again later with one request.

closed --3 errors in a row, a missed deadline, or a death--> open for 1 s, 2 s, ... 60 s
open --its time is over--> half open: one probe --OK--> closed
                                                --failed--> open, for twice as long
"""

from __future__ import annotations

from collections.abc import Callable

MAX_ERRORS = 3
FIRST_OFF, LONGEST_OFF = 1.0, 60.0


class CircuitBreaker:
    """now: returns the time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._errors = 0
        self._off_for = FIRST_OFF
        # Until when it is open; None if it is closed.
        self._until: float | None = None
        self._probing = False
        # How often it opened.
        self.openings = 0

    @property
    def state(self) -> str:
        """ "closed", "open" or "half_open"."""
        if self._until is None:
            return "closed"
        return "open" if self._now() < self._until else "half_open"

    def admit(self) -> bool:
        """Whether a request may be sent. In the half-open state only the first: the probe."""
        if self._until is None:
            return True
        if self._now() < self._until or self._probing:
            return False
        self._probing = True
        return True

    def end_probe(self) -> None:
        """A request ended without telling anything about the tier: the next one is the probe."""
        self._probing = False

    def record_success(self) -> None:
        self._errors = 0
        if self._probing:
            self._until, self._probing, self._off_for = None, False, FIRST_OFF

    def record_error(self) -> None:
        self._errors += 1
        if self._probing or self._errors >= MAX_ERRORS:
            self.trip()

    def trip(self) -> None:
        """Open at once. If it is open and nothing is being probed, nothing changes."""
        if self._until is not None and not self._probing:
            return
        self._until = self._now() + self._off_for
        self._off_for = min(LONGEST_OFF, 2 * self._off_for)
        self._errors, self._probing = 0, False
        self.openings += 1
