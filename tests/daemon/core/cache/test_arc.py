"""ARC by example: the rules of the paper, and pins, pending keys and offers of several keys."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache.arc import ARC
from kvferry.daemon.core.cache.cache import Cache
from support.letter_caches import evicted, keys, reserve
from support.letter_caches import store as store_letters


def store(cache: Cache, letters: str) -> str:
    """Store keys. Returns the evicted keys."""
    return evicted(store_letters(cache, letters))


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


@pytest.fixture
def cache() -> Cache:
    """A cache of four blocks. b and a were touched, b more recently. c and d were not touched."""
    cache = Cache(4, "arc")
    store(cache, "dcba")
    cache.touch(keys("ba"))
    assert lists(cache) == ("cd", "ab")
    return cache


def test_a_ready_key_that_is_touched_is_frequent(cache: Cache) -> None:
    cache.touch(keys("cxa"))
    assert lists(cache) == ("d", "bac")


def test_the_tail_of_a_touched_prefix_is_evicted_first(cache: Cache) -> None:
    cache.touch(keys("abcd"))
    assert lists(cache) == ("", "dcba")
    assert store(cache, "wxyz") == "dcba"


def test_the_tail_of_an_offer_is_evicted_first() -> None:
    cache = Cache(4, "arc")
    store(cache, "abcd")
    assert lists(cache) == ("dcba", "")
    assert store(cache, "wx") == "dc"


def test_a_pending_key_that_is_touched_stays_in_the_recent_list(cache: Cache) -> None:
    reservation = reserve(cache, "x")
    cache.touch(keys("dx"))
    assert lists(cache) == ("x", "abd")
    cache.complete_store(reservation, success=True)
    assert lists(cache) == ("x", "abd")
    cache.touch(keys("x"))
    assert lists(cache) == ("", "abdx")


def test_a_pending_key_that_is_touched_is_the_most_recent() -> None:
    cache = Cache(4, "arc")
    first = reserve(cache, "abc")
    cache.touch(keys("c"))
    cache.complete_store(first, success=True)
    assert lists(cache) == ("bac", "")


def test_keys_used_once_do_not_evict_frequent_keys(cache: Cache) -> None:
    assert [store(cache, letter) for letter in "efghij"] == list("cdefgh")
    assert lists(cache) == ("ij", "ab")
    assert ghosts(cache) == ("efgh", "")  # as many ghosts as blocks


def test_a_stored_ghost_is_frequent_and_its_list_gets_more_room(cache: Cache) -> None:
    store(cache, "fe")
    assert (ghosts(cache), target(cache)) == (("cd", ""), 0)
    assert store(cache, "c") == "e"
    assert (lists(cache), ghosts(cache), target(cache)) == (("f", "abc"), ("de", ""), 1)
    # The recent list has its target of one key, so a frequent key is evicted.
    assert store(cache, "x") == "a"
    assert (lists(cache), ghosts(cache)) == (("fx", "bc"), ("de", "a"))
    assert store(cache, "a") == "f"  # a was frequent: the target decreases
    assert (lists(cache), ghosts(cache), target(cache)) == (("x", "bca"), ("def", ""), 0)


def test_the_target_changes_faster_if_there_are_fewer_ghosts() -> None:
    cache = Cache(4, "arc")
    store(cache, "abcd")
    cache.touch(keys("abcd"))
    store(cache, "x")  # evicts d, which is frequent
    cache.touch(keys("x"))
    store(cache, "y")  # evicts c
    cache.touch(keys("y"))
    store(cache, "zw")  # evicts b and a: z is least recent, but of the same offer
    assert (lists(cache), ghosts(cache)) == (("wz", "xy"), ("", "dcba"))
    store(cache, "v")  # evicts w, which is recent
    assert ghosts(cache) == ("w", "dcba")
    store(cache, "w")
    assert target(cache) == 4


def test_keys_of_an_offer_are_inserted_one_by_one_in_reverse(cache: Cache) -> None:
    store(cache, "fe")
    assert (lists(cache), ghosts(cache), target(cache)) == (("ef", "ab"), ("cd", ""), 0)
    # c: the target becomes 1, and e is evicted. d: the target becomes 2, the recent list has one
    # key, and a is evicted. x: b is evicted.
    assert store(cache, "xdc") == "eab"
    assert (lists(cache), ghosts(cache), target(cache)) == (("fx", "cd"), ("e", "ab"), 2)


def test_keys_of_an_offer_do_not_evict_each_other(cache: Cache) -> None:
    store(cache, "fe")
    assert store(cache, "wxyz") == "efab"


def test_a_failed_store_changes_no_ghosts(cache: Cache) -> None:
    failed = reserve(cache, "ef")
    before = ghosts(cache)
    cache.complete_store(failed, success=False)
    assert (lists(cache), ghosts(cache)) == (("", "ab"), before)
    store(cache, "fe")
    assert lists(cache) == ("ef", "ab")


def test_a_failed_store_of_a_ghost_removes_the_key(cache: Cache) -> None:
    store(cache, "fe")
    failed = reserve(cache, "c")
    assert lists(cache)[1] == "abc"
    cache.complete_store(failed, success=False)
    assert (lists(cache), ghosts(cache)) == (("f", "ab"), ("de", ""))


def test_if_all_keys_of_the_victim_list_are_pinned_the_other_list_evicts(cache: Cache) -> None:
    pins = cache.prepare_load(keys("cd"))
    assert store(cache, "x") == "a"
    cache.complete_load(pins)
    pins = cache.prepare_load(keys("bx"))
    assert store(cache, "yz") == "cd"
    cache.complete_load(pins)
    assert lists(cache) == ("xzy", "b")


def test_a_store_without_room_changes_neither_lists_nor_target(cache: Cache) -> None:
    store(cache, "fe")
    cache.prepare_load(keys("abef"))
    before = lists(cache), ghosts(cache), target(cache)
    assert before[1] == ("cd", "")
    assert cache.prepare_store(keys("cd")) is None
    assert (lists(cache), ghosts(cache), target(cache)) == before


def test_reset_clears_ghosts_and_the_target(cache: Cache) -> None:
    store(cache, "fe")
    store(cache, "c")
    cache.reset(1)
    assert (lists(cache), ghosts(cache), target(cache)) == (("", ""), ("", ""), 0)


def test_a_cache_of_one_block_works() -> None:
    cache = Cache(1, "arc")
    victims = [store(cache, letter) for letter in "abacab"]
    assert victims == ["", *"abaca"]
    cache.check_integrity()
