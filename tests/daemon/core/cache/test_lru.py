"""LRU: insertion and touch are uses, and the tail of a prefix goes first."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache.cache import Cache
from support.letter_caches import evicted, keys
from support.letter_caches import store as store_letters


def store(cache: Cache, letters: str) -> str:
    """Store keys; return those that were evicted for them."""
    return evicted(store_letters(cache, letters))


def order(cache: Cache) -> str:
    """Ready keys, least recent first."""
    return b"".join(key for key, _ in cache.entries()).decode()


@pytest.fixture
def cache() -> Cache:
    """a to d were offered together: d, the tail, goes first."""
    cache = Cache(4)
    store(cache, "abcd")
    return cache


def test_the_tail_of_an_offer_goes_first(cache: Cache) -> None:
    assert order(cache) == "dcba"
    assert [store(cache, letter) for letter in "vwxyz"] == list("dcbav")


def test_the_tail_of_a_touched_prefix_goes_first(cache: Cache) -> None:
    cache.touch(keys("bdc"))
    assert order(cache) == "acdb"
    assert store(cache, "xyz") == "acd"


def test_of_a_key_touched_twice_the_first_place_counts(cache: Cache) -> None:
    cache.touch(keys("dad"))
    assert order(cache) == "cbad"


def test_touch_ignores_what_is_absent(cache: Cache) -> None:
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


def test_to_be_looked_up_or_offered_or_loaded_or_stored_is_no_use(cache: Cache) -> None:
    cache.lookup(b"d")
    cache.prepare_store(keys("dc"))
    cache.complete_load(cache.prepare_load(keys("dc")))
    assert order(cache) == "dcba"


def test_the_order_of_ends_does_not_matter() -> None:
    cache = Cache(4)
    first, second = cache.prepare_store(keys("ab")), cache.prepare_store(keys("cd"))
    assert first is not None
    assert second is not None
    cache.complete_store(second, success=True)
    cache.complete_store(first, success=True)
    assert order(cache) == "badc"


def test_who_was_pinned_keeps_its_place(cache: Cache) -> None:
    pins = cache.prepare_load(keys("dcb"))
    assert store(cache, "x") == "a"
    cache.complete_load(pins)
    assert store(cache, "yz") == "dc"
