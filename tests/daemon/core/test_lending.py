"""What a sibling, another daemon of the host, gets of a namespace, and what it cannot do."""

from __future__ import annotations

from typing import Any

from kvferry.daemon.core.actions import SendMessage
from kvferry.daemon.core.tier_actions import LendMemory
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.lending import BorrowMemory, MemoryLent, Uses
from support.namespaces_fixture import (
    FINGERPRINT,
    OTHER,
    POOL,
    REGION_BYTES,
    NamespacesFixture,
    each,
)
from support.sibling_stand_in import SiblingStandIn


def new_fixture() -> NamespacesFixture:
    """An engine "a" in the namespace, and the session "s" of a sibling."""
    return NamespacesFixture("a", siblings=SiblingStandIn())


def borrow(fixture: NamespacesFixture, first: int | None = None, other: int = 0) -> Any:
    """The action that follows. other: what differs in the composition."""
    (namespace,) = fixture.core._namespaces
    message = BorrowMemory(1, FINGERPRINT.name, namespace.record.composition ^ other, first)
    (action,) = fixture.send("s", message)
    return action


def test_the_region_of_the_namespace_is_lent() -> None:
    fixture = new_fixture()
    fixture.stored("a", b"ab")
    (namespace,) = fixture.core._namespaces
    assert borrow(fixture) == LendMemory("s", 1, namespace.region, None, 2)
    assert borrow(fixture, 3) == LendMemory("s", 1, namespace.region, 3, 2)


def test_a_namespace_of_another_composition_is_not_lent() -> None:
    assert borrow(new_fixture(), other=1) == SendMessage("s", MemoryLent(1))


def test_no_namespace_is_created_for_a_sibling() -> None:
    fixture = new_fixture()
    actions = fixture.send("s", BorrowMemory(1, "0" * 16, 1))
    assert actions == [SendMessage("s", MemoryLent(1))]
    assert len(fixture.core.namespaces()) == 1


def test_a_namespace_without_a_registration_is_not_lent() -> None:
    fixture = NamespacesFixture(siblings=SiblingStandIn())
    fixture.open_namespace("a")
    actions = fixture.send("s", BorrowMemory(1, FINGERPRINT.name, 0))
    assert actions == [SendMessage("s", MemoryLent(1))]


def test_a_sibling_does_not_keep_the_region_in_use() -> None:
    """Its engine has left, and another namespace needs all of the pool."""
    fixture = new_fixture()
    fixture.stored("a", b"a")
    borrow(fixture)
    fixture.close_sessions("a")
    actions = fixture.send("b", wire.OpenNamespace(1, OTHER, POOL))
    assert isinstance(actions[0].message, wire.Opened)
    assert [each.name for each in fixture.core.namespaces()] == [OTHER.name]


def test_a_namespace_of_an_earlier_daemon_is_lent_before_any_engine_returns() -> None:
    old = new_fixture()
    old.stored("a", b"a")
    fixture = NamespacesFixture(siblings=SiblingStandIn())
    fixture.region_records = old.region_records
    fixture.core.restore_region(*old.region_records.found())
    action = borrow(fixture)
    assert (action.region.nbytes, action.keys) == (REGION_BYTES, 0)


def test_what_a_sibling_uses_is_evicted_last() -> None:
    fixture = new_fixture()
    fixture.stored("a", b"abcd")
    assert fixture.send("s", Uses(FINGERPRINT.name, each(b"d"))) == []
    assert fixture.usage("pinned") == (0,)
    fixture.stored("a", b"xyz")
    assert fixture.loadable("a", b"abcdxyz") == b"dxyz"
    assert fixture.core.lending.used == 1


def test_uses_of_what_is_not_here_are_ignored() -> None:
    fixture = new_fixture()
    assert fixture.send("s", Uses("0" * 16, each(b"d"))) == []
    assert fixture.send("s", Uses(FINGERPRINT.name, each(b"d"))) == []


def test_keys_of_a_wrong_length_are_refused() -> None:
    assert new_fixture().error("s", Uses(FINGERPRINT.name, (b"long",)))[0] == Code.BAD_KEY


def test_a_daemon_without_siblings_lends_nothing() -> None:
    fixture = NamespacesFixture("a", tiers=("disk",))
    for message in (BorrowMemory(1, "x", 1), Uses("x", each(b"a"))):
        assert fixture.error("s", message)[0] == Code.FORBIDDEN
