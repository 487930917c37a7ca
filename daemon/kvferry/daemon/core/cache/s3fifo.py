"""S3-FIFO: an eviction policy of two queues, in which a touch only counts.

New keys enter the small queue, at most half of the cache. At its end, a key that was used since
moves to the main queue; any other is evicted and leaves a ghost. If a key returns while its ghost
exists, it enters the main queue. At the end of the main queue, a key that was used since enters it
again, with one use less. J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP
2023, where the small queue has a tenth of the cache: a conversation returns later than that.

As in arc.py, the keys of an offer are inserted one by one, the last first, and none is evicted for
another; keys that must stay are skipped; a touch of a pending key is not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvferry.daemon.core.cache.key_index import KeyIndex
from kvferry.daemon.core.cache.policy import IdleFilter, idle_blocks
from kvferry.daemon.core.cache.remembered_keys import RememberedKeys
from kvferry.daemon.core.cache.use_order import UseOrder
from kvferry.proto.layout import Bools, Int64s

Uses: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

# Uses that are counted.
MAX_USES = 3


class S3FIFO:
    def __init__(self, capacity: int, index: KeyIndex, blocks: Int64s) -> None:
        self._index = index
        self._small_bound = max(1, capacity // 2)
        self._small, self._main = UseOrder(capacity), UseOrder(capacity)
        self._ghosts = RememberedKeys(capacity)
        # Of each block, since it entered its queue.
        self._uses = np.zeros(capacity, np.uint8)
        # Keys of the offer that is being inserted which had a ghost.
        self._returning = set[bytes]()
        self._small.append(blocks)

    def blocks(self) -> Int64s:
        return np.concatenate((self._small.numbers(), self._main.numbers()))

    def orders(self) -> tuple[UseOrder, ...]:
        return self._small, self._main

    def choose_victims(self, keys: Sequence[bytes], room: int, idle: IdleFilter) -> list[int]:
        self._returning = {key for key in keys if key in self._ghosts}
        self._ghosts.forget_keys(tuple(self._returning))
        queues = _Eviction(self._small, self._main, self._small_bound, self._uses, idle)
        for number, key in enumerate(reversed(keys)):
            if number >= room:
                queues.evict_one()
            if key in self._returning:
                queues.main_size += 1
            else:
                queues.small_size += 1
        queues.finish()
        self._ghosts.add_keys(self._index.keys_of(queues.evicted_small))
        return queues.evicted

    def insert_blocks(self, keys: Sequence[bytes], blocks: Int64s) -> None:
        returns = np.array([key in self._returning for key in reversed(keys)], np.bool_)
        self._uses[blocks] = 0
        self._small.append(blocks[::-1][~returns])
        self._main.append(blocks[::-1][returns])

    def touch_blocks(self, blocks: Int64s, pending: Bools) -> None:
        used = blocks[~pending]
        self._uses[used] = np.minimum(self._uses[used] + 1, MAX_USES)

    def remove_blocks(self, blocks: Int64s) -> None:
        small = self._small.contains(blocks)
        self._small.remove(blocks[small])
        self._main.remove(blocks[~small])

    def indexes(self) -> tuple[KeyIndex, ...]:
        return (self._ghosts.index,)

    def check_integrity(self) -> None:
        for part in (self._small, self._main, self._ghosts):
            part.check_integrity()
        ghosts = self._ghosts.keys()
        assert not any(key in self._index for key in ghosts), "a key with a block has a ghost"
        assert self._uses.max() <= MAX_USES, "more uses are counted than there are"


class _Eviction:
    """The evictions for one offer. The queues change in `finish`.

    small_size, main_size: the lengths of the queues; the caller adds the keys of the offer.
    """

    def __init__(
        self, small: UseOrder, main: UseOrder, small_bound: int, uses: Uses, idle: IdleFilter
    ) -> None:
        self._small, self._main, self._small_bound, self._uses = small, main, small_bound, uses
        self.small_size, self.main_size = len(small), len(main)
        self.evicted: list[int] = []
        self.evicted_small: list[int] = []
        self._idle_small, self._idle_main = idle_blocks(small, idle), idle_blocks(main, idle)
        # Blocks that enter the main queue, from either.
        self._entered = deque[int]()
        self._left_small: list[int] = []

    def evict_one(self) -> None:
        while True:
            small_gives = self.small_size >= self._small_bound or not self.main_size
            block = self._next_small() if small_gives else self._next_main()
            if block is None:
                small_gives = not small_gives
                block = self._next_small() if small_gives else self._next_main()
                assert block is not None, "the cache counted more idle blocks than there are"
            if small_gives:
                self._left_small.append(block)
                self.small_size -= 1
            if not self._uses[block]:
                self.evicted.append(block)
                if small_gives:
                    self.evicted_small.append(block)
                self.main_size -= not small_gives
                return
            if small_gives:
                self._uses[block] = 0
                self.main_size += 1
            else:
                self._uses[block] -= 1
            self._entered.append(block)

    def finish(self) -> None:
        self._small.remove(np.array(self._left_small, np.int64))
        evicted = np.array(self.evicted, np.int64)
        self._main.remove(evicted[self._main.contains(evicted)])
        self._main.append(np.array(self._entered, np.int64))

    def _next_small(self) -> int | None:
        return next(self._idle_small, None)

    def _next_main(self) -> int | None:
        block = next(self._idle_main, None)
        if block is None and self._entered:
            return self._entered.popleft()
        return block
