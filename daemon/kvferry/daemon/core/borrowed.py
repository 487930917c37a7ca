"""Borrowed keys: those whose blocks are loaded directly from the pool of a sibling.

A search of the namespace finds them (promotions.py), before any tier is asked. Nothing is held at
the sibling: after the copy, a load counts only if the sibling's block table still has the version
of each block. Mirrors see the keys as stored.

A search names the whole prefix of a request. It refreshes each of its keys that is still there, and
forgets the others. BORROWED_SECONDS after that, keys whose blocks have changed are forgotten.
Called by the core, on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import islice, takewhile

import msgspec
import numpy as np

from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.core.siblings import NamespaceContents, Siblings
from kvferry.proto.keys import EventKind, Lookup, OffloadKey

# A request is scheduled within this time after its search. Meanwhile a sibling hardly evicts the
# block, which the search has marked as used; later it may have, and a load of it would fail.
BORROWED_SECONDS = 10.0
# Of one namespace; those found first are forgotten first.
MAX_BORROWED = 1 << 16
_ABSENT = None, Lookup.MISS


class BorrowedBlocks(msgspec.Struct, frozen=True, eq=False):
    """Blocks of siblings that a load reads. rows: see Siblings."""

    siblings: Siblings
    contents: NamespaceContents
    keys: tuple[OffloadKey, ...]
    rows: Int64s

    def hold(self) -> None:
        self.siblings.hold(self.rows)

    def release(self, *, done: bool) -> None:
        """The load has ended, which is a use of the blocks if it is done."""
        if done:
            self.siblings.note_uses(self.contents, self.rows, self.keys)
        self.siblings.release(self.rows, self.contents.block_bytes if done else 0)

    def changed_keys(self) -> list[OffloadKey]:
        """The keys whose blocks may have had other bytes while they were read."""
        same = self.siblings.unchanged(self.rows).tolist()
        return [key for key, kept in zip(self.keys, same, strict=True) if not kept]


class BorrowedKeys:
    """The borrowed keys of one namespace. cache: of the namespace; mirrors get no events about keys
    that it has."""

    def __init__(self, siblings: Siblings, cache: Cache) -> None:
        self._siblings, self._cache = siblings, cache
        # A row of Siblings, and until when it is used; the oldest first.
        self._found: dict[OffloadKey, tuple[list[int], float]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def search(
        self, contents: NamespaceContents | None, keys: Sequence[OffloadKey], now: float
    ) -> None:
        """Borrow those of these keys that the cache does not have and a sibling has.

        contents: None before any registration. now: time.monotonic() in seconds.
        """
        self.expire(now)
        if contents is None or not self._siblings.is_enabled:
            return
        states = zip(keys, self._cache.lookups(keys), strict=True)
        absent = list(dict.fromkeys(key for key, state in states if state in _ABSENT))
        if not absent:
            return
        rows = self._siblings.find(contents, absent)
        places = np.flatnonzero(rows[0] >= 0)
        found = {absent[place]: rows[:, place].tolist() for place in places.tolist()}
        if self._found:  # of those that are not found again, the blocks may be there all the same
            lost = [key for key in absent if key in self._found and key not in found]
            self._keep_unchanged({key: self._found.pop(key)[0] for key in lost}, now)
        if not found:
            return
        added = [key for key in found if self._found.pop(key, None) is None]
        self._found.update((key, (row, now + BORROWED_SECONDS)) for key, row in found.items())
        self._add_events(EventKind.BORROWED, added)
        self.forget(list(islice(self._found, max(0, len(self._found) - MAX_BORROWED))))
        self._siblings.note_uses(contents, rows[:, places], list(found))

    def held_elsewhere(
        self, contents: NamespaceContents | None, keys: Sequence[OffloadKey]
    ) -> Set[OffloadKey]:
        """Those of these keys that a store leaves out, because a sibling has them."""
        if contents is None or not self._siblings.stores_once:
            return frozenset()
        held = self._siblings.find(contents, keys)[0] >= 0
        return {keys[place] for place in np.flatnonzero(held).tolist()}

    def expire(self, now: float) -> None:
        """Of the keys that were refreshed too long ago, forget those whose blocks have changed."""
        late = takewhile(lambda each: each[1][1] <= now, self._found.items())
        rows = {key: row for key, (row, _) in late}
        for key in rows:
            del self._found[key]
        self._keep_unchanged(rows, now)

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._found.pop(key, None)
        self._add_events(EventKind.ABANDONED, keys)

    def forget_all(self) -> None:
        """The namespace has other contents: what siblings have is not exchangeable."""
        self.forget([*self._found])

    def clear(self) -> None:
        self._found.clear()

    def blocks_of(self, contents: NamespaceContents, keys: Sequence[OffloadKey]) -> BorrowedBlocks:
        """The blocks of borrowed keys."""
        rows = np.array([self._found[key][0] for key in keys], np.int64).T
        return BorrowedBlocks(self._siblings, contents, tuple(keys), rows)

    def places(self, keys: Sequence[OffloadKey]) -> list[int]:
        """The places of the keys that a load must read from siblings: the cache has no hit."""
        if not self._found:
            return []
        return [
            place
            for place, (key, state) in enumerate(zip(keys, self._cache.lookups(keys), strict=True))
            if state is not Lookup.HIT and key in self._found
        ]

    def add_to(
        self, keys: Sequence[OffloadKey], states: list[Lookup | None]
    ) -> list[Lookup | None]:
        """The lookups of keys in the cache, with those of borrowed keys."""
        if not self._found:
            return states
        return [
            Lookup.HIT if key in self._found else state
            for key, state in zip(keys, states, strict=True)
        ]

    def _keep_unchanged(self, rows: dict[OffloadKey, list[int]], now: float) -> None:
        """Borrow keys on whose blocks have not changed, and forget the others."""
        if not rows:
            return
        same = self._siblings.unchanged(np.array(list(rows.values()), np.int64).T).tolist()
        for (key, row), kept in zip(rows.items(), same, strict=True):
            if kept:
                self._found[key] = row, now + BORROWED_SECONDS
        self.forget([key for key, kept in zip(rows, same, strict=True) if not kept])

    def _add_events(self, kind: EventKind, keys: Sequence[OffloadKey]) -> None:
        if keys:
            states = zip(keys, self._cache.lookups(keys), strict=True)
            self._cache.events.add(kind, [key for key, state in states if state in _ABSENT])
