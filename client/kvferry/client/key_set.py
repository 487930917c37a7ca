"""A set of keys that is never rebuilt at once.

A set of a million keys that is added to and discarded from is rebuilt now and then, which takes
50 ms and more. So keys are spread over many small sets, by their hash. Used by the mirror, in the
client's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import chain

from kvferry.proto.keys import OffloadKey

# A power of two: a million keys are 4,000 in each.
SHARDS = 256
_MASK = SHARDS - 1


class KeySet(Set[OffloadKey]):
    """Read-only for the client's users; the mirror changes it."""

    def __init__(self) -> None:
        self.shards: list[set[OffloadKey]] = [set() for _ in range(SHARDS)]

    def __contains__(self, key: object) -> bool:
        return key in self.shards[hash(key) & _MASK]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __iter__(self) -> Iterator[OffloadKey]:
        return chain.from_iterable(self.shards)

    def missing_keys(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """Those of these keys that are not in the set. A request may have thousands."""
        shards = self.shards
        return {key for key in keys if key not in shards[hash(key) & _MASK]}

    def add_keys(self, keys: Iterable[OffloadKey]) -> None:
        shards = self.shards
        for key in keys:
            shards[hash(key) & _MASK].add(key)

    def discard_keys(self, keys: Iterable[OffloadKey]) -> None:
        shards = self.shards
        for key in keys:
            shards[hash(key) & _MASK].discard(key)

    def take_shards(self) -> list[set[OffloadKey]]:
        """Remove all keys. Returns the sets that have them, to be freed one by one."""
        shards, self.shards = self.shards, KeySet().shards
        return shards

    def different_keys(self, other: KeySet) -> Iterator[OffloadKey]:
        """The keys that are in one of the two sets."""
        for mine, theirs in zip(self.shards, other.shards, strict=True):
            yield from mine ^ theirs
