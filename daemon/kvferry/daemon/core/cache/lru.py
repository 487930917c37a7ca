"""LRU: evicts the least recently used key. Insertion and touch are uses; a completed job is not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvferry.daemon.core.cache.policy import EvictableFilter

# Least recent first.
Keys: TypeAlias = "OrderedDict[bytes, None]"


class LRU:
    def __init__(self, capacity: int, keys: Keys | None = None) -> None:
        self._capacity = capacity
        self._keys: Keys = OrderedDict() if keys is None else keys

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def take_keys(self) -> Keys:
        return self._keys

    def key_tables(self) -> tuple[Keys, ...]:
        return (self._keys,)

    def insert_keys(
        self, keys: Sequence[bytes], room: int, evictable: EvictableFilter
    ) -> list[bytes]:
        mine = self._keys
        victims = list(islice(evictable(mine), max(0, len(keys) - room)))
        for key in victims:
            del mine[key]
        for key in reversed(keys):
            mine[key] = None
        return victims

    def touch_keys(self, keys: Sequence[bytes], pending: Container[bytes]) -> None:
        mine = self._keys
        for key in reversed(keys):
            if key in mine:
                mine.move_to_end(key)

    def remove_keys(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            del self._keys[key]

    def check_integrity(self) -> None:
        assert len(self._keys) <= self._capacity, "LRU has more keys than the cache has blocks"
