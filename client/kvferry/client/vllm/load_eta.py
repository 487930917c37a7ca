"""The estimated time at which the next load ends, so that an idle engine can wait for it.

vLLM polls for loads once a step, and after a step that ran nothing it sleeps for a millisecond: on
average half of one passes before it sees that a prompt is there. A step that runs nothing may as
well wait where it polls, if a load is about to end before the next poll. Waiting too late finds it
ended; waiting too early sleeps through the end after all. So the time is learnt from loads that
ended: they end in the order of submission, each takes as long for its bytes as the fastest of the
last ones did, and one that waits for no other has some latency before its first byte.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# Seconds before its end from which on a load is waited for: a step that runs nothing, and the
# sleep behind it, take 1.4 ms.
MAX_WAIT = 1.6e-3
# Seconds that a load is waited for after its estimated end. A request that arrives while a step
# waits, waits as well: for LEAD + PATIENCE at most.
GRACE = 1e-3
# Bytes per second, until a load has ended that was large enough to measure.
DEFAULT_RATE = 50e9
# Bytes below which a load's time is latency rather than bandwidth.
MIN_MEASURED_BYTES = 32 << 20
# The best of so many loads is expected of the next: a load that shared the link was slower, and one
# that was polled late seems slower.
SAMPLES = 8


class ExpectedLoad(NamedTuple):
    job_id: int
    submitted: float
    due: float
    alone: bool
    """No other was before it."""


class LoadEta:
    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._delays: deque[float] = deque(maxlen=SAMPLES)
        self._expected: deque[ExpectedLoad] = deque()
        """Oldest first."""

    def submitted(self, job_id: int, nbytes: int, now: float) -> None:
        """A load was."""
        begins = now + min(self._delays, default=0.0)
        alone = not self._expected
        if not alone:
            begins = max(begins, self._expected[-1].due)
        due = begins + nbytes / max(self._rates, default=DEFAULT_RATE)
        self._expected.append(ExpectedLoad(job_id, now, due, alone))

    def ended(self, job_id: int, nbytes: int, seconds: float, now: float) -> None:
        """A job of any kind was seen to have; nbytes, seconds: what it moved, and for how long."""
        mine = next((one for one in self._expected if one.job_id == job_id), None)
        if mine is None:
            return
        self._expected.remove(mine)
        if nbytes < MIN_MEASURED_BYTES or seconds <= 0:
            return
        self._rates.append(nbytes / seconds)
        if mine.alone:
            self._delays.append(max(0.0, now - mine.submitted - seconds))

    def patience(self, now: float) -> float:
        """Seconds that a step may wait now for the next load; 0 where that is not about to end."""
        if not self._expected or (left := self._expected[0].due - now) > MAX_WAIT:
            return 0.0
        return max(0.0, left) + GRACE
