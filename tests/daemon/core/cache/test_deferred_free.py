"""The keys of a cache that was reset are freed in steps."""

from __future__ import annotations

from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.cache.key_index import SHARD_KEYS, SOME, KeyIndex


def full_index(count: int) -> KeyIndex:
    index = KeyIndex(count)
    index.add_keys([number.to_bytes(4, "big") for number in range(count)], range(count))
    return index


def test_keys_are_freed_in_steps() -> None:
    deferred = DeferredFree(full_index(2 * SOME), KeyIndex(4), full_index(8 * SOME))
    steps = 1
    while deferred.free_some():
        steps += 1
    assert 10 <= steps <= 10 + 10 * SHARD_KEYS // SOME
    assert not deferred


def test_one_step_frees_a_bounded_number_of_keys() -> None:
    """From both tables of the index: each takes 100 ms for a million keys."""
    index = full_index(8 * SOME)
    keys, numbers = len(index._keys), len(index._numbers)
    while index.free_some():
        assert len(index._keys) == max(0, keys - SOME)
        assert min(SOME, numbers) <= numbers - len(index._numbers) < SOME + 2 * SHARD_KEYS
        keys, numbers = len(index._keys), len(index._numbers)


def test_an_empty_index_needs_no_freeing() -> None:
    assert not DeferredFree(KeyIndex(4))
    assert not DeferredFree().free_some()
