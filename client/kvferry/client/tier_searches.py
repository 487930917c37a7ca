"""Searches below the host pool that the daemon has not answered.

A key of such a search is a RETRY instead of a MISS, until the answer or the search's deadline.
Called in the client's thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvferry.proto.keys import OffloadKey

# Seconds for which lookups wait for an answer. It takes milliseconds, and a tenth of a second if a
# tier does not answer the daemon.
SEARCH_TIMEOUT = 0.25


@dataclass(eq=False, slots=True)
class TierSearch:
    """A search for keys, in prefix order.

    found: how many of them, from the first on, are loadable, pending or being promoted; None until
    the daemon has answered, 0 if it did not. Keys that are promoted are pending until then.
    """

    keys: tuple[OffloadKey, ...]
    deadline: float = 0.0
    found: int | None = None

    @property
    def found_keys(self) -> tuple[OffloadKey, ...]:
        return self.keys[: self.found or 0]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The searches of one `prefetch`, one per rank."""

    searches: tuple[TierSearch, ...] = ()

    @property
    def done(self) -> bool:
        """Whether all daemons have answered. Their answers arrive while the manager is polled."""
        return all(search.found is not None for search in self.searches)

    @property
    def found_keys(self) -> tuple[OffloadKey, ...]:
        """The keys that were found on all ranks: promoted, or pending or loadable by then."""
        return min((search.found_keys for search in self.searches), key=len, default=())


class TierSearches:
    """The searches of one session."""

    def __init__(self) -> None:
        self._unanswered: dict[int, TierSearch] = {}
        self._keys: Counter[OffloadKey] = Counter()

    def begin(self, request_id: int, search: TierSearch) -> None:
        self._unanswered[request_id] = search
        self._keys.update(search.keys)

    def end(self, request_id: int, found: int = 0) -> None:
        """The daemon has answered, or refused. Searches that have expired are ignored."""
        search = self._unanswered.pop(request_id, None)
        if search is None:
            return
        search.found = min(found, len(search.keys))
        for key in search.keys:
            if self._keys[key] > 1:
                self._keys[key] -= 1
            else:
                del self._keys[key]

    def end_all(self) -> None:
        """The connection is lost."""
        for request_id in tuple(self._unanswered):
            self.end(request_id)

    def is_searched(self, key: OffloadKey, now: float) -> bool:
        """Whether an unanswered search has this key. now: time.monotonic() in seconds."""
        if key not in self._keys:
            return False
        for request_id, search in tuple(self._unanswered.items()):  # the oldest first
            if search.deadline > now:
                break
            self.end(request_id)
        return key in self._keys
