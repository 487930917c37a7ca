"""Engines that register in a namespace: layouts, and namespaces of an earlier daemon."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvferry.daemon.core.actions import (
    BlocksVerified,
    MapTensors,
    PublishKVEvents,
    SendMessage,
    TensorsMapped,
)
from kvferry.daemon.core.records import RecoveredRegion
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, ErrorInfo, Refused
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from support.committed_blocks import residents_of
from support.namespaces_fixture import (
    FINGERPRINT_OF_THREE,
    HYBRID,
    LAYOUT,
    PAGE,
    POOL,
    REGION_BYTES,
    ROW,
    WIDE,
    NamespacesFixture,
    blocks,
    each,
    key_events_of,
    load,
    offsets,
    store,
)


def test_an_engine_in_a_namespace_gets_no_region() -> None:
    fixture = NamespacesFixture()
    fixture.open_namespace("a")
    error = fixture.error("a", wire.AllocateKVCaches(1, LAYOUT, REGION_BYTES))
    assert error == (Code.BAD_LAYOUT, str(REGION_BYTES))
    assert not fixture.core.busy
    fixture.register("a")


@pytest.mark.parametrize("layout", [WIDE, HYBRID])
def test_a_layout_whose_host_blocks_have_another_size_is_refused(layout: KVLayout) -> None:
    fixture = NamespacesFixture()
    fixture.open_namespace("a")
    error = fixture.error("a", wire.AllocateKVCaches(1, layout))
    assert error == (Code.NAMESPACE_MISMATCH, str(3 * PAGE))
    fixture.register("a")


def test_a_layout_that_splits_the_same_bytes_differently_is_refused() -> None:
    fixture = NamespacesFixture("a")
    halves = (TensorRef(0, PAGE // 2), TensorRef(1, PAGE // 2))
    fixture.open_namespace("b")
    split = KVLayout((ROW, ROW), (halves,))
    assert fixture.error("b", wire.AllocateKVCaches(1, split))[0] == Code.NAMESPACE_MISMATCH
    padded = KVLayout((TensorLayout(99, PAGE, 4 * PAGE),), LAYOUT.groups)
    fixture.register("b", padded)  # the stride on the GPU may differ


@pytest.mark.parametrize("restarted", [False, True])
def test_a_layout_with_more_gpu_blocks_per_host_block_is_refused(restarted: bool) -> None:
    """A complete host block of one layout is a part of a host block of the other."""
    two = KVLayout((ROW,), ((TensorRef(0, PAGE),),), 2)
    fixture = NamespacesFixture("a", fingerprint=FINGERPRINT_OF_THREE, layout=two)
    fixture.stored("a", b"k", blocks([0, 1]))
    if restarted:
        records, fixture = fixture.region_records, NamespacesFixture()
        fixture.region_records = records
        fixture.core.restore_region(*records.found())
    fixture.open_namespace("b", FINGERPRINT_OF_THREE)
    (action,) = fixture.send("b", wire.AllocateKVCaches(1, WIDE))
    error = action.message.error
    assert error.code == Code.NAMESPACE_MISMATCH
    assert "has 3 GPU blocks of pages [1024], but in namespace" in error.message
    assert isinstance(fixture.send("b", wire.AllocateKVCaches(1, two))[0], MapTensors)


def test_a_restored_namespace_without_the_layout_of_its_blocks_is_refused() -> None:
    """The record of the earlier daemon lacks the number of GPU blocks per host block."""
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"a")
    (found,) = fixture.region_records.found()
    record, restarted = msgspec.structs.replace(found.record, factor=0), NamespacesFixture()
    with pytest.raises(Refused) as caught:
        restarted.core.restore_region(msgspec.structs.replace(found, record=record))
    assert caught.value.code == Code.BAD_LAYOUT
    restarted.core.restore_region(RecoveredRegion(record))  # it has no blocks


def test_a_restored_namespace_has_its_keys_and_parts_and_sends_no_events(
    fixture_with_parts: NamespacesFixture,
) -> None:
    fixture_with_parts.send("a", wire.Reset(5))
    fixture_with_parts.stored("a", b"x", blocks([0, 1, 2]))
    fixture_with_parts.stored("a", b"y", blocks([0, 1]))
    records, fixture = fixture_with_parts.region_records, NamespacesFixture()
    fixture.region_records = records
    fixture.core.restore_region(*records.found())
    actions = fixture.send("b", wire.OpenNamespace(7, FINGERPRINT_OF_THREE))
    assert [type(action) for action in actions] == [SendMessage]
    assert actions[0].message.epoch == 1
    fixture.register("b", WIDE)
    all_parts = blocks([0, 1, 2])
    assert (fixture.snapshot("b"), fixture.loadable("b", b"x")) == ((b"", b"x"), b"")
    region, keys = fixture.region_records.found()[0].record.owner, each(b"xy")
    residents = residents_of(fixture.region_records.found()[0].lines, 1)
    block_of = {resident.key: resident.block for resident in residents}
    verified = np.array([block_of[key] for key in keys])
    actions = fixture.report(BlocksVerified(region, verified))
    assert key_events_of(actions, PublishKVEvents) == [("stored", b"x")]
    fixture.start("b", load(b"x", all_parts))
    assert fixture.refused("b", load(b"y", all_parts)) == Code.KEY_ABSENT
    fixture.start("b", load(b"y", blocks([0, 1])))


def test_a_restored_namespace_with_a_damaged_block_table_is_refused() -> None:
    fixture = NamespacesFixture("a", quota=POOL)
    fixture.stored("a", b"ab")
    (found,) = fixture.region_records.found()
    restarted = NamespacesFixture()
    assert found.lines is not None
    found.lines["part"][residents_of(found.lines)[0].block] = (2, 1)
    with pytest.raises(Refused) as caught:
        restarted.core.restore_region(found)
    assert caught.value.code == Code.BAD_LAYOUT
    assert (restarted.namespaces(), restarted.core.reserved_bytes) == ((), 0)


def test_a_layout_with_smaller_blocks_keeps_the_offsets_of_the_host_blocks() -> None:
    fixture = NamespacesFixture()
    fixture.open_namespace("a")
    half = KVLayout((ROW,), ((TensorRef(0, PAGE // 2),),))
    assert fixture.register("a", half) == memory.HostRegion(4, PAGE, False)
    plan = fixture.start("a", store(b"abcd"))
    assert sorted(offsets(plan)) == [0, PAGE, 2 * PAGE, 3 * PAGE]
    assert plan.nbytes == 2 * PAGE


def test_transfers_by_key_outside_a_namespace_are_refused() -> None:
    fixture = NamespacesFixture()
    fixture.register("a")
    for spec in (store(b"a"), load(b"a")):
        assert fixture.refused("a", spec) == Code.UNKNOWN_NAMESPACE


def test_transfers_by_host_block_in_a_namespace_are_refused() -> None:
    fixture = NamespacesFixture("a")
    gpu, host = GPULoadStoreSpec([0]), CPULoadStoreSpec([0])
    assert fixture.refused("a", (gpu, host)) == Code.BAD_SPEC
    assert fixture.refused("a", (host, gpu)) == Code.BAD_SPEC


@pytest.mark.parametrize(
    "message",
    [
        wire.Pin(each(b"a")),
        wire.Unpin(each(b"a")),
        wire.Touch(each(b"a")),
        wire.Subscribe(),
        wire.Reset(5),
    ],
)
def test_messages_with_keys_outside_a_namespace_are_refused(message: wire.ClientMessage) -> None:
    fixture = NamespacesFixture("a/worker")
    fixture.open_sessions("a/scheduler")  # each session must open the namespace
    assert fixture.error("a/scheduler", message)[0] == Code.UNKNOWN_NAMESPACE


def test_the_namespace_is_usable_after_a_failed_registration() -> None:
    fixture = NamespacesFixture()
    fixture.open_namespace("a")
    fixture.send("a", wire.AllocateKVCaches(1, LAYOUT))
    fixture.report(TensorsMapped(1, "a", ErrorInfo(Code.MAP_FAILED, "no memory")))
    fixture.register("a")
    fixture.stored("a", b"a")
    fixture.close_sessions("a")
    assert fixture.usage("engines", "ready") == ((), 1)


def test_with_stored_keys_later_engines_must_use_their_layout_until_a_reset() -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"a")
    fixture.close_sessions("a")
    fixture.open_namespace("b")
    split = KVLayout((ROW, ROW), ((TensorRef(0, PAGE // 2), TensorRef(1, PAGE // 2)),))
    assert fixture.error("b", wire.AllocateKVCaches(1, split))[0] == Code.NAMESPACE_MISMATCH
    fixture.send("b", wire.Reset(5))
    fixture.register("b", split)
