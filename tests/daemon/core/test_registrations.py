"""Registrations: mapping, host regions, successors of an engine."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.actions import (
    CloseSession,
    MapTensors,
    SendMessage,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.registration import OWN_SESSION
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from support.core_fixture import LAYOUT, POOL, CoreFixture, store


def test_registering_maps_before_the_reply() -> None:
    fixture = CoreFixture("a", registered=False)
    memories = ((memory.FdAllocation(5, 8192),), (memory.Location(0, 0),))
    (mapping,) = fixture.send("a", wire.RegisterKVCaches(9, LAYOUT, *memories, 8192, 6))
    assert mapping == MapTensors(1, "a", mapping.layout, *memories, 6)
    assert fixture.refused("a", 1, store(0)) == Code.NOT_REGISTERED
    reply = SendMessage("a", wire.Registered(9, memory.HostRegion(4, 2048, False)))
    assert fixture.report(TensorsMapped(1, "a")) == [reply]
    fixture.start("a", 1, store(0))


def test_the_reply_to_an_allocation_has_the_locations() -> None:
    fixture = CoreFixture("a", registered=False)
    fixture.send("a", wire.AllocateKVCaches(9, LAYOUT))
    memories = ((memory.FdAllocation(5, 8192),), (memory.Location(0, 0),))
    (action,) = fixture.report(
        TensorsMapped(1, "a", allocations=memories[0], locations=memories[1])
    )
    whole_pool = memory.HostRegion(POOL // 2048, 2048, False)
    assert action == SendMessage("a", wire.Allocated(9, whole_pool, *memories))


@pytest.mark.parametrize(
    ("layout", "allocations", "locations", "code"),
    [
        (LAYOUT, (4096,), ((0, 0),), Code.BAD_LAYOUT),
        (LAYOUT, (8192,), ((0, 1),), Code.BAD_LAYOUT),
        (LAYOUT, (8192,), ((1, 0),), Code.BAD_LAYOUT),
        (LAYOUT, (8192,), (), Code.BAD_LAYOUT),
        (LAYOUT, (8192,), ((0, 0), (0, 0)), Code.BAD_LAYOUT),
        (LAYOUT, (), ((0, 0),), Code.BAD_LAYOUT),
        (KVLayout(LAYOUT.tensors, ((TensorRef(1, 1),),)), (8192,), ((0, 0),), "unknown_tensor"),
        (KVLayout((TensorLayout(1, 2, 1),), ((TensorRef(0, 1),),)), (9,), ((0, 0),), "bad_layout"),
    ],
)
def test_tensors_that_do_not_lie_inside_their_allocations_are_refused(
    layout: KVLayout,
    allocations: tuple[int, ...],
    locations: tuple[tuple[int, int], ...],
    code: str,
) -> None:
    fixture = CoreFixture("a", registered=False)
    fds = tuple(memory.FdAllocation(n, size) for n, size in enumerate(allocations))
    places = tuple(memory.Location(*place) for place in locations)
    assert fixture.error("a", wire.RegisterKVCaches(1, layout, fds, places)) == code
    assert not fixture.core.busy


def test_a_failed_mapping_is_reported_and_frees_name_and_region() -> None:
    fixture = CoreFixture("a", registered=False)
    fixture.send("a", wire.AllocateKVCaches(1, LAYOUT))
    error = ErrorInfo(Code.MAP_FAILED, "no memory")
    assert fixture.report(TensorsMapped(1, "a", error)) == [SendMessage("a", wire.Error(1, error))]
    assert not fixture.core.busy
    fixture.send("a", wire.AllocateKVCaches(2, LAYOUT))
    (action,) = fixture.report(TensorsMapped(2, "a"))
    assert isinstance(action.message, wire.Allocated)
    # Its bytes belong to another engine, or they are undefined.
    assert not action.message.region.reattached


@pytest.mark.parametrize(("own", "errors"), [(False, {Code.MAP_FAILED: 1}), (True, {})])
def test_failed_mappings_are_counted_except_the_daemons_own(
    own: bool, errors: dict[Code, int]
) -> None:
    fixture = CoreFixture("a", registered=False)
    session = OWN_SESSION if own else "a"
    (mapping,) = fixture.send(session, wire.AllocateKVCaches(1, LAYOUT))
    error = ErrorInfo(Code.MAP_FAILED, "no memory")
    fixture.report(TensorsMapped(mapping.registration, session, error))
    assert fixture.core.errors == errors


def test_the_daemons_own_registration_is_no_engine_of_the_status() -> None:
    fixture = CoreFixture("a")
    (mapping,) = fixture.send(OWN_SESSION, wire.AllocateKVCaches(1, LAYOUT))
    fixture.report(TensorsMapped(mapping.registration, OWN_SESSION))
    assert [engine.name for engine in fixture.core.engines()] == ["a"]


def test_a_layout_with_too_many_gpu_blocks_is_refused() -> None:
    fixture = CoreFixture("a", registered=False)
    many = 256
    tensors = (TensorLayout((1 << 31) - 1, 1, 1),) * many
    layout = KVLayout(tensors, tuple((TensorRef(n, 1),) for n in range(many)))
    assert fixture.error("a", wire.AllocateKVCaches(1, layout))
    assert fixture.core.reserved_bytes == 0
    assert not fixture.core.busy


def test_one_process_of_an_engine_registers() -> None:
    fixture = CoreFixture("a/worker", "a/scheduler", "b")
    for session, owner in (("a/scheduler", "another process"), ("a/worker", "this client")):
        (action,) = fixture.send(session, wire.AllocateKVCaches(1, LAYOUT))
        assert action.message.error.code == Code.ALREADY_REGISTERED
        assert owner in action.message.error.message


def test_a_successor_waits_until_the_old_mapping_is_unmapped() -> None:
    fixture = CoreFixture("a/old", "a/new", "a/third")
    plan = fixture.start("a/old", 1, store(0))
    assert UnmapTensors(1) in fixture.core.close_session("a/old")
    assert fixture.send("a/new", wire.AllocateKVCaches(5, LAYOUT, 4096)) == []
    assert fixture.send("a/third", wire.AllocateKVCaches(6, LAYOUT, 4096)) == []
    assert fixture.error("a/new", wire.AllocateKVCaches(7, LAYOUT, 4096)) == Code.BUSY
    assert fixture.refused("a/new", 1, store(0)) == Code.NOT_REGISTERED
    assert fixture.report(TransferCompleted(plan.serial, Outcome.CANCELLED)) == []
    mapping, refusal = fixture.report(TensorsUnmapped(1))
    assert isinstance(mapping, MapTensors)
    assert (mapping.registration, mapping.session) == (2, "a/new")
    assert (refusal.session, refusal.message.request_id) == ("a/third", 6)
    assert refusal.message.error.code == Code.ALREADY_REGISTERED
    reply = wire.Allocated(5, memory.HostRegion(2, 2048, True), (), ())
    assert fixture.report(TensorsMapped(2, "a/new")) == [SendMessage("a/new", reply)]


def test_a_registration_waits_for_the_room_of_a_disconnecting_engine() -> None:
    fixture = CoreFixture("a", "b", "c", registered=False)
    fixture.send("a", wire.AllocateKVCaches(1, LAYOUT))
    fixture.report(TensorsMapped(1, "a"))
    assert fixture.error("b", wire.AllocateKVCaches(1, LAYOUT, 4096)) == Code.POOL_FULL
    fixture.core.close_session("a")
    for session in "bc":
        assert fixture.send(session, wire.AllocateKVCaches(2, LAYOUT, POOL)) == []
    first, second = fixture.report(TensorsUnmapped(1))
    assert isinstance(first, MapTensors)
    assert first.session == "b"
    assert (second.session, second.message.error.code) == ("c", Code.POOL_FULL)
    assert fixture.core.errors == {"pool_full": 2}


def test_a_registration_waits_for_the_last_of_several_disconnecting_engines() -> None:
    fixture = CoreFixture("a", "b")
    fixture.core.open_session("c", make_hello("c", "c"))
    fixture.core.close_session("a")
    fixture.core.close_session("b")
    assert fixture.send("c", wire.AllocateKVCaches(2, LAYOUT, POOL)) == []
    assert fixture.report(TensorsUnmapped(2)) == []
    (mapping,) = fixture.report(TensorsUnmapped(1))
    assert isinstance(mapping, MapTensors)


def test_a_waiting_successor_that_disconnects_is_dropped() -> None:
    fixture = CoreFixture("a/old", "a/new")
    fixture.core.close_session("a/old")
    fixture.send("a/new", wire.AllocateKVCaches(5, LAYOUT, 4096))
    assert fixture.core.close_session("a/new") == [CloseSession("a/new")]
    assert fixture.report(TensorsUnmapped(1)) == []
    assert not fixture.core.busy


def test_a_session_closed_while_mapping_gets_no_reply() -> None:
    fixture = CoreFixture("a", registered=False)
    fixture.send("a", wire.AllocateKVCaches(1, LAYOUT))
    assert fixture.core.close_session("a") == [CloseSession("a"), UnmapTensors(1)]
    assert fixture.report(TensorsMapped(1, "a")) == []
    assert fixture.core.busy
    assert fixture.report(TensorsUnmapped(1)) == []
    assert not fixture.core.busy


@pytest.mark.parametrize(
    ("blocks", "page", "stride"),
    [
        ((1 << 17) + 1, 4096, 1 << 47),
        (1 << 20, 1 << 46, 1 << 46),
        ((1 << 31) - 1, 1, 1 << 47),
        (1 << 46, 1, 1),
    ],
)
def test_tensors_that_no_device_could_hold_are_refused(blocks: int, page: int, stride: int) -> None:
    """The size does not fit into the integer type of the driver."""
    fixture = CoreFixture("a", registered=False)
    layout = KVLayout((TensorLayout(blocks, page, stride),), ((TensorRef(0, 1),),))
    assert fixture.error("a", wire.AllocateKVCaches(1, layout, POOL)) == Code.BAD_LAYOUT
    memories = (memory.FdAllocation(1, (1 << 48) - 1),), (memory.Location(0, 0),)
    assert fixture.error("a", wire.RegisterKVCaches(2, layout, *memories)) == Code.BAD_LAYOUT
    assert not fixture.core.busy
