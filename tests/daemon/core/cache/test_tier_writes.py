"""When a tier that found nothing to write looks again: after each change of the policy's queues."""

from __future__ import annotations

from kvferry.daemon.core.cache.cache import Cache
from support.letter_caches import keys, store

TIER = 0


def new_cache(capacity: int, policy: str) -> Cache:
    cache = Cache(capacity, policy, min_uses=[1])
    for letter in "abcdefgh":
        store(cache, letter)
    cache.tier_access.mark_committed(cache.entries())
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
    cache.discard_keys(cache.entries()[:1])
    assert write(cache) == b"c"


def test_a_key_that_is_the_coldest_for_another_policy_is_written() -> None:
    """ARC writes the coldest of each of its lists, LRU the two coldest of all."""
    cache = new_cache(24, "arc")
    cache.touch(keys("dcba"))
    assert [write(cache) for _ in range(2)] == [b"abcde", b""]
    cache.configure("lru", store_threshold=1)
    assert write(cache) == b"f"
