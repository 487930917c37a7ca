"""The keys that one session has pinned, and how often each.

A pin holds the block that the key has when it is pinned, whatever becomes of the key. Called by
namespaces.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.key_index import ShardedDict
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import OffloadKey

PINS_OF_A_BLOCK = 4
# A session may pin PINS_OF_A_BLOCK keys per block of its namespace, or this many.
LEAST_PINS = 1 << 16
# Keys that a session is expected to pin at once. More work, too.
EXPECTED_PINS = 1 << 16
# Pins that are released without a break when a session ends.
SOME = 1 << 14


class SessionPins:
    """The pins of one session. The oldest pin of a key is released first."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._max_pins = max(LEAST_PINS, PINS_OF_A_BLOCK * cache.usage.capacity)
        # Number of pins, including those of keys that were absent.
        self._count = 0
        # The block of the oldest pin of each key; -1 if the key was absent.
        self._oldest = ShardedDict(EXPECTED_PINS)
        # Further pins of a key, the oldest first: a block, its pins, the next block, its pins. A
        # deque of blocks takes seven times the memory, which a hostile client could exhaust.
        self._newer: dict[OffloadKey, list[int]] = {}

    def pin_keys(self, keys: Sequence[OffloadKey]) -> None:
        """Pin the loadable keys. An absent key is counted, and its load will fail.

        Raises Refused (BUSY) and pins none if the session would have too many pins.
        """
        if self._count + len(keys) > self._max_pins:
            raise Refused(
                Code.BUSY,
                f"pinning {len(keys)} more keys exceeds the {self._max_pins} of a session, which "
                f"has pinned {self._count}; unpin some first",
                len(keys),
            )
        self._count += len(keys)
        for key, block in zip(keys, self._cache.pin_loadable(keys), strict=True):
            oldest = self._oldest.shard_of(key)
            if key not in oldest:
                oldest[key] = block
            elif (newer := self._newer.setdefault(key, [])) and newer[-2] == block:
                newer[-1] += 1
            else:
                newer += block, 1

    def unpin_keys(self, keys: Sequence[OffloadKey]) -> None:
        """Unpin each key as often as it occurs.

        Raises Refused (NOT_PINNED) and unpins none if a key has fewer pins than that.
        """
        for key, times in Counter(keys).items():
            pinned = (key in self._oldest.shard_of(key)) + sum(self._newer.get(key, ())[1::2])
            if pinned < times:
                message = (
                    f"key {key.hex()} is unpinned {times} times, but this session has pinned it "
                    f"{pinned} times; unpin a key as often as it was pinned"
                )
                raise Refused(Code.NOT_PINNED, message, key.hex())
        self._count -= len(keys)
        self._cache.unpin_blocks([block for key in keys if (block := self._pop_oldest(key)) >= 0])

    def free_some(self) -> bool:
        """Release about SOME of the pins of a session that has ended. Return whether any are left.

        A million pins take seconds.
        """
        blocks, shards = list[int](), self._oldest.shards
        while shards and len(blocks) < SOME:
            blocks += shards.pop().values()
        while self._newer and len(blocks) < SOME:
            key, newer = self._newer.popitem()
            blocks += _take_oldest(newer, SOME)
            if newer:
                self._newer[key] = newer
        self._cache.unpin_blocks([block for block in blocks if block >= 0])
        return bool(shards or self._newer)

    def _pop_oldest(self, key: OffloadKey) -> int:
        oldest = self._oldest.shard_of(key)
        block = oldest.pop(key)
        if key in self._newer:
            newer = self._newer[key]
            (oldest[key],) = _take_oldest(newer, 1)
            if not newer:
                del self._newer[key]
        return block


def _take_oldest(pins: list[int], most: int) -> list[int]:
    """Remove the oldest pins of one block, `most` at most. Returns the block once for each."""
    block, count = pins[:2]
    taken = min(count, most)
    pins[1] -= taken
    if taken == count:
        del pins[:2]
    return [block] * taken
