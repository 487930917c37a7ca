"""LRU: evicts the least recently used key. Insertion and touch are uses; a completed job is not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvferry.daemon.core.cache.key_index import KeyIndex
from kvferry.daemon.core.cache.policy import IdleFilter, idle_blocks
from kvferry.daemon.core.cache.use_order import UseOrder
from kvferry.proto.layout import Bools, Int64s


class LRU:
    def __init__(self, capacity: int, index: KeyIndex, blocks: Int64s) -> None:
        del index  # no ghosts
        self._order = UseOrder(capacity)
        self._order.append(blocks)

    def blocks(self) -> Int64s:
        return self._order.numbers()

    def orders(self) -> tuple[UseOrder, ...]:
        return (self._order,)

    def choose_victims(self, keys: Sequence[bytes], room: int, idle: IdleFilter) -> list[int]:
        victims = list(islice(idle_blocks(self._order, idle), max(0, len(keys) - room)))
        self._order.remove(np.array(victims, np.int64))
        return victims

    def insert_blocks(self, keys: Sequence[bytes], blocks: Int64s) -> None:
        self._order.append(blocks[::-1])

    def touch_blocks(self, blocks: Int64s, pending: Bools) -> None:
        self._order.append(blocks)

    def remove_blocks(self, blocks: Int64s) -> None:
        self._order.remove(blocks)

    def indexes(self) -> tuple[KeyIndex, ...]:
        return ()

    def check_integrity(self) -> None:
        self._order.check_integrity()
