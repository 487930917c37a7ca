"""Which keys of a cache are written into a tier, and when a tier looks for them again."""

from __future__ import annotations

import numpy as np

from kvferry.daemon.core.block_table import BlockTable
from kvferry.daemon.core.cache.cache import Cache
from support.cached_keys import entries_of
from support.committed_blocks import commit_all, next_table, store_blocks
from support.letter_caches import keys, reserve, store

TIER = 0


def new_cache(capacity: int, policy: str) -> Cache:
    cache = Cache(capacity, policy, min_uses=[1])
    for letter in "abcdefgh":
        store(cache, letter)
    commit_all(cache.table)
    return cache


def write(cache: Cache) -> bytes:
    """Write the coldest quarter of each queue into the tier. Returns the keys."""
    letters, blocks = cache.tier_access.take_writes(TIER, 16, 0.25)
    if blocks.size:
        cache.tier_access.end_writes(TIER, blocks, blocks >= 0)
    return b"".join(letters)


def test_a_key_that_becomes_the_coldest_by_a_discard_is_written() -> None:
    cache = new_cache(8, "lru")
    assert [write(cache) for _ in range(2)] == [b"ab", b""]
    cache.discard_blocks(np.array([entries_of(cache)[0][1]]))
    assert write(cache) == b"c"


def test_a_key_that_is_the_coldest_for_another_policy_is_written() -> None:
    """ARC writes the coldest of each of its lists, LRU the two coldest of all."""
    cache = new_cache(24, "arc")
    cache.touch(keys("dcba"))
    assert [write(cache) for _ in range(2)] == [b"abcde", b""]
    cache.configure("lru", store_threshold=1)
    assert write(cache) == b"f"


def test_restored_keys_are_written_from_the_head_of_a_prompt_on() -> None:
    table = BlockTable(16, 1)
    store_blocks(table, [0, 1, 2], [b"a", b"b", b"c"])  # the tail of a prompt is least recent
    cache = Cache(16, min_uses=[1], table=next_table(table, 1))
    cache.restore_keys(1)
    cache.mark_verified(np.array([0, 1, 2]))
    assert cache.tier_access.take_writes(TIER, 3, 1.0)[0] == [b"a", b"b", b"c"]


def test_a_touch_of_a_pending_key_does_not_count_as_a_use() -> None:
    cache = Cache(4, min_uses=[2])
    reservation = reserve(cache, "a")
    cache.touch([b"a"])
    cache.complete_store(reservation, success=True)
    commit_all(cache.table)
    assert write(cache) == b""
    cache.touch([b"a"])
    assert write(cache) == b"a"


def test_only_whole_keys_count_as_unwritten() -> None:
    cache = Cache(2, min_uses=[1])
    part = cache.prepare_store([b"a"], {b"a": (0, 1)})
    assert part is not None
    cache.complete_store(part, success=True)
    store(cache, "b")
    store(cache, "xy")
    assert cache.tier_access.unwritten == [1]
