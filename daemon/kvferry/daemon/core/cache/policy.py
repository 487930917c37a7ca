"""The interface of eviction policies.

A policy orders the keys of a cache and chooses victims; it does not know blocks. It is called once
per offer, and never asked for more victims than exist, because the cache counts first. Keys are in
the order offered or touched, the head of a prefix first. The first key must end up most recent, so
that a prefix is evicted from its tail: process keys from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from kvferry.daemon.core.cache.arc import ARC
from kvferry.daemon.core.cache.lru import LRU, Keys

# Filters keys: yields those that may be evicted.
EvictableFilter: TypeAlias = Callable[[Iterable[bytes]], Iterator[bytes]]


class Policy(Protocol):
    def __iter__(self) -> Iterator[bytes]:
        """All keys, least recent first as far as the policy knows."""

    def take_keys(self) -> Keys:
        """All keys in that order, for another policy; this one must not be used afterwards."""

    def key_tables(self) -> tuple[Keys, ...]:
        """All containers of keys, to be freed in steps; the policy must not be used afterwards."""

    def insert_keys(
        self, keys: Sequence[bytes], room: int, evictable: EvictableFilter
    ) -> list[bytes]:
        """Insert distinct new keys and return the victims: one for each key beyond `room`.

        evictable: yields the keys that may be evicted; there are enough of them.
        """

    def touch_keys(self, keys: Sequence[bytes], pending: Container[bytes]) -> None:
        """Mark keys as used. Those that the policy does not have are ignored."""

    def remove_keys(self, keys: Iterable[bytes]) -> None:
        """Remove keys whose store did not complete, ghosts included."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent."""


class PolicyFactory(Protocol):
    def __call__(self, capacity: int, keys: Keys | None = None) -> Policy:
        """Create a policy for a cache of this many blocks that contains these keys."""


# Policies by name.
POLICIES: dict[str, PolicyFactory] = {
    "lru": LRU,
    "arc": ARC,
}
