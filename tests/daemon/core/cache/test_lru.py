"""LRU: insertion and touch are uses, and the tail of a prefix is evicted first."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache.cache import Cache
from support.cached_keys import entries_of
from support.letter_caches import evicted, keys
from support.letter_caches import store as store_letters


def store(cache: Cache, letters: str) -> str:
    """Store keys. Returns the evicted keys."""
    return evicted(store_letters(cache, letters))


def order(cache: Cache) -> str:
    """Ready keys, least recent first."""
    return b"".join(key for key, _ in entries_of(cache)).decode()


@pytest.fixture
def cache() -> Cache:
    """a to d are one offer, so the tail d is evicted first."""
    cache = Cache(4)
    store(cache, "abcd")
    return cache


def test_the_tail_of_an_offer_is_evicted_first(cache: Cache) -> None:
    assert order(cache) == "dcba"
    assert [store(cache, letter) for letter in "vwxyz"] == list("dcbav")


def test_the_tail_of_a_touched_prefix_is_evicted_first(cache: Cache) -> None:
    cache.touch(keys("bdc"))
    assert order(cache) == "acdb"
    assert store(cache, "xyz") == "acd"


def test_a_key_touched_twice_has_its_first_place(cache: Cache) -> None:
    cache.touch(keys("dad"))
    assert order(cache) == "cbad"


def test_touch_ignores_absent_keys(cache: Cache) -> None:
    cache.touch(keys("xdy"))
    assert order(cache) == "cbad"
    assert cache.usage.ready == 4


def test_a_pending_key_can_be_touched() -> None:
    cache = Cache(3)
    first = cache.prepare_store(keys("ab"))
    assert first is not None
    store(cache, "c")
    cache.touch([b"b"])
    cache.complete_store(first, success=True)
    assert order(cache) == "acb"


def test_offer_load_and_completion_are_no_uses(cache: Cache) -> None:
    cache.prepare_store(keys("dc"))
    cache.complete_load(cache.prepare_load(keys("dc")))
    assert order(cache) == "dcba"


def test_the_order_of_completion_has_no_effect() -> None:
    cache = Cache(4)
    first, second = cache.prepare_store(keys("ab")), cache.prepare_store(keys("cd"))
    assert first is not None
    assert second is not None
    cache.complete_store(second, success=True)
    cache.complete_store(first, success=True)
    assert order(cache) == "badc"


def test_a_pinned_key_keeps_its_place(cache: Cache) -> None:
    pins = cache.prepare_load(keys("dcb"))
    assert store(cache, "x") == "a"
    cache.complete_load(pins)
    assert store(cache, "yz") == "dc"


def test_spare_keys_are_evicted_before_the_others_tail_first(cache: Cache) -> None:
    cache.spare(keys("ab"))
    assert [store(cache, letter) for letter in "xyz"] == list("bad")


def test_a_touched_key_is_not_spare(cache: Cache) -> None:
    cache.spare(keys("ab"))
    cache.touch(keys("b"))
    assert [store(cache, letter) for letter in "xyz"] == list("adc")


def test_a_pinned_spare_key_is_kept_and_stays_spare(cache: Cache) -> None:
    cache.spare(keys("a"))
    pins = cache.prepare_load(keys("a"))
    assert store(cache, "x") == "d"
    cache.complete_load(pins)
    assert store(cache, "y") == "a"
