"""LRU and ARC by example; tests/property compares all policies with models (plain_policies.py)."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache.arc import ARC
from kvferry.daemon.core.cache.cache import Cache
from support.cached_keys import entries_of
from support.letter_caches import evicted, keys
from support.letter_caches import store as store_letters


def store(cache: Cache, letters: str) -> str:
    """Store keys. Returns the evicted keys."""
    return evicted(store_letters(cache, letters))


# LRU: insertion and touch are uses, and the tail of a prefix is evicted first


@pytest.fixture
def lru() -> Cache:
    """a to d are one offer, so the tail d is evicted first."""
    cache = Cache(4)
    store(cache, "abcd")
    return cache


def test_the_tail_of_an_offer_is_evicted_first(lru: Cache) -> None:
    assert [store(lru, letter) for letter in "vwxyz"] == list("dcbav")


def test_the_tail_of_a_touched_prefix_is_evicted_first(lru: Cache) -> None:
    lru.touch(keys("bdc"))
    assert b"".join(key for key, _ in entries_of(lru)) == b"acdb"
    assert store(lru, "xyz") == "acd"


def test_offer_load_and_completion_are_no_uses(lru: Cache) -> None:
    lru.prepare_store(keys("dc"))
    lru.complete_load(lru.prepare_load(keys("dc")))
    assert store(lru, "xy") == "dc"


def test_spare_keys_are_evicted_before_the_others_tail_first(lru: Cache) -> None:
    lru.spare(keys("ab"))
    assert [store(lru, letter) for letter in "xyz"] == list("bad")


# ARC: the rules of the paper


@pytest.fixture
def arc() -> Cache:
    """A cache of four blocks. b and a were touched, b more recently. c and d were not touched."""
    cache = Cache(4, "arc")
    store(cache, "dcba")
    cache.touch(keys("ba"))
    assert lists(cache) == ("cd", "ab")
    return cache


def lists(cache: Cache) -> tuple[str, str]:
    """The recent and the frequent keys, least recent first."""
    policy = cache._blocks.policy
    assert isinstance(policy, ARC)
    orders = policy._recent.numbers(), policy._frequent.numbers()
    recent, frequent = [cache._blocks.index.keys_of(order.tolist()) for order in orders]
    return b"".join(recent).decode(), b"".join(frequent).decode()


def ghosts(cache: Cache) -> tuple[str, str]:
    policy = cache._blocks.policy
    assert isinstance(policy, ARC)
    recent, frequent = policy._recent_ghosts.keys(), policy._frequent_ghosts.keys()
    return b"".join(recent).decode(), b"".join(frequent).decode()


def target(cache: Cache) -> float:
    policy = cache._blocks.policy
    assert isinstance(policy, ARC)
    return policy._target


def test_keys_used_once_do_not_evict_frequent_keys(arc: Cache) -> None:
    assert [store(arc, letter) for letter in "efghij"] == list("cdefgh")
    assert lists(arc) == ("ij", "ab")
    assert ghosts(arc) == ("efgh", "")  # as many ghosts as blocks


def test_a_stored_ghost_is_frequent_and_its_list_gets_more_room(arc: Cache) -> None:
    store(arc, "fe")
    assert (ghosts(arc), target(arc)) == (("cd", ""), 0)
    assert store(arc, "c") == "e"
    assert (lists(arc), ghosts(arc), target(arc)) == (("f", "abc"), ("de", ""), 1)
    # The recent list has its target of one key, so a frequent key is evicted.
    assert store(arc, "x") == "a"
    assert (lists(arc), ghosts(arc)) == (("fx", "bc"), ("de", "a"))
    assert store(arc, "a") == "f"  # a was frequent: the target decreases
    assert (lists(arc), ghosts(arc), target(arc)) == (("x", "bca"), ("def", ""), 0)


def test_keys_of_an_offer_are_inserted_one_by_one_in_reverse(arc: Cache) -> None:
    store(arc, "fe")
    assert (lists(arc), ghosts(arc), target(arc)) == (("ef", "ab"), ("cd", ""), 0)
    # c: the target becomes 1, and e is evicted. d: the target becomes 2, the recent list has one
    # key, and a is evicted. x: b is evicted.
    assert store(arc, "xdc") == "eab"
    assert (lists(arc), ghosts(arc), target(arc)) == (("fx", "cd"), ("e", "ab"), 2)


def test_the_victims_of_an_offer_count_at_once(arc: Cache) -> None:
    """c is a ghost: the recent list gives e and has its target of one key then, so x evicts a."""
    store(arc, "fe")
    assert store(arc, "xc") == "ea"
