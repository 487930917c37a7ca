"""Borrowed keys: those whose blocks are loaded directly from the pool of a sibling.

A search in the tiers finds them (promotions.py). Nothing is held at the sibling: after the copy, a
load counts only if the sibling's block table still has the version of each block. Mirrors see the
keys as stored. After BORROWED_SECONDS the next search compares the versions, and forgets the keys
whose blocks have changed. A search that finds a key again replaces its place. Called by the core,
on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

import msgspec
import numpy as np

from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.layout import Int64s
from typing import Any as LentMemory
from kvferry.proto.keys import EventKind, Lookup, OffloadKey

# A request is scheduled within this time after its search. Meanwhile a sibling hardly evicts the
# block, which the search has marked as used; later it may have, and a load of it would fail.
BORROWED_SECONDS = 10.0
# Of one namespace; those found first are forgotten first.
MAX_BORROWED = 1 << 16
_ABSENT = None, Lookup.MISS


class BorrowedBlocks(msgspec.Struct, frozen=True, eq=False):
    """Blocks of siblings that a load reads. rows: see LentMemory."""

    memory: LentMemory
    keys: tuple[OffloadKey, ...]
    rows: Int64s

    def hold(self) -> None:
        self.memory.hold(self.rows)

    def release(self, block_bytes: int) -> None:
        self.memory.release(self.rows, block_bytes)

    def changed_keys(self) -> list[OffloadKey]:
        """The keys whose blocks may have had other bytes while they were read."""
        same = self.memory.unchanged(self.rows).tolist()
        return [key for key, kept in zip(self.keys, same, strict=True) if not kept]


class BorrowedKeys:
    """The borrowed keys of one namespace. memory: None if there are no siblings. cache: of the
    namespace; mirrors get no events about keys that it has."""

    def __init__(self, memory: LentMemory | None, cache: Cache) -> None:
        self._memory, self._cache = memory, cache
        # A row of LentMemory, and until when it is used; the oldest first.
        self._found: dict[OffloadKey, tuple[list[int], float]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(
        self,
        keys: Sequence[OffloadKey],
        places: Int64s,
        block_bytes: int,
        start: int,
        now: float,
    ) -> None:
        """Borrow those of these keys that can be loaded directly.

        places, block_bytes, start: see LentMemory.resolve.
        """
        if self._memory is None:
            return
        rows = self._memory.resolve(places, block_bytes, start)
        added = list[OffloadKey]()
        for key, row in zip(keys, rows.T.tolist(), strict=True):
            if row[0] >= 0:
                self._found.pop(key, None)
                self._found[key] = row, now + BORROWED_SECONDS
                added.append(key)
        self._add_events(EventKind.BORROWED, added)

    def expire(self, now: float) -> None:
        """Of the keys that were found too long ago, forget those whose blocks have changed."""
        surplus = max(0, len(self._found) - MAX_BORROWED)
        self.forget(list(islice(self._found, surplus)))
        late = [key for key, _ in takewhile(lambda each: each[1][1] <= now, self._found.items())]
        if late:
            self.forget(self.blocks_of(late).changed_keys())
            for key in late:
                if (found := self._found.pop(key, None)) is not None:
                    self._found[key] = found[0], now + BORROWED_SECONDS

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._found.pop(key, None)
        self._add_events(EventKind.ABANDONED, keys)

    def clear(self) -> None:
        self._found.clear()

    def blocks_of(self, keys: Sequence[OffloadKey]) -> BorrowedBlocks:
        """The blocks of borrowed keys."""
        assert self._memory is not None
        rows = np.array([self._found[key][0] for key in keys], np.int64).T
        return BorrowedBlocks(self._memory, tuple(keys), rows)

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

    def _add_events(self, kind: EventKind, keys: Sequence[OffloadKey]) -> None:
        if keys:
            states = zip(keys, self._cache.lookups(keys), strict=True)
            self._cache.events.add(kind, [key for key, state in states if state in _ABSENT])
