"""Resets, from the request to Done: synced, adopted and published epochs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvferry.daemon.core import resets
from kvferry.daemon.core.actions import (
    Action,
    Broadcast,
    PublishKVEvents,
    SendMessage,
    StartTransfer,
)
from kvferry.daemon.core.epochs import Epochs
from kvferry.daemon.core.namespaces import ADOPT_EVERY, LOOK_EVERY
from kvferry.daemon.core.resets import PUBLISH_SECONDS, Resets
from kvferry.daemon.core.tier_actions import (
    DropStore,
    EpochsSettled,
    EpochsSynced,
    SettleEpochs,
    StoresFound,
    SyncEpochs,
    TierDescription,
)
from kvferry.daemon.memory.foreign_memory import SharedWords
from kvferry.daemon.persistence.epoch_page import EpochPage
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.specs import KeyLoadStoreSpec
from support.namespaces_fixture import (
    FINGERPRINT,
    OTHER,
    NamespacesFixture,
    blocks,
    each,
    key_events_of,
    load,
)
from support.own_epochs import DAMAGED

NAME = FINGERPRINT.name
SHARED = TierDescription("store", is_shared=True)
# A step between two messages in which no epoch is adopted after another one.
SOON = ADOPT_EVERY / 100


def new_fixture(
    *sessions: str, tiers: tuple[str | TierDescription, ...] = (), epochs: Epochs | None = None
) -> NamespacesFixture:
    """Epochs are synced by `sync` only."""
    fixture = NamespacesFixture(*(sessions or ("a",)), tiers=tiers, epochs=epochs)
    fixture.syncs = False
    return fixture


def sync(fixture: NamespacesFixture) -> list[Any]:
    return fixture.report(EpochsSynced(now=fixture.now))


def settle(fixture: NamespacesFixture, found: int, tier: int = 0) -> list[Any]:
    """A shared tier has found an epoch of the namespace."""
    asked = fixture.core.resets.epochs_in_use()
    return fixture.report(EpochsSettled(tier, asked, {NAME: found}, now=fixture.now))


def done_of(actions: Sequence[Action]) -> list[Any]:
    """The Done messages among actions."""
    sent = [action.message for action in actions if isinstance(action, SendMessage)]
    return [message for message in sent if isinstance(message, wire.Done)]


def count_of(actions: Sequence[Action], kind: type[Any]) -> int:
    return sum(isinstance(action, kind) for action in actions)


def fixture_that_is_behind(*tiers: str) -> NamespacesFixture:
    """Key a is stored in epoch 1. Epoch 2 is drawn, and not adopted yet."""
    fixture = new_fixture(tiers=tiers)
    fixture.send("a", wire.Reset(1))
    fixture.step = SOON
    fixture.stored("a", b"a")
    assert count_of(fixture.send("a", wire.Reset(2)), PublishKVEvents) == 0
    return fixture


# Syncs


def test_resets_during_a_sync_share_the_next_one() -> None:
    fixture = new_fixture("a", "b")
    requests = ("a", 1), ("a", 2), ("b", 3)
    syncs = [count_of(fixture.send(name, wire.Reset(n)), SyncEpochs) for name, n in requests]
    assert syncs == [1, 0, 0]
    actions = sync(fixture)
    assert (done_of(actions), count_of(actions, SyncEpochs)) == ([wire.Done(1, 3)], 1)
    assert sync(fixture) == [
        SendMessage("a", wire.Done(2, 3)),
        SendMessage("b", wire.Done(3, 3)),
    ]
    assert count_of(fixture.send("a", wire.Reset(4)), SyncEpochs) == 1


def test_done_follows_the_key_events_of_the_reset() -> None:
    fixture = new_fixture()
    fixture.send("a", wire.Subscribe())
    fixture.send("a", wire.Reset(1))
    sync(fixture)
    fixture.step = SOON
    fixture.send("a", wire.Reset(2))
    fixture.send("a", wire.Reset(3))
    assert done_of(sync(fixture)) == done_of(sync(fixture)) == []
    published, broadcast, *done = fixture.advance()
    assert isinstance(published, PublishKVEvents)
    assert broadcast == Broadcast(("a",), published.key_events)
    assert key_events_of([broadcast]) == [("cleared", b"")]
    assert published.key_events.epoch == 3
    assert done_of(done) == [wire.Done(2, 3), wire.Done(3, 3)]


# Labels


def test_a_reset_with_the_label_of_the_last_one_draws_nothing() -> None:
    fixture = new_fixture("a", "b")
    fixture.send("a", wire.Reset(1, "weights 2"))
    sync(fixture)
    fixture.stored("a", b"a")
    assert fixture.send("b", wire.Reset(2, "weights 2")) == [SyncEpochs()]
    assert sync(fixture) == [SendMessage("b", wire.Done(2, 1))]
    assert fixture.loadable("b") == b"a"


# Adoption


def test_nothing_is_valid_until_an_epoch_is_adopted() -> None:
    fixture = fixture_that_is_behind("disk")
    assert fixture.refused("a", load(b"a")) == Code.KEY_ABSENT
    for epoch in (None, 1, 2):
        spec = blocks([0]), KeyLoadStoreSpec((b"b",), epoch)
        assert fixture.refused("a", spec) == Code.STALE
    (found,) = fixture.send("a", wire.FindInTiers(5, each(b"a")))
    assert found.message == wire.TiersFound(5, 0)
    (stream,) = fixture.send("a", wire.Subscribe())
    (part,) = stream.messages
    assert (part.keys, part.last, part.epoch) == ((), True, 1)
    assert fixture.core.writes.take_writes(0, 16, 1.0) == []
    assert key_events_of(fixture.advance()) == [("cleared", b"")]
    fixture.stored("a", b"b")
    assert fixture.loadable("a") == b"b"


def test_an_epoch_of_another_daemon_is_adopted_with_the_next_message() -> None:
    fixture = new_fixture()
    other = new_fixture("b", epochs=fixture.epochs)
    fixture.stored("a", b"a")
    other.send("b", wire.Reset(1))
    actions = fixture.submit("a", load(b"a"))
    assert count_of(actions, StartTransfer) == 0
    assert key_events_of(actions, PublishKVEvents) == [("cleared", b"")]
    assert fixture.open_namespace("a").epoch == 1


def test_an_epoch_of_another_daemon_is_adopted_without_a_message() -> None:
    fixture = new_fixture()
    other = new_fixture("b", epochs=fixture.epochs)
    fixture.stored("a", b"a")
    fixture.send("a", wire.Subscribe())
    assert fixture.core.deadline is not None
    assert fixture.core.deadline <= fixture.now + LOOK_EVERY
    assert fixture.advance() == []
    other.send("b", wire.Reset(1))
    assert key_events_of(fixture.advance()) == [("cleared", b"")]


@pytest.mark.parametrize("stores", range(5))
def test_a_writer_that_is_killed_leaves_a_reset_that_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: int
) -> None:
    """It wrote the epoch, perhaps, and not that one has changed. The next reset has its label."""
    page, left = EpochPage(tmp_path), count(stores, -1)
    page.draw(NAME)
    fixture = new_fixture(epochs=page)
    fixture.stored("a", b"a")
    write = SharedWords.write

    def killed_write(words: SharedWords, row: int, value: int) -> None:
        if next(left) == 0:
            raise InterruptedError
        write(words, row, value)

    writer = EpochPage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(SharedWords, "write", killed_write)
        with pytest.raises(InterruptedError):
            writer.draw(NAME, "weights 2")
    fixture.now += LOOK_EVERY
    actions = [*fixture.send("a", wire.Reset(1, "weights 2")), *sync(fixture)]
    fixture.now += LOOK_EVERY
    actions += fixture.advance()
    assert [message.request_id for message in done_of(actions)] == [1]
    assert fixture.loadable("a") == b""


def test_a_daemon_without_namespaces_has_no_deadline() -> None:
    assert NamespacesFixture().core.deadline is None


def test_an_epoch_of_another_namespace_changes_nothing() -> None:
    fixture = new_fixture()
    fixture.stored("a", b"a")
    fixture.epochs.draw(OTHER.name)
    assert fixture.loadable("a") == b"a"


# Shared tiers


def test_a_reset_is_done_when_the_shared_tiers_have_its_epoch() -> None:
    fixture = new_fixture(tiers=("disk", SHARED, TierDescription("other", is_shared=True)))
    fixture.send("a", wire.Reset(1))
    assert sync(fixture) == [SettleEpochs()]
    assert fixture.core.resets.epochs_in_use() == {NAME: 1}
    assert settle(fixture, 1, tier=1) == []
    assert fixture.epochs.is_unpublished(NAME)
    assert settle(fixture, 1, tier=2) == [SendMessage("a", wire.Done(1, 1))]
    assert not fixture.epochs.is_unpublished(NAME)


def test_a_reset_names_the_shared_tiers_that_do_not_have_its_epoch_in_time() -> None:
    fixture = new_fixture(tiers=(SHARED, "disk", TierDescription("other", is_shared=True)))
    fixture.send("a", wire.Reset(1))
    sync(fixture)
    settle(fixture, 1, tier=2)
    synced, actions = fixture.now, list[Any]()
    while not actions:
        assert fixture.now < synced + PUBLISH_SECONDS
        actions = fixture.advance()
    assert fixture.now == synced + PUBLISH_SECONDS
    assert actions == [SendMessage("a", wire.Done(1, 1, ("store",)))]
    assert fixture.epochs.is_unpublished(NAME)


def test_an_epoch_of_another_host_is_adopted() -> None:
    fixture = new_fixture(tiers=(SHARED,))
    fixture.stored("a", b"a")
    actions = settle(fixture, 7)
    assert key_events_of(actions, PublishKVEvents) == [("cleared", b"")]
    assert count_of(actions, SettleEpochs) == 1
    assert fixture.loadable("a") == b""
    assert settle(fixture, 7) == []
    assert not fixture.epochs.is_unpublished(NAME)


def test_a_reset_that_a_store_does_not_know_is_later_than_its_epoch() -> None:
    """Whatever the clocks of the hosts say."""
    fixture = new_fixture(tiers=(SHARED,))
    fixture.send("a", wire.Reset(1))
    sync(fixture)
    fixture.advance()
    actions = settle(fixture, 7)
    assert (done_of(actions), count_of(actions, SettleEpochs)) == ([], 1)
    assert fixture.epochs.current(NAME) == 8
    fixture.now += ADOPT_EVERY
    assert settle(fixture, 8) == [SendMessage("a", wire.Done(1, 8))]


@pytest.mark.parametrize("resets_before", [0, 1])
def test_a_damaged_epoch_of_a_store_is_ignored(resets_before: int) -> None:
    fixture = new_fixture(tiers=(SHARED,))
    if resets_before:
        fixture.send("a", wire.Reset(1))
    fixture.stored("a", b"a")
    assert settle(fixture, DAMAGED) == []
    assert fixture.epochs.current(NAME) == resets_before
    assert fixture.loadable("a") == b"a"


def test_an_older_epoch_of_a_store_changes_nothing() -> None:
    """The tier publishes this host's then."""
    fixture = new_fixture(tiers=(SHARED,))
    fixture.send("a", wire.Reset(1))
    sync(fixture)
    assert settle(fixture, 0) == []


def test_without_shared_tiers_no_epochs_are_settled() -> None:
    assert new_fixture(tiers=("disk",)).core.resets.epochs_in_use() == {}


# Stores of earlier daemons


def test_the_latest_epoch_of_stores_is_adopted_and_older_stores_are_dropped() -> None:
    fixture = new_fixture(tiers=("disk",))
    fixture.stored("a", b"a")
    (own,) = fixture.core.writes.stores_in_use()
    stores = (f"{NAME}-c-4", f"{NAME}-c-5", f"{NAME}-d-5", f"{NAME}-c", f"{OTHER.name}-c-2")
    actions = fixture.report(StoresFound(stores, now=fixture.now))
    assert key_events_of(actions, PublishKVEvents) == [("cleared", b"")]
    dropped = [action.store for action in actions if isinstance(action, DropStore)]
    assert dropped[1:] == [f"{NAME}-c-4", f"{NAME}-c"]
    assert dropped[0] == own
    assert fixture.epochs.current(NAME) == 5
    assert fixture.epochs.current(OTHER.name) == 2
    assert fixture.loadable("a") == b""


def test_stores_with_a_damaged_epoch_are_dropped() -> None:
    fixture = new_fixture(tiers=("disk",))
    actions = fixture.report(StoresFound((f"{NAME}-c-{DAMAGED}",), now=fixture.now))
    assert actions == [DropStore(f"{NAME}-c-{DAMAGED}")]


# Many resets


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The request ids of resets, each time that one is checked whether it is done."""
    checks, is_done = list[int](), Resets._is_done

    def recorded(self: Resets, reset: Any, now: float) -> bool:
        checks.append(reset.request_id)
        return is_done(self, reset, now)

    monkeypatch.setattr(Resets, "_is_done", recorded)
    return checks


def test_many_resets_in_a_row_are_checked_once_each(checks: list[int]) -> None:
    fixture = new_fixture()
    fixture.step = ADOPT_EVERY / 100
    actions = list[Any]()
    for number in range(2_000):
        actions += fixture.send("a", wire.Reset(number))
    assert checks == []
    assert count_of(actions, SyncEpochs) == 1
    assert count_of(actions, PublishKVEvents) <= 21
    fixture.advance()
    assert [done.request_id for done in done_of(sync(fixture))] == [0]
    assert [done.request_id for done in done_of(sync(fixture))] == [*range(1, 2_000)]
    assert checks == [*range(2_000)]


def test_resets_that_wait_for_a_shared_tier_are_not_checked_at_each_sync(
    checks: list[int],
) -> None:
    fixture = new_fixture(tiers=(SHARED,))
    fixture.step = ADOPT_EVERY / 1000
    for number in range(2000):
        fixture.send("a", wire.Reset(number))
        if number % 10 == 0:
            sync(fixture)
    assert {*checks} == {0}
    assert len(checks) < 300
    fixture.advance()
    settle(fixture, 2000)
    while fixture.core.resets.deadline is not None:
        sync(fixture)
    assert len(checks) < 2400


def test_too_many_resets_are_refused_and_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resets, "MAX_PENDING", 2)
    fixture = new_fixture()
    fixture.send("a", wire.Reset(1))
    fixture.send("a", wire.Reset(2))
    assert fixture.error("a", wire.Reset(3)) == (Code.BUSY, "2")
    assert fixture.epochs.current(NAME) == 2
    assert done_of(sync(fixture)) == [wire.Done(1, 2)]
    assert fixture.send("a", wire.Reset(4)) != []
    assert fixture.epochs.current(NAME) == 3


def test_the_resets_of_a_closed_session_are_done_without_a_reply() -> None:
    """In every state: durable, being synced, and not synced yet."""
    fixture = new_fixture("a", "b", tiers=(SHARED,))
    fixture.step = ADOPT_EVERY
    fixture.send("a", wire.Reset(1))
    sync(fixture)
    fixture.send("b", wire.Reset(2))
    sync(fixture)
    for number, session in enumerate("aabab", 3):
        fixture.send(session, wire.Reset(number))
    fixture.close_sessions("a")
    assert done_of(settle(fixture, 7)) == [wire.Done(2, 7)]
    assert count_of(sync(fixture), SyncEpochs) == 1
    assert done_of(sync(fixture)) == [wire.Done(5, 7), wire.Done(7, 7)]
    assert fixture.core.resets.deadline is None
