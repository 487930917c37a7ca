"""When the next load will have ended: so that an engine that runs nothing waits for it.

vLLM looks for loads that ended once a step, and after a step that ran nothing it sleeps for a
millisecond: so half of one goes by, on average, before it sees that a prompt is there. A step that
runs nothing may as well wait where it looks, as long as vLLM's own sleep at most, when a load is
about to end. Who waits too early sleeps through the end after all, so it is learnt from loads that
ended: they end in the order of submission, take what the last one took for its bytes, and one that
waits for no other is on its way for a while before its first byte.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

PATIENCE = 1e-3
"""Seconds that a step waits, at most: a request that comes meanwhile waits as well."""
RATE = 50e9
"""Bytes a second, until a load has ended that tells."""
TELLS = 32 << 20
"""What has fewer bytes tells of latency, not of the link."""
LATELY = 8
"""Loads whose least delay is expected of the next: one seen late seems to have had more."""


class Expected(NamedTuple):
    job_id: int
    submitted: float
    due: float
    alone: bool
    """No other was before it."""


class Arrivals:
    def __init__(self) -> None:
        self._rate = RATE
        self._delays: deque[float] = deque(maxlen=LATELY)
        self._expected: deque[Expected] = deque()
        """Oldest first."""

    def submitted(self, job_id: int, nbytes: int, now: float) -> None:
        begins = now + min(self._delays, default=0.0)
        alone = not self._expected
        if not alone:
            begins = max(begins, self._expected[-1].due)
        self._expected.append(Expected(job_id, now, begins + nbytes / self._rate, alone))

    def ended(self, job_id: int, nbytes: int, seconds: float, now: float) -> None:
        """A job of any kind was seen to have; nbytes, seconds: what it moved, and for how long."""
        mine = next((one for one in self._expected if one.job_id == job_id), None)
        if mine is not None:
            self._expected.remove(mine)
        if nbytes < TELLS or seconds <= 0:
            return
        self._rate = nbytes / seconds
        if mine is not None and mine.alone:
            self._delays.append(max(0.0, now - mine.submitted - seconds))

    def soon(self, now: float) -> bool:
        """Whether the next is to end within PATIENCE, or should have ended."""
        return bool(self._expected) and self._expected[0].due - now < PATIENCE
