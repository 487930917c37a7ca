"""How long a scheduler's lookups have found keys pending. In the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvferry.proto.keys import OffloadKey

# Keys whose first lookup is remembered; beyond that, the oldest are forgotten.
MAX_PENDING = 1 << 16


class PendingKeys:
    """timeout: seconds for which a key is waited for. clock: returns the time in seconds.

    `since` has, for each key, when a lookup found it pending first.
    """

    def __init__(
        self, timeout: float, clock: Callable[[], float], max_keys: int = MAX_PENDING
    ) -> None:
        self._timeout, self._clock, self._max_keys = timeout, clock, max_keys
        self.since: dict[OffloadKey, float] = {}

    def is_recent(self, key: OffloadKey) -> bool:
        """Whether a key that is pending now has been so for less than the timeout."""
        now, since = self._clock(), self.since
        if key not in since and len(since) >= self._max_keys:
            del since[next(iter(since))]
        return now - since.setdefault(key, now) <= self._timeout

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """These keys are not pending, or are stored by this scheduler."""
        for key in self.since.keys() & set(keys):
            del self.since[key]
