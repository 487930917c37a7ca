"""Keys whose blocks are loaded directly from siblings: found, loaded, and forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.daemon.core.actions import SendMessage
from kvferry.daemon.core.borrowed import BORROWED_SECONDS, MAX_BORROWED, BorrowedKeys
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.core.tier_actions import FetchBlocks, FindKeys, KeysFound
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.results import JobResult, Outcome
from support.namespaces_fixture import (
    FINGERPRINT,
    PAGE,
    REGION_BYTES,
    NamespacesFixture,
    each,
    gpu_blocks,
    key_events_of,
    load,
    offsets,
    store,
)
from support.sibling_stand_in import FAR, SiblingStandIn

NOW, BLOCKS = 101.0, REGION_BYTES // PAGE
CONTENTS = NamespaceContents("name", 1, 0, PAGE, 0)


@pytest.fixture
def siblings() -> SiblingStandIn:
    """A sibling has keys a, b and c, in blocks 0, 1 and 2."""
    return SiblingStandIn(*each(b"abc"))


@pytest.fixture
def fixture(siblings: SiblingStandIn) -> NamespacesFixture:
    fixture = NamespacesFixture("a", tiers=("disk",), siblings=siblings)
    fixture.send("a", wire.Subscribe())
    return fixture


def search(fixture: NamespacesFixture, letters: bytes, now: float = NOW) -> list[Any]:
    """The actions that follow a search. The disk has none of the keys."""
    actions = fixture.core.handle("a", wire.FindInTiers(7, each(letters), 0.5), now)
    for find in [action for action in actions if isinstance(action, FindKeys)]:
        nowhere = (-1,) * len(find.keys)
        actions += fixture.report(KeysFound(find.search, nowhere, (1e9,), (0.0,), (True,)))
    return actions


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
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    """No tier is asked if siblings have all."""
    actions = search(fixture, b"ab")
    assert not [action for action in actions if isinstance(action, FindKeys)]
    assert key_events_of(actions) == [("borrowed", b"ab")]
    assert reply_of(actions) == (2, 0)
    plan = fixture.start("a", load(b"ab"))
    assert offsets(plan) == [FAR, FAR + PAGE]
    assert plan.host_end <= REGION_BYTES
    assert (siblings.holds, fixture.usage("free")) == (2, (BLOCKS,))
    assert result_of(fixture.end(plan)).outcome is Outcome.DONE
    assert (siblings.holds, siblings.loaded) == (0, 2 * PAGE)
    assert siblings.used == [each(b"ab"), each(b"ab")]


def test_a_search_states_what_must_be_equal(
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    fixture.send("a", wire.Reset(9))
    search(fixture, b"a")
    (namespace,) = fixture.core._namespaces
    composition = namespace.record.composition
    assert 0 < composition < 1 << 63
    assert siblings.contents == NamespaceContents(FINGERPRINT.name, composition, 1, PAGE, 0)


def test_without_a_registration_nothing_is_borrowed(siblings: SiblingStandIn) -> None:
    """The composition of its host blocks is not known."""
    fixture = NamespacesFixture(siblings=siblings)
    fixture.open_namespace("a")
    assert reply_of(search(fixture, b"a")) == (0, 0)


def test_own_blocks_and_those_of_the_sibling_are_loaded_together(
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    siblings.held.pop(b"b")
    fixture.stored("a", b"b")
    assert reply_of(search(fixture, b"abc")) == (3, 0)
    assert offsets(fixture.start("a", load(b"abcb"))) == [FAR, 0, FAR + 2 * PAGE, 0]


def test_what_is_in_a_tier_is_promoted_around_borrowed_keys(fixture: NamespacesFixture) -> None:
    (find,) = fixture.core.handle("a", wire.FindInTiers(7, each(b"dae"), 0.5), NOW)[:1]
    assert isinstance(find, FindKeys)
    assert find.keys == each(b"de")
    actions = fixture.report(KeysFound(find.search, (0, 0), (1e9,), (0.0,), (True,)))
    assert reply_of(actions) == (3, 2)
    assert [f.keys for f in actions if isinstance(f, FetchBlocks)] == [each(b"de")]


def test_a_load_whose_block_has_changed_fails_and_its_key_is_forgotten(
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    search(fixture, b"ab")
    plan = fixture.start("a", load(b"ab"))
    siblings.changed = {1}
    actions = fixture.end(plan)
    result = result_of(actions)
    assert result.error is not None
    assert (result.outcome, result.error.code) == (Outcome.FAILED, Code.KEY_ABSENT)
    assert key_events_of(actions) == [("abandoned", b"b")]
    assert (siblings.holds, siblings.loaded) == (0, 0)
    assert fixture.loadable("a", b"ab") == b"a"


def test_a_load_of_a_block_that_has_changed_is_refused(
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    search(fixture, b"ab")
    siblings.changed = {0}
    actions = fixture.submit("a", load(b"ab"))
    assert result_of(actions).outcome is Outcome.REFUSED
    assert key_events_of(actions) == [("abandoned", b"a")]
    assert (siblings.holds, fixture.usage("pinned")) == (0, (0,))
    assert fixture.loadable("a", b"ab") == b"b"


def test_a_search_refreshes_its_keys_and_no_others(
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    search(fixture, b"abc")
    siblings.changed = {1, 2}
    later = NOW + BORROWED_SECONDS - 1
    assert key_events_of(search(fixture, b"a", later)) is None
    (namespace,) = fixture.core._namespaces
    assert len(namespace.borrowed) == 3
    assert key_events_of(search(fixture, b"a", later + 1)) == [("abandoned", b"bc")]
    assert fixture.loadable("a", b"abc") == b"a"


def test_a_key_whose_block_has_not_changed_stays(
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    """A conversation that goes on later finds it. Its entry in the key table may be lost."""
    search(fixture, b"ab")
    siblings.held.clear()
    for later in (NOW + BORROWED_SECONDS, NOW + 5 * BORROWED_SECONDS):
        assert key_events_of(search(fixture, b"ad", later)) is None
    assert reply_of(search(fixture, b"ab", NOW + 6 * BORROWED_SECONDS)) == (2, 0)


def test_a_key_that_a_search_does_not_find_again_is_forgotten(
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    search(fixture, b"ab")
    siblings.held.clear()
    siblings.changed = {0}
    assert key_events_of(search(fixture, b"ab")) == [("abandoned", b"a")]


def test_a_key_that_is_here_is_not_reported_as_forgotten(
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    search(fixture, b"a")
    siblings.stores_once = False
    fixture.stored("a", b"a")
    siblings.changed = {0}
    assert key_events_of(search(fixture, b"ad", NOW + BORROWED_SECONDS)) is None
    assert offsets(fixture.start("a", load(b"a"))) == [0]


def test_a_key_that_is_being_stored_here_is_loaded_from_the_sibling(
    fixture: NamespacesFixture, siblings: SiblingStandIn
) -> None:
    search(fixture, b"a")
    siblings.stores_once = False
    fixture.start("a", store(b"a"))
    assert offsets(fixture.start("a", load(b"a"))) == [FAR]


@pytest.mark.parametrize("once", [False, True])
def test_keys_that_siblings_have_are_left_out_of_a_store(
    fixture: NamespacesFixture, siblings: SiblingStandIn, once: bool
) -> None:
    siblings.stores_once = once
    assert gpu_blocks(fixture.stored("a", b"dbe")) == ([0, 2] if once else [0, 1, 2])
    assert fixture.loadable("a") == (b"de" if once else b"bde")


def test_the_newest_are_kept_if_there_are_too_many() -> None:
    keys = [number.to_bytes(4, "big") for number in range(MAX_BORROWED + 2)]
    borrowed = BorrowedKeys(SiblingStandIn(*keys), Cache(1))
    borrowed.search(CONTENTS, keys, NOW)
    assert len(borrowed) == MAX_BORROWED
    assert borrowed.places([keys[0], keys[2]]) == [1]
