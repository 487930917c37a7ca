"""The cache by example, with each policy. tests/property compares it with a model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.cache_events import CacheEvent
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import EventKind, Lookup
from support.cached_keys import entries_of, find_key, pending_keys, ready_keys
from support.letter_caches import keys, ready, reserve, store

HIT, MISS, HIT_PENDING = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING
PENDING, STORED, REMOVED = EventKind.PENDING, EventKind.STORED, EventKind.REMOVED


def test_a_key_is_absent_then_pending_then_ready(cache: Cache) -> None:
    assert find_key(cache, b"a") is MISS
    reservation = reserve(cache, "a")
    assert find_key(cache, b"a") is HIT_PENDING
    assert (pending_keys(cache), ready_keys(cache)) == ([b"a"], [])
    cache.complete_store(reservation, success=True)
    assert find_key(cache, b"a") is HIT
    assert (pending_keys(cache), ready_keys(cache)) == ([], [b"a"])


def test_pinned_pending_and_offered_keys_are_not_evicted(cache: Cache) -> None:
    reserve(cache, "d")
    store(cache, "abc")
    pins = cache.prepare_load([b"b"])
    reservation = reserve(cache, "cx")  # only a can be evicted
    assert (reservation.keys, reservation.evicted) == ((b"x",), (b"a",))
    cache.complete_load(pins)
    assert reserve(cache, "y").evicted in ((b"b",), (b"c",))
    cache.check_integrity()


def test_a_failed_store_frees_its_blocks_and_its_victims_stay_evicted(cache: Cache) -> None:
    store(cache, "abcd")
    failed = reserve(cache, "xy")
    cache.complete_store(failed, success=False)
    assert find_key(cache, b"x") is MISS
    assert (cache.usage.free, cache.usage.pending, cache.usage.ready) == (2, 0, 2)
    assert set(ready(cache)) == set("abcd") - {key.decode() for key in failed.evicted}
    assert reserve(cache, "xy").evicted == ()


def test_a_block_stays_until_its_last_load_has_ended(cache: Cache) -> None:
    store(cache, "abcd")
    first, second = cache.prepare_load(keys("abcd")), cache.prepare_load(keys("ad"))
    cache.complete_load(first)
    assert set(reserve(cache, "xy").evicted) == {b"b", b"c"}
    assert cache.prepare_store([b"z"]) is None
    cache.complete_load(second)
    assert reserve(cache, "z").evicted[0] in (b"a", b"d")


@pytest.mark.parametrize(
    ("letter", "hint"), [("x", "not in the cache"), ("p", "still being stored")]
)
def test_a_load_with_an_absent_or_pending_key_is_refused_and_pins_nothing(
    cache: Cache, letter: str, hint: str
) -> None:
    store(cache, "ab")
    reserve(cache, "p")
    with pytest.raises(Refused, match=hint) as caught:
        cache.prepare_load(keys("a" + letter + "b"))
    assert (caught.value.code, caught.value.value) == (Code.KEY_ABSENT, letter.encode().hex())
    assert cache.usage.pinned == 0
    cache.check_integrity()


def test_each_event_is_taken_once_in_order(cache: Cache) -> None:
    store(cache, "abcd")
    failed = reserve(cache, "xy")
    cache.complete_store(failed, success=False)
    cache.prepare_store(keys("abcdefgh"))
    cache.reset(1)
    assert cache.events.take() == [
        CacheEvent(PENDING, tuple(keys("abcd"))),
        CacheEvent(STORED, tuple(keys("abcd"))),
        CacheEvent(REMOVED, failed.evicted),
        CacheEvent(PENDING, tuple(keys("xy"))),
        CacheEvent(EventKind.ABANDONED, tuple(keys("xy"))),
        CacheEvent(EventKind.CLEARED, ()),
    ]
    assert cache.events.take() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"policy": "mru"}, "unknown eviction policy 'mru'; use lru or arc"),
        ({"store_threshold": 0}, "store_threshold is 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cache(**{"capacity": 4, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c._blocks.index.remove_numbers([1]), "have a key"),
        (lambda c: c._blocks.policy.remove_blocks(np.array([1])), "the policy has other"),
        (lambda c: c._blocks.store_order.remove(np.array([1])), "the order has other"),
        (lambda c: c.table.drop(np.array([2])), "have a key"),
        (lambda c: c._blocks._free.pop_blocks(1), "other blocks are free"),
        (lambda c: c.table.release(np.array([0, 0])), "more often than"),
    ],
)
def test_the_integrity_check_finds_inconsistent_state(
    policy: str, damage: Callable[[Cache], object], message: str
) -> None:
    cache = Cache(6, policy)
    reserve(cache, "p")
    cache.reset(1)
    store(cache, "ab")
    reserve(cache, "p")
    cache.prepare_load(keys("a"))
    cache.check_integrity()
    damage(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


@pytest.mark.parametrize("touched", ["b", "bda"])
def test_a_change_of_policy_keeps_all_keys_in_their_order(touched: str) -> None:
    cache = Cache(6, "arc")
    store(cache, "abcd")
    pending = reserve(cache, "e")
    cache.touch(keys(touched))
    cache.prepare_load([b"c"])
    before, order = (cache.usage, cache.counts.copy()), entries_of(cache)
    for name in ("lru", "arc", "lru"):
        cache.configure(name, 1)
        assert ready(cache) == "abcd"
        assert ((cache.usage, cache.counts), entries_of(cache)) == (before, order)
    cache.complete_store(pending, success=True)
    assert ready(cache) == "abcde"


def test_another_threshold_clears_the_counts_of_offers() -> None:
    cache = Cache(4, "lru", 3)
    assert reserve(cache, "a").keys == ()
    cache.configure("lru", 2)
    assert reserve(cache, "a").keys == ()
    assert reserve(cache, "a").keys == (b"a",)
