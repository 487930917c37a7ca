"""What decides who has to go.

A policy keeps the keys of a cache in an order of its own and names those that make room; it knows
nothing of blocks and moves none. It is asked in batches, one call an offer. It is never asked for
more than there is: the cache counts first, so a policy cannot fail and has nothing to undo.

Keys come as they were offered or touched, the head of a prefix first. The first of them shall end
up most recent, so that a prefix loses its tail before its head: work through them from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from kvferry.daemon.core.cache.arc import ARC
from kvferry.daemon.core.cache.lru import LRU, Keys

# Lets through the keys that may go.
EvictableFilter: TypeAlias = Callable[[Iterable[bytes]], Iterator[bytes]]


class Policy(Protocol):
    def __iter__(self) -> Iterator[bytes]:
        """All keys, least recent first as far as the policy knows."""

    def give_up(self) -> Keys:
        """All keys in that order, for another policy: this one is not asked any more."""

    def heaps(self) -> tuple[Keys, ...]:
        """All that it keeps keys in, for whoever takes it apart: it is not asked any more."""

    def admit(self, keys: Sequence[bytes], room: int, may_go: EvictableFilter) -> list[bytes]:
        """Take in new keys, all different, `room` of them for nothing. Returns who goes for the
        rest: one each, let through by `may_go`, and of those there are enough."""

    def touch(self, keys: Sequence[bytes], pending: Container[bytes]) -> None:
        """Keys were asked for. Those that the policy does not have are ignored."""

    def forget(self, keys: Iterable[bytes]) -> None:
        """Keys that it has were never stored after all; no trace of them stays."""

    def check_integrity(self) -> None:
        """AssertionError where its books disagree."""


class PolicyFactory(Protocol):
    def __call__(self, capacity: int, keys: Keys | None = None) -> Policy:
        """A policy for a cache of so many blocks, which has these keys, and takes them over."""


# Policies by name.
POLICIES: dict[str, PolicyFactory] = {
    "lru": LRU,
    "arc": ARC,
}
