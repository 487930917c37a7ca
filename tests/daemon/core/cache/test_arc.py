"""ARC by example: what the paper says, and what it does not know of."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.cache.arc import ARC
from kvferry.daemon.core.cache.cache import Cache
from support.letter_caches import evicted, keys, reserve
from support.letter_caches import store as store_letters


def store(cache: Cache, letters: str) -> str:
    """Store keys; return those that were evicted for them."""
    return evicted(store_letters(cache, letters))


def lists(cache: Cache) -> tuple[str, str]:
    """Recent and frequent keys, least recent first."""
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
    """Of four blocks: a and b were asked for again (b is the hotter), c and d were not."""
    cache = Cache(4, "arc")
    store(cache, "dcba")
    cache.touch(keys("ba"))
    assert lists(cache) == ("cd", "ab")
    return cache


def test_a_ready_key_that_is_touched_is_frequent(cache: Cache) -> None:
    cache.touch(keys("cxa"))
    assert lists(cache) == ("d", "bac")


def test_of_a_touched_prefix_the_tail_goes_first(cache: Cache) -> None:
    cache.touch(keys("abcd"))
    assert lists(cache) == ("", "dcba")
    assert store(cache, "wxyz") == "dcba"


def test_the_tail_of_an_offer_goes_first() -> None:
    cache = Cache(4, "arc")
    store(cache, "abcd")
    assert lists(cache) == ("dcba", "")
    assert store(cache, "wx") == "dc"


def test_a_pending_key_that_is_touched_stays_among_the_recent(cache: Cache) -> None:
    reservation = reserve(cache, "x")
    cache.touch(keys("dx"))
    assert lists(cache) == ("x", "abd")
    cache.complete_store(reservation, success=True)
    assert lists(cache) == ("x", "abd")
    cache.touch(keys("x"))
    assert lists(cache) == ("", "abdx")


def test_a_pending_key_that_is_touched_is_the_most_recent_of_them() -> None:
    cache = Cache(4, "arc")
    first = reserve(cache, "abc")
    cache.touch(keys("c"))
    cache.complete_store(first, success=True)
    assert lists(cache) == ("bac", "")


def test_keys_asked_for_once_do_not_displace_those_asked_for_again(cache: Cache) -> None:
    assert [store(cache, letter) for letter in "efghij"] == list("cdefgh")
    assert lists(cache) == ("ij", "ab")
    assert ghosts(cache) == ("efgh", "")  # as many as there are blocks


def test_a_key_that_comes_back_is_frequent_and_its_list_gets_more_room(cache: Cache) -> None:
    store(cache, "fe")
    assert (ghosts(cache), target(cache)) == (("cd", ""), 0)
    assert store(cache, "c") == "e"
    assert (lists(cache), ghosts(cache), target(cache)) == (("f", "abc"), ("de", ""), 1)
    assert store(cache, "x") == "a"  # one recent key is what there should be: frequent ones give
    assert (lists(cache), ghosts(cache)) == (("fx", "bc"), ("de", "a"))
    assert store(cache, "a") == "f"  # and back: a was frequent
    assert (lists(cache), ghosts(cache), target(cache)) == (("x", "bca"), ("def", ""), 0)


def test_the_target_moves_faster_where_there_are_fewer_ghosts() -> None:
    cache = Cache(4, "arc")
    store(cache, "abcd")
    cache.touch(keys("abcd"))
    store(cache, "x")  # d goes, frequent
    cache.touch(keys("x"))
    store(cache, "y")  # c goes
    cache.touch(keys("y"))
    store(cache, "zw")  # b goes, then z would; but it is of the same offer: a goes
    assert (lists(cache), ghosts(cache)) == (("wz", "xy"), ("", "dcba"))
    store(cache, "v")  # the recent w goes
    assert ghosts(cache) == ("w", "dcba")
    store(cache, "w")
    assert target(cache) == 4


def test_keys_of_an_offer_are_taken_in_one_by_one_the_last_first(cache: Cache) -> None:
    store(cache, "fe")
    assert (lists(cache), ghosts(cache), target(cache)) == (("ef", "ab"), ("cd", ""), 0)
    # c: one more should be recent, e goes. d: two should, there is one, a goes. x: b goes.
    assert store(cache, "xdc") == "eab"
    assert (lists(cache), ghosts(cache), target(cache)) == (("fx", "cd"), ("e", "ab"), 2)


def test_keys_of_an_offer_do_not_go_for_one_another(cache: Cache) -> None:
    store(cache, "fe")
    assert store(cache, "wxyz") == "efab"


def test_a_failed_store_leaves_no_trace(cache: Cache) -> None:
    failed = reserve(cache, "ef")
    before = ghosts(cache)
    cache.complete_store(failed, success=False)
    assert (lists(cache), ghosts(cache)) == (("", "ab"), before)
    store(cache, "fe")
    assert lists(cache) == ("ef", "ab")


def test_a_failed_store_of_a_key_that_came_back_leaves_no_trace(cache: Cache) -> None:
    store(cache, "fe")
    failed = reserve(cache, "c")
    assert lists(cache)[1] == "abc"
    cache.complete_store(failed, success=False)
    assert (lists(cache), ghosts(cache)) == (("f", "ab"), ("de", ""))


def test_where_the_list_that_should_give_is_pinned_the_other_gives(cache: Cache) -> None:
    pins = cache.prepare_load(keys("cd"))
    assert store(cache, "x") == "a"
    cache.complete_load(pins)
    pins = cache.prepare_load(keys("bx"))
    assert store(cache, "yz") == "cd"
    cache.complete_load(pins)
    assert lists(cache) == ("xzy", "b")


def test_without_room_nothing_is_learned(cache: Cache) -> None:
    store(cache, "fe")
    cache.prepare_load(keys("abef"))
    before = lists(cache), ghosts(cache), target(cache)
    assert before[1] == ("cd", "")
    assert cache.prepare_store(keys("cd")) is None
    assert (lists(cache), ghosts(cache), target(cache)) == before


def test_reset_forgets_ghosts_and_the_target(cache: Cache) -> None:
    store(cache, "fe")
    store(cache, "c")
    cache.reset()
    assert (lists(cache), ghosts(cache), target(cache)) == (("", ""), ("", ""), 0)


def test_a_cache_of_one_block_works() -> None:
    cache = Cache(1, "arc")
    evicted = [store(cache, letter) for letter in "abacab"]
    assert evicted == ["", *"abaca"]
    cache.check_integrity()
