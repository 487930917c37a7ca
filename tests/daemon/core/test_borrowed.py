"""Keys whose blocks are loaded directly from siblings: found, loaded, and forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.actions import SendMessage
from kvferry.daemon.core.borrowed import BORROWED_SECONDS, MAX_BORROWED, BorrowedKeys
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.layout import Bools, Int64s
from kvferry.daemon.core.tier_actions import FetchBlocks, FindKeys, KeysFound, TierDescription
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.results import JobResult, Outcome
from support.namespaces_fixture import (
    PAGE,
    REGION_BYTES,
    NamespacesFixture,
    each,
    key_events_of,
    load,
    offsets,
    store,
)

NOW, BLOCKS = 101.0, REGION_BYTES // PAGE
FAR = 1 << 40


class FakeMemory:
    """Window 1 begins FAR bytes after the own pool. changed: numbers of blocks there."""

    def __init__(self) -> None:
        self.changed = set[int]()
        self.held = self.loaded = 0

    def resolve(self, places: Int64s, block_bytes: int, start: int) -> Int64s:
        rows = np.full((4, len(places)), -1, np.int64)
        these = places[:, 0] == 1
        blocks = places[these, 1] // block_bytes
        ones = np.full(blocks.size, 1)
        rows[:, these] = np.stack((ones, places[these, 1] + FAR, blocks, places[these, 2]))
        return rows

    def unchanged(self, rows: Int64s) -> Bools:
        return ~np.isin(rows[2], list(self.changed))

    def hold(self, rows: Int64s) -> None:
        self.held += rows.shape[1]

    def release(self, rows: Int64s, block_bytes: int) -> None:
        self.held -= rows.shape[1]
        self.loaded += rows.shape[1] * block_bytes


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def fixture(memory: FakeMemory) -> NamespacesFixture:
    siblings = TierDescription("siblings", min_uses=0, is_siblings=True, lent_memory=memory)
    fixture = NamespacesFixture("a", tiers=(siblings, "disk"))
    fixture.send("a", wire.Subscribe())
    return fixture


def search(fixture: NamespacesFixture, letters: bytes, places: str) -> list[Any]:
    """Look for absent keys. places: of each, "s" if it can be loaded from the sibling, "c" if it
    must be copied from there, "d" if it is on the disk, "-" if it is nowhere. Returns the actions
    that follow the tiers' answer."""
    (action,) = fixture.send("a", wire.FindInTiers(7, each(letters), 0.5))
    assert isinstance(action, FindKeys)
    tier_of = tuple({"s": 0, "c": 0, "d": 1, "-": -1}[place] for place in places)
    rows = [[1, at * PAGE, 5] if place == "s" else [-1] * 3 for at, place in enumerate(places)]
    at_all = (1e9,) * 2, (0.0,) * 2, (True,) * 2
    return fixture.report(KeysFound(action.search, tier_of, *at_all, np.array(rows), NOW))


def reply_of(actions: list[Any]) -> tuple[int, int]:
    """Prefix and promoted keys of the reply to a search."""
    (reply,) = [action.message for action in actions if isinstance(action, SendMessage)]
    assert isinstance(reply, wire.TiersFound)
    return reply.prefix, reply.promoted


def result_of(actions: Sequence[Any]) -> JobResult:
    (finished,) = [each.message for each in actions if isinstance(each, SendMessage)]
    assert isinstance(finished, wire.Finished)
    (result,) = finished.results
    return result


def test_keys_of_a_sibling_are_loadable_at_once_and_take_no_block(
    fixture: NamespacesFixture, memory: FakeMemory
) -> None:
    actions = search(fixture, b"abc", "ss-")
    assert key_events_of(actions) == [("borrowed", b"ab")]
    assert reply_of(actions) == (2, 0)
    plan = fixture.start("a", load(b"ab"))
    assert offsets(plan) == [FAR, FAR + PAGE]
    assert plan.host_end <= REGION_BYTES
    assert (memory.held, fixture.usage("free")) == (2, (BLOCKS,))
    assert result_of(fixture.end(plan)).outcome is Outcome.DONE
    assert (memory.held, memory.loaded) == (0, 2 * PAGE)


def test_own_blocks_and_those_of_the_sibling_are_loaded_together(
    fixture: NamespacesFixture,
) -> None:
    fixture.stored("a", b"b")
    assert reply_of(search(fixture, b"abc", "ss")) == (3, 0)
    assert offsets(fixture.start("a", load(b"abcb"))) == [FAR, 0, FAR + PAGE, 0]


def test_what_must_be_copied_is_promoted_if_all_that_follows_is_worth_it(
    fixture: NamespacesFixture,
) -> None:
    """Also the keys that could be loaded directly after it must be computed without it."""
    actions = search(fixture, b"abcde", "scssd")
    assert reply_of(actions) == (5, 2)
    assert [f.keys for f in actions if isinstance(f, FetchBlocks)] == [each(b"b"), each(b"e")]


def test_a_load_whose_block_has_changed_fails_and_its_key_is_forgotten(
    fixture: NamespacesFixture, memory: FakeMemory
) -> None:
    search(fixture, b"ab", "ss")
    plan = fixture.start("a", load(b"ab"))
    memory.changed = {1}
    actions = fixture.end(plan)
    result = result_of(actions)
    assert result.error is not None
    assert (result.outcome, result.error.code) == (Outcome.FAILED, Code.KEY_ABSENT)
    assert key_events_of(actions) == [("abandoned", b"b")]
    assert (memory.held, memory.loaded) == (0, 0)
    assert fixture.loadable("a", b"ab") == b"a"


def test_a_load_of_a_block_that_has_changed_is_refused(
    fixture: NamespacesFixture, memory: FakeMemory
) -> None:
    search(fixture, b"ab", "ss")
    memory.changed = {0}
    actions = fixture.submit("a", load(b"ab"))
    assert result_of(actions).outcome is Outcome.REFUSED
    assert key_events_of(actions) == [("abandoned", b"a")]
    assert (memory.held, fixture.usage("pinned")) == (0, (0,))
    assert fixture.loadable("a", b"ab") == b"b"


def test_each_search_finds_the_keys_again(fixture: NamespacesFixture) -> None:
    search(fixture, b"a", "s")
    assert reply_of(search(fixture, b"a", "-")) == (1, 0)


def test_those_that_have_changed_are_forgotten_after_a_while(
    fixture: NamespacesFixture, memory: FakeMemory
) -> None:
    """A conversation that goes on later finds the others, also if it searches for its new keys."""
    search(fixture, b"abc", "sss")
    memory.changed = {1}
    for later in (NOW + BORROWED_SECONDS - 1, NOW + BORROWED_SECONDS, NOW + 2 * BORROWED_SECONDS):
        actions = fixture.core.handle("a", wire.FindInTiers(8, each(b"d")), later)
        first = later == NOW + BORROWED_SECONDS
        assert key_events_of(actions) == ([("abandoned", b"b")] if first else None)
    assert fixture.loadable("a", b"abc") == b"ac"


def test_a_reset_forgets_them(fixture: NamespacesFixture) -> None:
    search(fixture, b"ab", "ss")
    fixture.send("a", wire.Reset(9))
    assert fixture.loadable("a", b"ab") == b""


def test_a_key_that_is_here_is_not_reported_as_forgotten(
    fixture: NamespacesFixture, memory: FakeMemory
) -> None:
    search(fixture, b"a", "s")
    fixture.stored("a", b"a")
    memory.changed = {0}
    later = NOW + BORROWED_SECONDS
    actions = fixture.core.handle("a", wire.FindInTiers(8, each(b"ab")), later)
    assert key_events_of(actions) is None
    assert offsets(fixture.start("a", load(b"a"))) == [0]


def test_a_key_that_is_being_stored_here_is_loaded_from_the_sibling(
    fixture: NamespacesFixture,
) -> None:
    search(fixture, b"a", "s")
    fixture.start("a", store(b"a"))
    assert offsets(fixture.start("a", load(b"a"))) == [FAR]


def test_the_newest_are_kept_if_there_are_too_many(memory: FakeMemory) -> None:
    borrowed = BorrowedKeys(memory, Cache(1))
    keys = [number.to_bytes(4, "big") for number in range(MAX_BORROWED + 2)]
    places = np.full((len(keys), 3), 1)
    borrowed.add(keys, places, PAGE, 0, NOW)
    borrowed.expire(NOW)
    assert len(borrowed) == MAX_BORROWED
    assert borrowed.places([keys[0], keys[2]]) == [1]


def test_a_key_that_is_found_again_is_looked_at_later(memory: FakeMemory) -> None:
    borrowed = BorrowedKeys(memory, Cache(1))
    places = np.full((2, 3), 1)
    borrowed.add([b"a", b"b"], places, PAGE, 0, NOW)
    borrowed.add([b"a"], places[:1], PAGE, 0, NOW + 5)
    memory.changed = {0}
    borrowed.expire(NOW + BORROWED_SECONDS)
    assert borrowed.places([b"a", b"b"]) == [0]
    borrowed.expire(NOW + 5 + BORROWED_SECONDS)
    assert borrowed.places([b"a", b"b"]) == []


def test_without_siblings_nothing_is_borrowed() -> None:
    """A tier of the user's own may answer like theirs."""
    borrowed = BorrowedKeys(None, Cache(1))
    borrowed.add([b"a"], np.full((1, 3), 1), PAGE, 0, NOW)
    assert borrowed.places([b"a"]) == []
