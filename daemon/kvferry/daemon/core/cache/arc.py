"""ARC: an eviction policy that balances recency and frequency by the misses it sees.

Keys requested once are in the recent list, keys requested again in the frequent list; `target` is
the desired length of the recent list. An evicted key leaves a ghost in the ghost list of its side.
If a key returns while its ghost exists, it was evicted too early: the target moves in favour of
that side, and the key is inserted into the frequent list. N. Megiddo and D. S. Modha, "ARC: A
Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.

It differs from the paper, in which a request has one key and every key may be evicted:

- Each ghost list has up to as many keys as the cache has blocks (paper: both lists of a side
  together), as in vLLM. On conversations that hits more.
- The keys of an offer are inserted one by one, the last first. None is evicted for another.
- Keys that must stay are skipped. If all keys of a list must stay, the other list gives the victim.
- After an offer, the oldest ghosts beyond the bound are dropped.
- A touch of a pending key does not move it to the frequent list: it is the same request.
- A failed store leaves no ghost, because no lookup could have found the key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.daemon.core.cache.key_index import KeyIndex
from kvferry.daemon.core.cache.policy import IdleFilter, idle_blocks
from kvferry.daemon.core.cache.remembered_keys import RememberedKeys
from kvferry.daemon.core.cache.use_order import UseOrder
from kvferry.proto.layout import Bools, Int64s


class ARC:
    def __init__(self, capacity: int, index: KeyIndex, blocks: Int64s) -> None:
        self._capacity, self._index = capacity, index
        self._target = 0.0
        self._recent, self._frequent = UseOrder(capacity), UseOrder(capacity)
        self._recent_ghosts, self._frequent_ghosts = (
            RememberedKeys(capacity),
            RememberedKeys(capacity),
        )
        # Keys of the offer that is being inserted which had a ghost.
        self._returning = set[bytes]()
        self._recent.append(blocks)

    def blocks(self) -> Int64s:
        return np.concatenate((self._recent.numbers(), self._frequent.numbers()))

    def orders(self) -> tuple[UseOrder, ...]:
        return self._recent, self._frequent

    def choose_victims(self, keys: Sequence[bytes], room: int, idle: IdleFilter) -> list[int]:
        self._returning = returning = set[bytes]()
        recent_ghosts, frequent_ghosts = len(self._recent_ghosts), len(self._frequent_ghosts)
        recent, frequent = idle_blocks(self._recent, idle), idle_blocks(self._frequent, idle)
        size, victims = len(self._recent), list[int]()
        from_recent, from_frequent = list[int](), list[int]()
        for number, key in enumerate(reversed(keys)):
            was_frequent = key in self._frequent_ghosts
            if was_frequent:
                self._target = max(0.0, self._target - max(1.0, recent_ghosts / frequent_ghosts))
                frequent_ghosts -= 1
                returning.add(key)
            elif key in self._recent_ghosts:
                self._target += max(1.0, frequent_ghosts / recent_ghosts)
                self._target = min(self._capacity, self._target)
                recent_ghosts -= 1
                returning.add(key)
            if number >= room:
                recent_gives = size > self._target or (was_frequent and size == self._target)
                block = next(recent if recent_gives else frequent, None)
                if block is None:
                    recent_gives = not recent_gives
                    block = next(recent if recent_gives else frequent)
                victims.append(block)
                (from_recent if recent_gives else from_frequent).append(block)
                size -= recent_gives
                recent_ghosts += recent_gives
                frequent_ghosts += not recent_gives
            size += key not in returning
        self._move_to_ghosts(from_recent, self._recent, self._recent_ghosts)
        self._move_to_ghosts(from_frequent, self._frequent, self._frequent_ghosts)
        return victims

    def insert_blocks(self, keys: Sequence[bytes], blocks: Int64s) -> None:
        returns = np.array([key in self._returning for key in reversed(keys)], np.bool_)
        self._recent.append(blocks[::-1][~returns])
        self._frequent.append(blocks[::-1][returns])

    def touch_blocks(self, blocks: Int64s, pending: Bools) -> None:
        recent = self._recent.contains(blocks)
        same_request = recent & pending
        self._recent.append(blocks[same_request])
        self._recent.remove(blocks[recent & ~pending])
        self._frequent.append(blocks[~same_request])

    def remove_blocks(self, blocks: Int64s) -> None:
        recent = self._recent.contains(blocks)
        self._recent.remove(blocks[recent])
        self._frequent.remove(blocks[~recent])

    def indexes(self) -> tuple[KeyIndex, ...]:
        return self._recent_ghosts.index, self._frequent_ghosts.index

    def check_integrity(self) -> None:
        for part in (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts):
            part.check_integrity()
        assert 0 <= self._target <= self._capacity, "the target of ARC exceeds the capacity"
        ghosts = [*self._recent_ghosts.keys(), *self._frequent_ghosts.keys()]
        assert len(set(ghosts)) == len(ghosts), "a key is in both ghost lists of ARC"
        assert not any(key in self._index for key in ghosts), "a key with a block has a ghost"

    def _move_to_ghosts(self, victims: list[int], order: UseOrder, ghosts: RememberedKeys) -> None:
        """Remove victims from their list. The keys of the offer that return have no ghost now."""
        ghosts.forget_keys(tuple(self._returning))
        order.remove(np.array(victims, np.int64))
        ghosts.add_keys(self._index.keys_of(victims))
