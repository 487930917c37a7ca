"""Keys in the tiers: searched, promoted if that is faster than computing, and released."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.daemon.core.actions import SendMessage
from kvferry.daemon.core.search_queue import MAX_SEARCHES
from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    DropStore,
    FetchBlocks,
    FetchReleased,
    FindKeys,
    KeysFound,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.specs import KVLayout, TensorRef
from support.committed_blocks import residents_of
from support.namespaces_fixture import (
    FINGERPRINT,
    OTHER,
    PAGE,
    POOL,
    REGION_BYTES,
    ROW,
    NamespacesFixture,
    each,
    key_events_of,
    store,
)

# 16 blocks: eight may be promoted at a time.
QUOTA = 4 * REGION_BYTES


def keys_of(action: FindKeys | FetchBlocks) -> bytes:
    return b"".join(action.keys)


def new_fixture(*tiers: str) -> NamespacesFixture:
    return NamespacesFixture("a", quota=QUOTA, tiers=tiers or ("disk",))


def actions_of(actions: list[Any], kind: type[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def reply_of(actions: list[Any]) -> Any:
    (action,) = actions_of(actions, SendMessage)
    return action.message


def start_search(fixture: NamespacesFixture, letters: bytes, seconds: float = 0.0) -> FindKeys:
    (action,) = fixture.send("a", wire.FindInTiers(1, each(letters), seconds))
    assert isinstance(action, FindKeys)
    return action


def end_search(
    fixture: NamespacesFixture, search: FindKeys, *tiers: int, known: bool = True
) -> list[Any]:
    return fixture.report(
        KeysFound(search.search, tiers, (1000.0 * PAGE,) * 2, (0.0, 0.0), (known,) * 2)
    )


def promote(fixture: NamespacesFixture, letters: bytes) -> FetchBlocks:
    actions = end_search(fixture, start_search(fixture, letters), *(0 for _ in letters))
    (fetch,) = actions_of(actions, FetchBlocks)
    assert isinstance(fetch, FetchBlocks)
    return fetch


def test_a_prefix_is_promoted_up_to_the_first_missing_key() -> None:
    fixture = new_fixture()
    fixture.stored("a", b"b")
    fixture.send("a", wire.Subscribe())
    search = start_search(fixture, b"abcde")
    assert keys_of(search) == b"acde"
    actions = end_search(fixture, search, 0, 0, -1, 0)
    assert key_events_of(actions) == [("pending", b"ac")]
    assert reply_of(actions) == wire.TiersFound(1, 3, 2)
    (fetch,) = actions_of(actions, FetchBlocks)
    assert (fetch.tier, fetch.store, fetch.keys) == (0, search.store, search.keys[:2])
    assert fetch.offsets.tolist() == [PAGE, 2 * PAGE]
    assert isinstance(actions[-1], SendMessage)


def test_blocks_of_a_second_namespace_are_fetched_into_its_region() -> None:
    fixture = new_fixture()
    fixture.open_namespace("b", OTHER, QUOTA)
    fixture.register("b")
    (search,) = fixture.send("b", wire.FindInTiers(1, each(b"c")))
    (fetch,) = actions_of(end_search(fixture, search, 0), FetchBlocks)
    assert fetch.offsets.tolist() == [QUOTA]


def test_fetched_keys_become_loadable_and_committed_and_failed_ones_absent() -> None:
    fixture = new_fixture()
    fixture.send("a", wire.Subscribe())
    fetch = promote(fixture, b"ab")
    actions = fixture.core.report(BlocksFetched(fetch.fetch, (True, False)))
    assert key_events_of(actions) == [("stored", b"a"), ("abandoned", b"b")]
    (found,) = fixture.region_records.found()
    assert [resident.key for resident in residents_of(found.lines)] == [b"a"]
    assert fixture.usage("free", "ready", "orphaned") == (14, 1, 1)
    fixture.report(FetchReleased(fetch.fetch))
    assert fixture.usage("free", "ready", "orphaned") == (15, 1, 0)


@pytest.mark.parametrize(("seconds", "promoted"), [(0.0, 2), (0.0009, 0), (0.0011, 2)])
def test_keys_are_promoted_only_if_computing_them_is_slower(seconds: float, promoted: int) -> None:
    fixture = new_fixture()
    message = reply_of(end_search(fixture, start_search(fixture, b"ab", seconds), 0, 0))
    assert (message.prefix, message.promoted) == (promoted, promoted)
    assert fixture.core.tier_counters() == {"disk": {"skipped": 2 - promoted, "dropped_writes": 0}}


@pytest.mark.parametrize(
    ("rate", "computing", "seconds"),
    [
        *((10, 0.0, 0.4), (10, 0.2, 0.4), (10, 0.15, 0.3), (10, 0.11, 0.25)),
        *((1, 0.0, 2.0), (1, 9, 2.0), (1000, 0.0, 0.25), (1000, 0.3, 0.25)),
    ],
)
def test_the_timeout_of_a_promotion_is_twice_its_estimate_and_at_most_the_computing_time(
    rate: float, computing: float, seconds: float
) -> None:
    fixture = new_fixture()
    search = start_search(fixture, b"ab", computing)
    report = KeysFound(search.search, (0, 0), (rate * PAGE,), (0.0,), (True,))
    (fetch,) = actions_of(fixture.report(report), FetchBlocks)
    assert fetch.seconds == pytest.approx(seconds)


def test_an_unknown_rate_is_measured_with_keys_that_no_request_waits_for() -> None:
    """The reply reports no promoted prefix, so the engine computes the prompt at once."""
    fixture = new_fixture("fast", "slow")
    search = start_search(fixture, b"abcde", 0.0005)
    actions = end_search(fixture, search, 0, 0, 1, 0, 1, known=False)
    (fetch,) = actions_of(actions, FetchBlocks)
    assert (fetch.tier, keys_of(fetch), fetch.seconds) == (1, b"e", 2.0)
    assert reply_of(actions) == wire.TiersFound(1, 0)
    counters = fixture.core.tier_counters()
    assert [counters[tier]["skipped"] for tier in ("fast", "slow")] == [3, 2]
    search = start_search(fixture, b"z", 0.0005)
    assert not actions_of(end_search(fixture, search, 0, known=False), FetchBlocks)


def test_keys_in_two_tiers_are_fetched_from_each() -> None:
    fixture = new_fixture("fast", "slow")
    fetches = actions_of(end_search(fixture, start_search(fixture, b"abc"), 1, 0, 1), FetchBlocks)
    assert [(fetch.tier, keys_of(fetch)) for fetch in fetches] == [(0, b"b"), (1, b"ac")]


def test_a_second_search_counts_keys_that_are_being_promoted() -> None:
    fixture = new_fixture()
    first, second = start_search(fixture, b"ab"), start_search(fixture, b"ab")
    end_search(fixture, first, 0, 0)
    assert reply_of(end_search(fixture, second, 0, 0)) == wire.TiersFound(1, 2)
    assert reply_of(fixture.send("a", wire.FindInTiers(1, each(b"ab")))) == wire.TiersFound(1, 2)


def test_at_most_half_of_the_blocks_are_promoted_at_a_time() -> None:
    fixture = new_fixture()
    fetch = promote(fixture, b"abcdefghij")
    assert keys_of(fetch) == b"abcdefgh"
    assert reply_of(end_search(fixture, start_search(fixture, b"ij"), 0, 0)) == wire.TiersFound(
        1, 0
    )
    fixture.report(BlocksFetched(fetch.fetch, (True,) * 8))
    fixture.report(FetchReleased(fetch.fetch))
    assert keys_of(promote(fixture, b"ij")) == b"ij"


def test_too_many_searches_of_a_session_are_refused() -> None:
    fixture = new_fixture()
    for _ in range(MAX_SEARCHES):
        fixture.send("a", wire.FindInTiers(1, each(b"a")))
    message = wire.FindInTiers(1, each(b"a"))
    assert fixture.error("a", message) == (Code.BUSY, str(MAX_SEARCHES))


def test_searches_that_were_not_asked_yet_follow() -> None:
    fixture = new_fixture()
    first = start_search(fixture, b"a")
    start_search(fixture, b"b")
    assert fixture.send("a", wire.FindInTiers(2, each(b"cd"))) == []
    find, *actions = end_search(fixture, first, -1)
    assert keys_of(find) == b"cd"
    assert reply_of(actions) == wire.TiersFound(1, 0)
    assert reply_of(end_search(fixture, find, 0, 0)) == wire.TiersFound(2, 2, 2)


def test_a_search_from_before_a_reset_promotes_nothing() -> None:
    fixture = new_fixture()
    search = start_search(fixture, b"a")
    (drop,) = actions_of(fixture.send("a", wire.Reset(5)), DropStore)
    assert drop.store == search.store
    assert reply_of(end_search(fixture, search, 0)) == wire.TiersFound(1, 0)
    assert fixture.usage("free") == (16,)
    assert start_search(fixture, b"a").store == f"{search.store}-1"


def test_a_search_that_ends_before_a_reset_is_adopted_promotes_nothing() -> None:
    fixture = new_fixture()
    fixture.send("a", wire.Reset(5))
    find = wire.FindInTiers(1, each(b"a"))
    (search,) = fixture.core.handle("a", find, fixture.now + 0.01)
    assert isinstance(search, FindKeys)
    fixture.epochs.draw(FINGERPRINT.name)
    assert reply_of(fixture.core.handle("a", find, fixture.now + 0.02)) == wire.TiersFound(1, 0)
    assert end_search(fixture, search, 0) == [SendMessage("a", wire.TiersFound(1, 0))]


def test_blocks_from_before_a_reset_are_free_only_after_their_release() -> None:
    fixture = new_fixture()
    fetch = promote(fixture, b"ab")
    fixture.send("a", wire.Reset(5))
    assert fixture.report(BlocksFetched(fetch.fetch, (True, True))) == []
    assert fixture.usage("free", "ready", "orphaned") == (14, 0, 2)
    fixture.report(FetchReleased(fetch.fetch))
    assert fixture.usage("free") == (16,)


def test_a_search_of_a_closed_session_promotes_nothing() -> None:
    fixture = new_fixture()
    search = start_search(fixture, b"a")
    fixture.close_sessions("a")
    fixture.open_namespace("a", quota=QUOTA)
    assert end_search(fixture, search, 0) == []
    assert fixture.usage("free") == (16,)


def test_a_region_with_a_promotion_is_not_freed_before_its_release() -> None:
    fixture = new_fixture()
    fetch = promote(fixture, b"a")
    fixture.close_sessions("a")
    assert fixture.send("b", wire.OpenNamespace(7, OTHER, POOL, "lru", 1)) == []
    assert not actions_of(fixture.report(BlocksFetched(fetch.fetch, (True,))), SendMessage)
    opened = reply_of(fixture.report(FetchReleased(fetch.fetch)))
    assert opened.num_blocks == POOL // PAGE


def test_a_store_skips_a_key_that_is_being_promoted() -> None:
    fixture = new_fixture()
    promote(fixture, b"a")
    assert fixture.start("a", store(b"ab")).nbytes == PAGE


def test_opened_lists_the_tiers() -> None:
    fixture = new_fixture("fast", "slow")
    assert fixture.open_namespace("a", quota=QUOTA).tiers == ("fast", "slow")


def test_a_namespace_of_fewer_than_four_blocks_promotes_one_at_a_time() -> None:
    fixture = NamespacesFixture("a", quota=3 * PAGE, tiers=("disk",))
    assert keys_of(promote(fixture, b"ab")) == b"a"


def test_keys_of_another_composition_are_in_another_store() -> None:
    halves = KVLayout((ROW,), ((TensorRef(0, PAGE // 2),),))
    full = start_search(new_fixture(), b"a")
    fixture = NamespacesFixture("a", layout=halves, tiers=("disk",))
    other = start_search(fixture, b"a")
    assert other.keys == full.keys
    assert other.store != full.store


def test_reports_with_unknown_numbers_are_ignored() -> None:
    fixture = new_fixture()
    fetch = promote(fixture, b"a")
    done = BlocksFetched(fetch.fetch, (True,))
    fixture.report(done)
    assert fixture.report(done) == []
    fixture.report(FetchReleased(fetch.fetch))
    for report in (
        done,
        FetchReleased(fetch.fetch),
        KeysFound(99, (), (), (), ()),
    ):
        assert fixture.report(report) == []
    assert fixture.usage("free", "ready", "orphaned", "pinned") == (15, 1, 0, 0)


def test_keys_that_are_released_before_they_were_read_are_absent() -> None:
    fixture = new_fixture()
    fixture.send("a", wire.Subscribe())
    fetch = promote(fixture, b"a")
    assert key_events_of(fixture.core.report(FetchReleased(fetch.fetch))) == [("abandoned", b"a")]
    assert fixture.usage("free") == (16,)
