"""The interface of eviction policies.

A policy orders the blocks of a cache and chooses victims. It is called once per offer, and never
asked for more victims than there are idle blocks, because the cache counts first. Keys of an offer
are in the order offered, the head of a prefix first. The first key must end up most recent, so that
a prefix is evicted from its tail: process keys from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from kvferry.daemon.core.cache.key_index import KeyIndex
from kvferry.daemon.core.cache.use_order import UseOrder
from kvferry.proto.layout import Bools, Int64s

# Filters blocks: those that may be evicted.
IdleFilter: TypeAlias = Callable[[Int64s], Int64s]


class Policy(Protocol):
    def blocks(self) -> Int64s:
        """All blocks, the least recently used first as far as the policy knows."""

    def orders(self) -> tuple[UseOrder, ...]:
        """Its queues, which have all blocks together. Each is evicted from its least recent end."""

    def choose_victims(self, keys: Sequence[bytes], room: int, idle: IdleFilter) -> list[int]:
        """Remove the victims for an offer, one for each key beyond `room`, and return them.

        keys: distinct keys without a block, of which `insert_blocks` is called next. The victims
        still have their keys in the index.
        """

    def insert_blocks(self, keys: Sequence[bytes], blocks: Int64s) -> None:
        """The keys of the offer got these blocks."""

    def touch_blocks(self, blocks: Int64s, pending: Bools) -> None:
        """Mark distinct blocks as used, the last one most recently. pending: which of them are."""

    def remove_blocks(self, blocks: Int64s) -> None:
        """Remove blocks that lost their keys other than by eviction."""

    def indexes(self) -> tuple[KeyIndex, ...]:
        """The keys that it remembers, to be freed in steps; the policy is no longer used then."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent."""


def idle_blocks(order: UseOrder, idle: IdleFilter) -> Iterator[int]:
    """The idle blocks in an order, one at a time."""
    for blocks in order.oldest():
        yield from idle(blocks).tolist()
