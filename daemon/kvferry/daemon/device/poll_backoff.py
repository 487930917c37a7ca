"""How long the device worker sleeps between two polls of the device or reads of a timeline.

    sleep = clamp(SHARE * time since the last event, MIN_POLL, maximum)
    maximum = MAX_POLL while chunks are in flight, MAX_FENCE_POLL while transfers only wait for a
              timeline or the pool

So the delay until an event is noticed is a fixed share of the time that it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds. A copy of 2 MiB takes 40 us, and waking the thread about 10.
MIN_POLL = 20e-6
# A chunk of 32 MiB takes 600 us. Others are queued after it, so the link stays busy.
MAX_POLL = 100e-6
# A write to a timeline page cannot wake a thread, so the page must be polled.
MAX_FENCE_POLL = 1e-3
SHARE = 1 / 8


class PollBackoff:
    """Called only by the device worker. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = 0.0

    def reset(self) -> None:
        """An event happened: poll again soon."""
        self._since = self._clock()

    def next(self, longest: float) -> float:
        """Seconds to sleep now, at most `longest`."""
        return min(max(MIN_POLL, SHARE * (self._clock() - self._since)), longest)
