"""How long the device worker sleeps between two looks at the device or at a timeline.

something happened   MIN_POLL
nothing happened     twice as long as before, up to MAX_POLL while chunks are in flight, or up
                     to MAX_FENCE_POLL while transfers only wait for a timeline or the pool
"""

from __future__ import annotations

# Seconds. A copy of 2 MiB takes 40 us, and waking the thread about 10.
MIN_POLL = 20e-6
# A chunk of 32 MiB takes 600 us. Others are in flight behind it, so the link does not wait.
MAX_POLL = 100e-6
# Memory cannot wake a thread, so a timeline has to be read.
MAX_FENCE_POLL = 1e-3


class PollBackoff:
    """Called only by the device worker."""

    def __init__(self) -> None:
        self._next = MIN_POLL

    def reset(self) -> None:
        """Something happened: look again soon."""
        self._next = MIN_POLL

    def next(self, longest: float) -> float:
        """Seconds to sleep now, at most `longest`."""
        seconds = min(self._next, longest)
        self._next = 2 * seconds
        return seconds
