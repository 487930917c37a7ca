"""The read rate of a tier, measured from the fetches that it has answered.

    rate = bytes read / seconds in which the tier was busy

Both decay with the busy time. The first LATENCY of a read that finds the tier idle does not count:
a short read says nothing about the rate of a long one.
"""

from __future__ import annotations

from collections.abc import Callable

# Bytes per second that are assumed before anything is measured.
ASSUMED = 1e9
# Busy seconds after which a measurement has half of its weight, and the weight of what is assumed.
HALF_LIFE, ASSUMED_WEIGHT = 1.0, 0.1
LATENCY = 0.005
# After KNOWN_FOR seconds without a read, the rate is unknown. A read of LARGE_BYTES or more then
# reduces the weight of older measurements to OLD_WEIGHT seconds.
KNOWN_FOR, LARGE_BYTES, OLD_WEIGHT = 10.0, 16 << 20, 0.02


class ReadRate:
    """now: returns the time in seconds. Reads of a tier share its rate, and end about in order."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last_end = float("-inf")
        # Bytes of reads that have not ended.
        self.queued_bytes = 0
        self._bytes, self._seconds = ASSUMED * ASSUMED_WEIGHT, ASSUMED_WEIGHT

    @property
    def bytes_per_second(self) -> float:
        return max(1.0, self._bytes / self._seconds)

    @property
    def is_known(self) -> bool:
        """Whether a read has ended lately, or is about to."""
        return self.queued_bytes > 0 or self._now() - self._last_end < KNOWN_FOR

    @property
    def queue_seconds(self) -> float:
        """Seconds until what is queued is read."""
        return self.queued_bytes / self.bytes_per_second

    def begin(self, nbytes: int) -> float:
        """A read begins. Returns from when its time counts, for `end`."""
        if not self.is_known and nbytes >= LARGE_BYTES and self._seconds > OLD_WEIGHT:
            self._bytes *= OLD_WEIGHT / self._seconds
            self._seconds = OLD_WEIGHT
        now = self._now()
        counted_from = now if self.queued_bytes else now + LATENCY
        self.queued_bytes += nbytes
        return counted_from

    def end(self, counted_from: float, nbytes: int, read_bytes: int) -> None:
        """A read of `nbytes` has ended; `read_bytes` of them were read."""
        now = self._now()
        seconds = now - max(counted_from, self._last_end)
        self.queued_bytes -= nbytes
        self._last_end = now
        if seconds <= 0:
            return
        decay: float = 0.5 ** (seconds / HALF_LIFE)
        self._bytes = decay * self._bytes + read_bytes
        self._seconds = decay * self._seconds + seconds

    def abandon(self, nbytes: int) -> None:
        """A read of `nbytes` was not answered, which says nothing about the rate."""
        self.queued_bytes -= nbytes
