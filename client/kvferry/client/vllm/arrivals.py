"""When the next load will have ended: so that an engine that runs nothing waits for it.

vLLM looks for loads that ended once a step, and after a step that ran nothing it sleeps for a
millisecond: so half of one goes by, on average, before it sees that a prompt is there. A step that
runs nothing may as well wait where it looks, as long as vLLM's own sleep at most, when a load is
about to end. Loads end in the order of submission, and take what the last one took for its bytes.
"""

from __future__ import annotations

from collections import deque

PATIENCE = 1e-3
"""Seconds that a step waits, at most: a request that comes meanwhile waits as well."""
RATE = 50e9
"""Bytes a second, until a load has ended that tells."""
TELLS = 32 << 20
"""What has fewer bytes tells of latency, not of the link."""


class Arrivals:
    def __init__(self) -> None:
        self._rate = RATE
        self._due: deque[tuple[int, float]] = deque()
        """Jobs, and when each will have ended; oldest first."""

    def submitted(self, job_id: int, nbytes: int, now: float) -> None:
        begins = max(now, self._due[-1][1]) if self._due else now
        self._due.append((job_id, begins + nbytes / self._rate))

    def ended(self, job_id: int, nbytes: int, seconds: float) -> None:
        """A job of any kind; nbytes, seconds: what it moved, and how long that took."""
        self._due = deque(due for due in self._due if due[0] != job_id)
        if nbytes >= TELLS and seconds > 0:
            self._rate = nbytes / seconds

    def soon(self, now: float) -> bool:
        """Whether the next is to end within PATIENCE, or should have ended."""
        return bool(self._due) and self._due[0][1] - now < PATIENCE
