"""Estimates when the next load completes, so that an idle engine can wait for it.

vLLM polls for loads once per step, and sleeps for 1 ms after a step without a forward pass. So it
sees a completed load 0.5 ms late on average. Such a step waits in its poll instead, if a load is
about to complete before the next poll. The estimate is learnt from completed loads:

    begin = submit time + smallest recent latency, but not before the load before it has ended
    end   = begin + bytes / highest recent rate
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# Seconds before its estimated end from which on a load is waited for. A step without a forward pass
# and the sleep after it take 1.4 ms.
MAX_WAIT = 1.6e-3
# Seconds that a load is waited for after its estimated end. A request that arrives meanwhile waits,
# too: MAX_WAIT + GRACE at most.
GRACE = 1e-3
# Bytes per second, until a load was large enough to measure.
DEFAULT_RATE = 50e9
# Smaller loads are bound by latency, and tell nothing of the rate.
MIN_MEASURED_BYTES = 32 << 20
# The best of so many loads is used: loads that share the link, or are polled late, seem slower.
SAMPLES = 8


class ExpectedLoad(NamedTuple):
    job_id: int
    submitted: float
    # The estimated end.
    due: float
    # Whether no load was queued before it.
    alone: bool


class LoadEta:
    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._delays: deque[float] = deque(maxlen=SAMPLES)
        # Oldest first.
        self._expected: deque[ExpectedLoad] = deque()

    def load_submitted(self, job_id: int, nbytes: int, now: float) -> None:
        begins = now + min(self._delays, default=0.0)
        alone = not self._expected
        if not alone:
            begins = max(begins, self._expected[-1].due)
        due = begins + nbytes / max(self._rates, default=DEFAULT_RATE)
        self._expected.append(ExpectedLoad(job_id, now, due, alone))

    def job_completed(self, job_id: int, nbytes: int, seconds: float, now: float) -> None:
        """A job, not only a load, has completed. nbytes, seconds: its size and device time."""
        load = next((load for load in self._expected if load.job_id == job_id), None)
        if load is None:
            return
        self._expected.remove(load)
        if nbytes < MIN_MEASURED_BYTES or seconds <= 0:
            return
        self._rates.append(nbytes / seconds)
        if load.alone:
            self._delays.append(max(0.0, now - load.submitted - seconds))

    def wait_seconds(self, now: float) -> float:
        """Seconds that a step should wait for the next load; 0 if it is not about to complete."""
        if not self._expected or (left := self._expected[0].due - now) > MAX_WAIT:
            return 0.0
        return max(0.0, left) + GRACE
