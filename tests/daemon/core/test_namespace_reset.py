"""Resets of a namespace, also while transfers are in flight."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.actions import FreeDeferred, PublishKVEvents, SendMessage
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.keys import EventKind
from kvferry.proto.results import Outcome
from kvferry.proto.specs import KeyLoadStoreSpec
from support.committed_blocks import residents_of
from support.namespaces_fixture import (
    CANCELLED,
    DONE,
    FAILED,
    NamespacesFixture,
    blocks,
    key_events_of,
    load,
    offsets,
    store,
)


def test_a_reset_makes_every_key_absent_at_once() -> None:
    fixture = NamespacesFixture("a", "b")
    fixture.stored("a", b"abc")
    fixture.start("a", store(b"d"))
    fixture.send("b", wire.Subscribe())
    free, published, broadcast, done = fixture.send("b", wire.Reset(5))
    assert key_events_of([published], PublishKVEvents) == [("cleared", b"")]
    assert key_events_of([broadcast]) == [("cleared", b"")]
    assert isinstance(free, FreeDeferred)
    assert not free.deferred.free_some()
    assert done == SendMessage("b", wire.Done(5, 1))
    assert fixture.loadable("a") == b""
    assert fixture.snapshot("a") == (b"", b"")
    (found,) = fixture.region_records.found()
    assert (residents_of(found.lines, 1), found.record.epoch) == ((), 1)


@pytest.mark.parametrize("outcome", [DONE, FAILED, CANCELLED])
def test_jobs_from_before_a_reset_keep_their_blocks_and_change_no_key(outcome: Outcome) -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"ab")
    loading = [fixture.start("a", load(b"a")), fixture.start("a", load(b"a"))]
    storing = fixture.start("a", store(b"c"))
    fixture.send("a", wire.Reset(5))
    assert fixture.usage("free", "pending", "ready", "orphaned", "pinned") == (2, 0, 0, 2, 0)
    assert fixture.refused("a", store(b"abc")) == Code.CACHE_FULL
    storing_again = fixture.start("a", store(b"ac"))
    assert not set(offsets(storing_again)) & {*offsets(loading[0]), *offsets(storing)}
    assert key_events_of(fixture.end(storing, outcome), PublishKVEvents) is None
    assert fixture.loadable("a") == b""
    fixture.end(storing_again)
    assert fixture.loadable("a") == b"ac"
    fixture.end(loading[0], outcome)
    assert fixture.usage("free", "orphaned") == (1, 1)
    fixture.end(loading[1], outcome)
    assert fixture.usage("free", "pending", "ready", "orphaned") == (2, 0, 2, 0)
    assert fixture.loadable("a") == b"ac"


def test_a_store_of_another_epoch_is_refused() -> None:
    fixture = NamespacesFixture("a", "b")
    fixture.stored("a", b"a")
    fixture.send("b", wire.Subscribe())
    published = next(
        each for each in fixture.send("b", wire.Reset(5)) if isinstance(each, PublishKVEvents)
    )
    assert published.key_events == wire.KeyEvents(3, (wire.KeyEvent(EventKind.CLEARED, ()),), 1)
    before = fixture.namespaces()
    gpu = blocks([0])
    for epoch in (0, 2):
        assert fixture.refused("a", (gpu, KeyLoadStoreSpec((b"a",), epoch))) == Code.STALE
    assert fixture.namespaces() == before
    for spec in (KeyLoadStoreSpec((b"a",), 1), KeyLoadStoreSpec((b"b",))):  # this one, any
        fixture.end(fixture.start("a", (gpu, spec)))
    fixture.start("a", (KeyLoadStoreSpec((b"a",), 9), gpu))  # a load may have any epoch


def test_opened_and_snapshots_have_the_epoch() -> None:
    fixture = NamespacesFixture("a")
    assert fixture.open_namespace("a").epoch == 0
    fixture.send("a", wire.Reset(5))
    fixture.send("a", wire.Reset(6))
    assert fixture.open_namespace("a").epoch == 2
    (stream,) = fixture.send("a", wire.Subscribe())
    assert list(stream.messages) == [wire.Snapshot(2, 0, False, (), True, 2)]
    fixture.close_sessions("a")
    assert fixture.open_namespace("b", policy="arc").epoch == 2
