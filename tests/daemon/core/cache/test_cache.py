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


def test_keys_to_store_are_in_the_order_of_the_offer_and_have_a_block_each(cache: Cache) -> None:
    reservation = reserve(cache, "cab")
    assert reservation.keys == (b"c", b"a", b"b")
    assert len(set(reservation.blocks)) == 3
    assert set(reservation.blocks) <= set(range(4))
    assert reservation.evicted == ()


def test_ready_pending_and_duplicate_keys_are_not_stored_again(cache: Cache) -> None:
    store(cache, "a")
    reserve(cache, "b")
    assert reserve(cache, "cabcc").keys == (b"c",)
    assert cache.usage.free == 1


def test_an_offer_with_nothing_to_store_gets_an_empty_reservation(cache: Cache) -> None:
    store(cache, "abcd")
    for letters in ("", "abcd"):
        reservation = reserve(cache, letters)
        assert (reservation.keys, reservation.blocks, reservation.evicted) == ((), (), ())
        cache.complete_store(reservation, success=False)
    assert ready(cache) == "abcd"


def test_new_keys_get_the_blocks_of_the_evicted_keys(cache: Cache) -> None:
    first = store(cache, "abcd")
    second = store(cache, "xy")
    block_of = dict(zip(first.keys, first.blocks, strict=True))
    assert {block_of[key] for key in second.evicted} == set(second.blocks)
    assert all(find_key(cache, key) is MISS for key in second.evicted)
    assert len(second.evicted) == 2


def test_pinned_pending_and_offered_keys_are_not_evicted(cache: Cache) -> None:
    reserve(cache, "d")
    store(cache, "abc")
    pins = cache.prepare_load([b"b"])
    reservation = reserve(cache, "cx")  # only a can be evicted
    assert (reservation.keys, reservation.evicted) == ((b"x",), (b"a",))
    cache.complete_load(pins)
    assert reserve(cache, "y").evicted in ((b"b",), (b"c",))
    cache.check_integrity()


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(lambda c: c.prepare_load(keys("abc")), id="pinned"),
        pytest.param(lambda c: c.prepare_store(keys("efg")), id="pending"),
    ],
)
def test_without_enough_room_nothing_is_reserved_and_nothing_changes(
    cache: Cache, prepare: Callable[[Cache], object]
) -> None:
    store(cache, "abcd")
    prepare(cache)
    cache.events.take()
    before, counts, order = cache.usage, cache.counts.copy(), entries_of(cache)
    assert cache.prepare_store(keys("xy")) is None
    assert entries_of(cache) == order
    assert cache.events.take() == []
    assert cache.usage == before
    assert cache.counts - counts == {"stores_skipped": 2}
    assert len(reserve(cache, "x").evicted) == 1


def test_a_pending_key_is_neither_discarded_nor_verified(cache: Cache) -> None:
    reservation = reserve(cache, "a")
    blocks = np.array(reservation.blocks)
    cache.discard_blocks(blocks)
    cache.mark_verified(blocks)
    assert find_key(cache, b"a") is HIT_PENDING


def test_more_keys_than_blocks_are_never_reserved(cache: Cache) -> None:
    assert cache.prepare_store(keys("abcde")) is None
    store(cache, "abc")
    assert cache.prepare_store(keys("abcde")) is None  # d and e must not evict keys of their offer
    assert ready(cache) == "abc"


def test_a_failed_store_frees_its_blocks_and_its_victims_stay_evicted(cache: Cache) -> None:
    store(cache, "abcd")
    failed = reserve(cache, "xy")
    cache.complete_store(failed, success=False)
    assert find_key(cache, b"x") is MISS
    assert (cache.usage.free, cache.usage.pending, cache.usage.ready) == (2, 0, 2)
    assert set(ready(cache)) == set("abcd") - {key.decode() for key in failed.evicted}
    assert reserve(cache, "xy").evicted == ()


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_store_ends_once(cache: Cache, success: bool, again: bool) -> None:
    reservation = reserve(cache, "ab")
    cache.complete_store(reservation, success)
    before = cache.usage, cache.counts.copy()
    cache.complete_store(reservation, again)
    assert (cache.usage, cache.counts) == before
    assert ready(cache) == ("ab" if success else "")


def test_completing_a_failed_store_again_does_not_change_a_later_store(cache: Cache) -> None:
    failed = reserve(cache, "a")
    cache.complete_store(failed, success=False)
    reserve(cache, "a")
    cache.complete_store(failed, success=True)
    assert find_key(cache, b"a") is HIT_PENDING
    cache.check_integrity()


def test_loads_get_blocks_in_the_order_of_their_keys(cache: Cache) -> None:
    reservation = store(cache, "abc")
    block_of = dict(zip(reservation.keys, reservation.blocks, strict=True))
    pins = cache.prepare_load(keys("cac"))
    assert pins.blocks.tolist() == [block_of[b"c"], block_of[b"a"], block_of[b"c"]]
    assert cache.usage.pinned == 2
    cache.complete_load(pins)
    assert cache.usage.pinned == 0
    cache.complete_load(cache.prepare_load([]))


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


def test_pins_are_released_once(cache: Cache) -> None:
    store(cache, "a")
    pins = cache.prepare_load([b"a"])
    other = cache.prepare_load([b"a"])
    cache.complete_load(pins)
    with pytest.raises(Refused) as caught:
        cache.complete_load(pins)
    assert (caught.value.code, caught.value.value) == (Code.NOT_PINNED, "1")
    assert cache.usage.pinned == 1
    cache.complete_load(other)


def test_a_session_pins_the_loadable_keys(cache: Cache) -> None:
    store(cache, "ab")
    reserve(cache, "c")
    blocks = cache.pin_loadable(keys("axabc"))
    assert blocks == [0, -1, 0, 1, -1]
    assert cache.usage.pinned == 2
    cache.unpin_blocks([0, 1])
    assert cache.usage.pinned == 1
    cache.unpin_blocks([0])
    assert cache.usage.pinned == 0


def test_a_key_that_was_discarded_while_it_is_loaded_can_be_stored_again(cache: Cache) -> None:
    store(cache, "a")
    pins = cache.prepare_load(keys("a"))
    cache.discard_blocks(np.array([0]))
    assert (cache.usage.orphaned, find_key(cache, b"a")) == (1, MISS)
    assert store(cache, "a").blocks == (1,)
    cache.complete_load(pins)
    assert (cache.usage.orphaned, cache.usage.free, find_key(cache, b"a")) == (0, 3, HIT)
    cache.check_integrity()


# Counters


def test_a_key_is_stored_from_its_nth_offer_on(policy: str) -> None:
    cache = Cache(2, policy, store_threshold=3)
    offers = [reserve(cache, "ab").keys, reserve(cache, "aac").keys, reserve(cache, "abc").keys]
    assert offers == [(), (), (b"a",)]
    assert cache.counts["stores_skipped"] == 2 + 2 + 2
    assert reserve(cache, "bd").keys == (b"b",)


def test_an_offer_without_room_counts_as_an_offer(policy: str) -> None:
    cache = Cache(1, policy, store_threshold=2)
    cache.prepare_store(keys("ab"))
    assert cache.prepare_store(keys("ab")) is None
    assert cache.counts["stores_skipped"] == 4
    assert reserve(cache, "a").keys == (b"a",)


def test_reset_clears_the_counts_of_offers(policy: str) -> None:
    cache = Cache(2, policy, store_threshold=2)
    cache.prepare_store([b"a"])
    cache.reset(1)
    assert reserve(cache, "a").keys == ()


def test_usage_counts_the_blocks_of_each_state(policy: str) -> None:
    cache = Cache(9, policy)
    reserve(cache, "vw")
    cache.reset(1)
    store(cache, "abc")
    reserve(cache, "p")
    cache.prepare_load(keys("aab"))
    usage = cache.usage
    assert (usage.capacity, usage.free, usage.pending, usage.ready) == (9, 3, 1, 3)
    assert (usage.pinned, usage.orphaned) == (2, 2)
    assert (cache.counts["stored"], cache.counts["evictions"]) == (3, 0)
    reserve(cache, "efgh")
    assert cache.counts["evictions"] == 1


# Events


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


def test_a_store_from_before_a_reset_emits_no_event(cache: Cache) -> None:
    past = reserve(cache, "a")
    cache.reset(1)
    cache.events.take()
    cache.complete_store(past, success=True)
    cache.prepare_store([])
    assert cache.events.take() == []


# Errors


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
