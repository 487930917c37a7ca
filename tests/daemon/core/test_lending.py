"""What a sibling, another daemon of the host, gets of a namespace, and what it cannot do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.daemon.core.actions import (
    SendMessage,
    SendStream,
)
from kvferry.daemon.core.records import namespace_owner
from kvferry.daemon.core.tier_actions import (
    DropStore,
    LendPool,
    StoreDropped,
    TierDescription,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.lending import (
    ABSENT,
    UNCOMMITTED,
    BlocksLocated,
    BorrowNamespace,
    BorrowPool,
    LocateBlocks,
    NamespaceLent,
    ResetLent,
)
from support.namespaces_fixture import (
    FINGERPRINT,
    OTHER,
    POOL,
    REGION_BYTES,
    NamespacesFixture,
    each,
    gpu_blocks,
    key_events_of,
    load,
    offsets,
    store,
)

SIBLINGS = TierDescription("siblings", min_uses=0, is_siblings=True)


def new_fixture(**options: Any) -> NamespacesFixture:
    """An engine "a" in the namespace, and the session "s" of a sibling."""
    fixture = NamespacesFixture("a", tiers=("disk", SIBLINGS), **options)
    fixture.open_sessions("s", "t")
    return fixture


def store_name(fixture: NamespacesFixture) -> str:
    (name,) = fixture.core.writes.generations()
    return name


def borrow(fixture: NamespacesFixture, generation: int = 1, **options: Any) -> list[Any]:
    message = BorrowNamespace(1, store_name(fixture), generation, **options)
    return fixture.send("s", message)


def messages_of(actions: list[Any], session: str = "s") -> list[wire.DaemonMessage]:
    sent = [each for each in actions if isinstance(each, SendMessage)]
    return [each.message for each in sent if each.session == session]


def keys_of(actions: list[Any]) -> list[bytes]:
    """The keys of the snapshot that follows."""
    (stream,) = [each for each in actions if isinstance(each, SendStream)]
    assert stream.session == "s"
    parts = [part for part in stream.messages if isinstance(part, wire.Snapshot)]
    return sorted(key for part in parts for key in part.keys)


def error_of(fixture: NamespacesFixture, message: wire.ClientMessage) -> str:
    (reply,) = messages_of(fixture.send("s", message))
    assert isinstance(reply, wire.Error)
    return reply.error.code


def test_a_sibling_gets_all_keys_once_and_then_what_changes() -> None:
    fixture = new_fixture()
    fixture.stored("a", b"ab")
    actions = borrow(fixture)
    assert messages_of(actions) == [NamespaceLent(1, 1)]
    assert keys_of(actions) == [b"a", b"b"]
    assert borrow(fixture) == [SendMessage("s", NamespaceLent(1, 1))]
    assert key_events_of(fixture.end(fixture.start("a", store(b"c")))) == [("stored", b"c")]
    assert keys_of(borrow(fixture, snapshot=True)) == [b"a", b"b", b"c"]
    fixture.core.close_session("s")
    assert key_events_of(fixture.end(fixture.start("a", store(b"d")))) is None


def test_no_namespace_is_created_for_a_sibling() -> None:
    fixture = new_fixture()
    for name in ("0" * 16, f"{'0' * 16}-00", store_name(fixture) + "0"):
        actions = fixture.send("s", BorrowNamespace(1, name, 1))
        assert actions == [SendMessage("s", NamespaceLent(1, 0))]
    assert len(fixture.core.namespaces()) == 1


def test_located_blocks_are_those_that_a_load_reads() -> None:
    fixture = new_fixture()
    fixture.stored("a", b"ab")
    borrow(fixture)
    ((first, absent, second),) = [located.offsets for located in locate(fixture, b"axb")]
    assert [first, second] == offsets(fixture.start("a", load(b"ab")))
    assert absent == ABSENT
    fixture.open_sessions("b")
    fixture.open_namespace("b", OTHER, REGION_BYTES)
    fixture.register("b")
    fixture.stored("b", b"c")
    other = next(name for name in fixture.core.writes.generations() if OTHER.name in name)
    fixture.send("t", BorrowNamespace(1, other, 1))
    (located,) = messages_of(fixture.send("t", LocateBlocks(2, each(b"c"))), "t")
    assert isinstance(located, BlocksLocated)
    assert [*located.offsets] == offsets(fixture.start("b", load(b"c"))) == [REGION_BYTES]


def test_blocks_without_a_checksum_have_no_place() -> None:
    fixture = new_fixture()
    fixture.commits = False
    fixture.stored("a", b"a")
    borrow(fixture)
    (located,) = locate(fixture, b"a")
    assert located.offsets == (UNCOMMITTED,)


def test_the_version_of_a_located_block_is_that_of_its_contents() -> None:
    """It shows whether the block has changed since."""
    fixture = new_fixture()
    fixture.stored("a", b"a")
    borrow(fixture)
    (first,) = locate(fixture, b"ax")
    fixture.send("a", wire.Reset(9))
    fixture.stored("a", b"b")
    (namespace,) = fixture.core._namespaces
    namespace.region.table.lines.memory["checksum"][0] = 77
    (second,) = locate(fixture, b"bx")
    assert second.offsets == first.offsets
    assert (first.versions, second.versions) == ((3, 0), (5, 0))
    assert second.checksums[0] == 77


def locate(fixture: NamespacesFixture, letters: bytes) -> list[BlocksLocated]:
    replies = messages_of(fixture.send("s", LocateBlocks(2, each(letters))))
    return [reply for reply in replies if isinstance(reply, BlocksLocated)]


def test_located_blocks_are_not_held_but_used() -> None:
    fixture = new_fixture()
    fixture.stored("a", b"abcd")
    borrow(fixture)
    fixture.send("s", LocateBlocks(2, each(b"d")))
    assert fixture.usage("pinned") == (0,)
    fixture.stored("a", b"xyz")
    assert fixture.loadable("a", b"abcdxyz") == b"dxyz"
    assert fixture.core.lending.located == 1


def test_the_pool_is_lent_where_the_namespace_is() -> None:
    fixture = new_fixture()
    fixture.open_sessions("b")
    fixture.open_namespace("b", OTHER, REGION_BYTES)
    borrow(fixture)
    (lent,) = fixture.send("s", BorrowPool(4, 2))
    owner = namespace_owner(FINGERPRINT.name)
    assert lent == LendPool("s", 4, 0, REGION_BYTES, 2, owner)


def test_a_sibling_must_borrow_first() -> None:
    fixture = new_fixture()
    for message in (BorrowPool(1), LocateBlocks(1, each(b"a")), ResetLent(1)):
        assert error_of(fixture, message) == Code.UNKNOWN_NAMESPACE


def test_a_daemon_without_siblings_lends_nothing() -> None:
    fixture = NamespacesFixture("a", tiers=("disk",))
    fixture.open_sessions("s")
    assert error_of(fixture, BorrowNamespace(1, "x", 1)) == Code.FORBIDDEN


def test_keys_of_a_wrong_length_are_refused() -> None:
    fixture = new_fixture()
    borrow(fixture)
    assert error_of(fixture, LocateBlocks(1, (b"long",))) == Code.BAD_KEY


def test_a_sibling_resets_the_namespace_and_all_tiers_but_its_own() -> None:
    fixture = new_fixture()
    fixture.stored("a", b"a")
    borrow(fixture)
    actions = fixture.send("s", ResetLent(5))
    assert key_events_of(actions) == [("cleared", b"")]
    (drop,) = [each for each in actions if isinstance(each, DropStore)]
    assert drop.dropped_by == 1
    assert wire.Done(5) not in messages_of(actions)
    assert messages_of(fixture.report(StoreDropped(drop.drop))) == [wire.Done(5)]
    assert fixture.usage("ready") == (0,)


def test_a_sibling_that_left_gets_no_done() -> None:
    fixture = new_fixture()
    borrow(fixture)
    (drop,) = [e for e in fixture.send("s", ResetLent(5)) if isinstance(e, DropStore)]
    fixture.core.close_session("s")
    assert fixture.report(StoreDropped(drop.drop)) == []


@pytest.mark.parametrize(("generation", "reset"), [(0, False), (1, False), (2, True), (7, True)])
def test_a_namespace_that_has_missed_resets_is_reset(generation: int, reset: bool) -> None:
    fixture = new_fixture()
    fixture.stored("a", b"a")
    actions = borrow(fixture, generation)
    assert messages_of(actions) == [NamespaceLent(1, generation if reset else 1)]
    assert keys_of(actions) == ([] if reset else [b"a"])
    assert bool([each for each in actions if isinstance(each, DropStore)]) == reset
    assert fixture.core.writes.generations() == {
        store_name(fixture): generation if reset else 1,
    }


def test_a_sibling_does_not_keep_the_region_in_use() -> None:
    """Its engine has left, and another namespace needs all of the pool."""
    fixture = new_fixture()
    fixture.stored("a", b"a")
    borrow(fixture)
    fixture.close_sessions("a")
    fixture.open_sessions("b")
    actions = fixture.send("b", wire.OpenNamespace(1, OTHER, POOL))
    assert isinstance(messages_of(actions, "b")[0], wire.Opened)
    assert key_events_of(actions) == [("cleared", b"")]
    assert error_of(fixture, LocateBlocks(2, each(b"a"))) == Code.UNKNOWN_NAMESPACE


def test_a_namespace_that_was_created_again_is_missing_once() -> None:
    """Then the sibling unmaps the region and the block table that it had before."""
    fixture = new_fixture()
    borrow(fixture)
    fixture.close_sessions("a")
    fixture.open_sessions("b", "a")
    fixture.open_namespace("b", OTHER, POOL)
    fixture.close_sessions("b")
    fixture.open_namespace("a", FINGERPRINT, REGION_BYTES)
    fixture.register("a")
    fixture.stored("a", b"a")
    assert borrow(fixture) == [SendMessage("s", NamespaceLent(1, 0))]
    assert error_of(fixture, BorrowPool(1)) == Code.UNKNOWN_NAMESPACE
    assert keys_of(borrow(fixture)) == [b"a"]


def test_keys_that_siblings_have_are_left_out_of_a_store() -> None:
    held = {b"b", b"d"}
    tier = replace(SIBLINGS, find_held=lambda _store, keys: held & set(keys))
    fixture = NamespacesFixture(tiers=(tier,))
    fixture.open_sessions("a")
    fixture.open_namespace("a")
    fixture.register("a")
    assert gpu_blocks(fixture.stored("a", b"abc")) == [0, 2]
    assert fixture.loadable("a") == b"ac"
