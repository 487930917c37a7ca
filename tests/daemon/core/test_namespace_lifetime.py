"""Lifetime of namespaces: engines that disconnect, and regions that other engines need."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvferry.daemon.core.actions import (
    CancelTransfers,
    CloseSession,
    MapTensors,
    PublishKVEvents,
    SendMessage,
    TensorsUnmapped,
    UnmapTensors,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code
from kvferry.proto.fingerprint import Fingerprint
from support.namespaces_fixture import (
    CANCELLED,
    DONE,
    FINGERPRINT,
    LAYOUT,
    OTHER,
    REGION_BYTES,
    WIDE,
    NamespacesFixture,
    key_events_of,
    load,
    offsets,
    store,
)


def test_only_pending_stores_of_a_dead_engine_are_abandoned() -> None:
    fixture = NamespacesFixture("a/worker", "b", "a/scheduler")
    fixture.stored("a/worker", b"a")
    fixture.stored("b", b"b")
    first = fixture.start("a/worker", store(b"c"))
    second = fixture.start("a/scheduler", store(b"d"))
    actions = fixture.core.close_session("a/worker")
    cancel = CancelTransfers(1, (first.serial,))
    assert actions == [CloseSession("a/worker"), cancel, UnmapTensors(1)]
    assert fixture.usage("pending", "ready", "free") == (2, 2, 0)
    assert fixture.refused("b", store(b"efg")) == Code.CACHE_FULL  # the copy may still write there
    assert key_events_of(fixture.end(first, CANCELLED), PublishKVEvents) == [("abandoned", b"c")]
    finished, published = fixture.end(second, CANCELLED)
    assert isinstance(finished.message, wire.Finished)
    error = finished.message.results[0].error
    assert error is not None
    assert error.code == Code.ENGINE_GONE
    assert key_events_of([published], PublishKVEvents) == [("abandoned", b"d")]
    assert fixture.report(TensorsUnmapped(1)) == []
    assert fixture.usage("pending", "ready", "free") == (0, 2, 2)
    assert fixture.loadable("b") == b"ab"
    fixture.stored("b", b"cd")
    assert fixture.loadable("b") == b"abcd"


def test_a_store_that_completed_before_its_engine_died_is_resident() -> None:
    fixture = NamespacesFixture("a", "b")
    plan = fixture.start("a", store(b"a"))
    fixture.core.close_session("a")
    fixture.end(plan, DONE)
    fixture.report(TensorsUnmapped(1))
    assert fixture.loadable("b") == b"a"


def test_a_namespace_stays_after_its_engines_disconnect() -> None:
    fixture = NamespacesFixture("a/worker", "a/scheduler", "b")
    plan = fixture.stored("a/worker", b"abc")
    loading = fixture.start("b", load(b"a"))
    for session in ("a/worker", "a/scheduler", "b"):
        fixture.core.close_session(session)
    fixture.end(loading, CANCELLED)
    fixture.report(TensorsUnmapped(1))
    fixture.report(TensorsUnmapped(2))
    assert fixture.usage("engines", "ready", "pinned") == ((), 3, 0)
    assert fixture.open_namespace("c").reattached
    fixture.register("c")
    assert offsets(fixture.start("c", load(b"abc"))) == offsets(plan)


@pytest.mark.parametrize("as_namespace", [True, False])
def test_an_unused_namespace_is_freed_if_its_room_is_needed(as_namespace: bool) -> None:
    fixture = NamespacesFixture("a", pool_bytes=2 * REGION_BYTES)
    fixture.stored("a", b"abc")
    if as_namespace:
        request: wire.ClientMessage = wire.OpenNamespace(1, OTHER, 2 * REGION_BYTES)
    else:
        request = wire.AllocateKVCaches(1, LAYOUT, 2 * REGION_BYTES)
    assert fixture.error("n", request)[0] == Code.POOL_FULL
    fixture.core.close_session("a")
    assert fixture.send("n", request) == []  # a copy of "a" may still write there
    actions = [type(action) for action in fixture.report(TensorsUnmapped(1))]
    assert actions.count(SendMessage if as_namespace else MapTensors) == 1
    assert [n.name for n in fixture.namespaces()] == ([OTHER.name] if as_namespace else [])
    assert fixture.error("b", wire.OpenNamespace(1, FINGERPRINT, REGION_BYTES))[0] == Code.POOL_FULL
    fixture.close_sessions("n")
    assert not fixture.open_namespace("b").reattached
    assert fixture.usage("ready", "free") == (0, 4)
    fixture.register("b")
    assert fixture.loadable("b") == b""


@pytest.mark.parametrize("as_namespace", [True, False])
def test_a_request_for_all_that_is_free_waits_until_a_disconnected_engine_is_unmapped(
    as_namespace: bool,
) -> None:
    fixture = NamespacesFixture("a", pool_bytes=4 * REGION_BYTES)
    fixture.core.close_session("a")
    request: wire.ClientMessage = wire.AllocateKVCaches(1, LAYOUT)
    if as_namespace:
        request = wire.OpenNamespace(1, OTHER)
    assert fixture.send("n", request) == []
    assert fixture.open_namespace("b", quota=None).reattached  # its own is not in question
    fixture.close_sessions("b")
    fixture.report(TensorsUnmapped(1))
    assert fixture.core.reserved_bytes == 4 * REGION_BYTES


@pytest.mark.parametrize("fingerprint", [OTHER, FINGERPRINT])
def test_a_freed_namespace_publishes_cleared(
    fingerprint: Fingerprint,
) -> None:
    fixture = NamespacesFixture("a", pool_bytes=2 * REGION_BYTES)
    fixture.stored("a", b"abc")
    fixture.close_sessions("a")
    actions = fixture.send("n", wire.OpenNamespace(1, fingerprint, 2 * REGION_BYTES))
    (publish,) = (action for action in actions if isinstance(action, PublishKVEvents))
    assert (publish.namespace, key_events_of([publish], PublishKVEvents)) == (
        FINGERPRINT.name,
        [("cleared", b"")],
    )


def test_a_freed_namespace_leaves_memory_at_once() -> None:
    """The daemon almost never collects garbage, so no cycle may keep the namespace's tables."""
    fixture = NamespacesFixture("a", pool_bytes=2 * REGION_BYTES)
    fixture.stored("a", b"abc")
    fixture.close_sessions("a")
    (namespace,) = fixture.core._namespaces
    freed, table = weakref.ref(namespace), weakref.ref(namespace.region.table)
    del namespace
    gc.collect()
    gc.disable()
    try:
        fixture.send("n", wire.OpenNamespace(1, OTHER, 2 * REGION_BYTES))
        assert (freed(), table()) == (None, None)
    finally:
        gc.enable()


def test_a_successor_registers_after_its_predecessor_is_unmapped() -> None:
    fixture = NamespacesFixture("a/old")
    fixture.stored("a/old", b"a")
    fixture.open_namespace("a/new")
    fixture.core.close_session("a/old")
    assert fixture.send("a/new", wire.AllocateKVCaches(1, WIDE)) == []
    (action,) = fixture.report(TensorsUnmapped(1))
    assert isinstance(action.message, wire.Error)
    assert action.message.error.code == Code.NAMESPACE_MISMATCH
    fixture.register("a/new")
    assert fixture.loadable("a/new") == b"a"
