"""The read rate of a tier, measured from the fetches that it has answered."""

from __future__ import annotations

from collections.abc import Callable

# Bytes per second that are assumed of a tier before its first read.
ASSUMED = 1e9
# Part that older reads keep of their weight when another one ends.
DECAY = 0.8
# Seconds without a read until the assumed rate applies again: a tier that was slow for a while is
# not asked for anything, so that nothing else would show that it has recovered.
FORGET_AFTER = 30.0


class ReadRate:
    """now: returns the time in seconds. Reads of a tier share its rate, and end about in order."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._bytes = self._seconds = 0.0
        self._last_end = 0.0
        # Bytes of reads that have not ended.
        self.queued_bytes = 0

    @property
    def bytes_per_second(self) -> float:
        idle = not self.queued_bytes and self._now() - self._last_end > FORGET_AFTER
        if idle or not self._seconds:
            return ASSUMED
        return max(1.0, self._bytes / self._seconds)

    @property
    def queue_seconds(self) -> float:
        """Seconds until what is queued is read."""
        return self.queued_bytes / self.bytes_per_second

    def begin(self, nbytes: int) -> float:
        """A read begins. Returns its start, for `end`."""
        if not self.queued_bytes and self._now() - self._last_end > FORGET_AFTER:
            self._bytes = self._seconds = 0.0
        self.queued_bytes += nbytes
        return self._now()

    def end(self, begun: float, nbytes: int, read_bytes: int) -> None:
        """A read of `nbytes` that began then has ended; `read_bytes` of them were read."""
        now = self._now()
        seconds = now - max(begun, self._last_end)
        self.queued_bytes -= nbytes
        self._last_end = now
        self._bytes = DECAY * self._bytes + read_bytes
        self._seconds = DECAY * self._seconds + max(seconds, 1e-6)
