"""Searches below the host pool that the daemon has not answered.

A key of such a search is a RETRY instead of a MISS, until the answer or the search's deadline. The
keys are requested in parts, one after the other: the next one only if the last was found whole.
Called in the client's thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import MAX_KEYS

# Seconds for which lookups wait for an answer to one part. It takes milliseconds, and a tenth of a
# second if a tier does not answer the daemon.
SEARCH_TIMEOUT = 0.25


@dataclass(eq=False, slots=True)
class TierSearch:
    """A search for keys, in prefix order.

    found: how many of them, from the first on, are loadable, pending or being promoted; None until
    the daemon has answered, 0 if it did not. Keys that are promoted are pending until then.
    compute_seconds: see FindInTiers. deadline: for the answer to the requested part. known: how
    many were found in the parts that are answered. promoted: whether any of them is read from a
    tier; otherwise all are in host memory.
    """

    keys: tuple[OffloadKey, ...]
    deadline: float = 0.0
    compute_seconds: float = 0.0
    found: int | None = None
    known: int = 0
    promoted: bool = False

    @property
    def part(self) -> tuple[OffloadKey, ...]:
        """The keys to request next."""
        return self.keys[self.known : self.known + MAX_KEYS]

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
    def promotes(self) -> bool:
        """Whether any of the found keys is read from a tier."""
        return any(search.promoted for search in self.searches)

    @property
    def found_keys(self) -> tuple[OffloadKey, ...]:
        """The keys that were found on all ranks that searched for them: promoted, or pending or
        loadable by then."""
        lost = {key for search in self.searches for key in search.keys[len(search.found_keys) :]}
        found = (key for search in self.searches for key in search.found_keys if key not in lost)
        return tuple(dict.fromkeys(found))


class TierSearches:
    """The searches of one session."""

    def __init__(self) -> None:
        self._unanswered: dict[int, TierSearch] = {}
        self._keys: Counter[OffloadKey] = Counter()
        # Searches of which another part must be requested.
        self._continuing: list[TierSearch] = []

    def begin(self, request_id: int, search: TierSearch) -> None:
        """A part of a search is requested."""
        self._unanswered[request_id] = search
        if not search.known:
            self._keys.update(search.keys)

    def answer(self, request_id: int, found: int, promoted: int = 0) -> None:
        """The daemon has answered a part. Searches that have expired are ignored."""
        search = self._unanswered.get(request_id)
        if search is None:
            return
        search.promoted |= promoted > 0
        number = len(search.part)
        search.known += min(found, number)
        if found < number or not search.part:
            self.end(request_id)
        else:
            self._continuing.append(self._unanswered.pop(request_id))

    def take_continuing(self) -> list[TierSearch]:
        """Searches whose next part must be requested now."""
        taken, self._continuing = self._continuing, []
        return taken

    def end(self, request_id: int) -> None:
        """A search has ended, or the daemon has refused it."""
        search = self._unanswered.pop(request_id, None)
        if search is not None:
            self._end_search(search)

    def _end_search(self, search: TierSearch) -> None:
        search.found = search.known
        for key in search.keys:
            if self._keys[key] > 1:
                self._keys[key] -= 1
            else:
                del self._keys[key]

    def end_all(self) -> None:
        """The connection is lost."""
        for request_id in tuple(self._unanswered):
            self.end(request_id)
        for search in self.take_continuing():
            self._end_search(search)

    def is_searched(self, key: OffloadKey, now: float) -> bool:
        """Whether an unanswered search has this key. now: time.monotonic() in seconds."""
        if key not in self._keys:
            return False
        for request_id, search in tuple(self._unanswered.items()):  # the oldest first
            if search.deadline > now:
                break
            self.end(request_id)
        return key in self._keys
