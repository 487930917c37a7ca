"""The core's answers: by example, and as a machine to which anything legal may happen.

The machine stands for the server and the device worker: it keeps the commands that the core gave,
reports what a worker could report in any order it could, and holds every answer against what was
asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.daemon.core.actions import (
    Action,
    BlocksCorrupted,
    BlocksVerified,
    CancelTransfers,
    CloseSession,
    CommitBlocks,
    Continue,
    CopyCalibrated,
    CopyPlan,
    HealthChecked,
    MapTensors,
    PoolRegistered,
    Report,
    SendMessage,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.core import Core, DaemonIdentity
from kvferry.daemon.core.records import engine_owner
from kvferry.daemon.core.transfers import MAX_WAITS
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto import status as told
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    TransferSpec,
)
from support.region_records_model import RegionRecordsModel

MAX_JOBS = 3
POOL = 16 * 4096
LAYOUT = KVLayout((TensorLayout(8, 1024, 1024),), ((TensorRef(0, 1024),),), 2)
OTHER = KVLayout((TensorLayout(8, 512, 512),), ((TensorRef(0, 512),),))
LIMITS = told.Limits(1 << 20, 1 << 10, MAX_JOBS)
DEVICE = told.DeviceInfo("cpu", "cpu", "host memory")
FAULT = ErrorInfo(Code.COPY_FAILED, "the copy failed")


def new_core(pool_bytes: int = POOL) -> Core:
    return Core(DaemonIdentity("0.1", "boot", 4711, DEVICE, LIMITS), pool_bytes, started=100.0)


def store(*blocks: int, hosts: tuple[int, ...] = (0,)) -> TransferSpec:
    return GPULoadStoreSpec(blocks), CPULoadStoreSpec(hosts)


def load(*blocks: int, hosts: tuple[int, ...] = (0,)) -> TransferSpec:
    return CPULoadStoreSpec(hosts), GPULoadStoreSpec(blocks)


class CoreFixture:
    """A core, and the shorthand of the examples. Time stands at 101."""

    def __init__(
        self,
        *sessions: str,
        registered: bool = True,
        timeline: int | None = None,
        pool_bytes: int = POOL,
    ) -> None:
        """Sessions are named engine/process; the first of an engine registers it."""
        self.core = new_core(pool_bytes)
        self.books = RegionRecordsModel()
        seen: set[str] = set()
        for session in sessions:
            engine = session.partition("/")[0]
            self.core.open_session(session, wire.Hello(1, 1, session, engine))
            if registered and engine not in seen:
                (mapping,) = self.ask(session, wire.AllocateKVCaches(1, LAYOUT, 4096, timeline))
                assert mapping == MapTensors(
                    len(seen) + 1, session, mapping.layout, (), None, timeline
                )
                self.report(TensorsMapped(mapping.registration, session))
            seen.add(engine)

    def ask(self, session: str, message: wire.ClientMessage) -> list[Any]:
        return self.books.hear(self.core.handle(session, message, now=101.0))

    def report(self, report: Report) -> list[Any]:
        return self.books.hear(self.core.report(report))

    def submit(self, session: str, job_id: int, spec: TransferSpec, wait_for: int = 0) -> list[Any]:
        return self.ask(session, wire.Submit(job_id, *spec, wait_for))

    def start(self, session: str, job_id: int, spec: TransferSpec, wait_for: int = 0) -> CopyPlan:
        (action,) = self.submit(session, job_id, spec, wait_for)
        assert isinstance(action, StartTransfer)
        return action.plan

    def fill(self, session: str) -> None:
        """Store something in every host block of an engine."""
        plan = self.start(session, 1000, store(0, 1, 2, 3, hosts=(0, 1)))
        self.report(TransferCompleted(plan.serial, Outcome.DONE))

    def refused(self, session: str, job_id: int, spec: TransferSpec, wait_for: int = 0) -> str:
        """The code with which a Submit is refused."""
        (action,) = self.submit(session, job_id, spec, wait_for)
        (result,) = action.message.results
        assert (action.session, result.job_id, result.outcome) == (session, job_id, "refused")
        assert (result.nbytes, result.seconds) == (0, 0.0)
        return str(result.error.code)

    def error(self, session: str, message: wire.ClientMessage) -> str:
        """The code with which another request is refused."""
        (action,) = self.ask(session, message)
        assert isinstance(action.message, wire.Error)
        assert (action.session, action.message.boot_id) == (session, "boot")
        assert action.message.request_id == getattr(message, "request_id", None)
        return action.message.error.code


def finished(actions: list[Action]) -> list[tuple[str, int, str, str | None]]:
    """(session, job id, outcome, error code) of every result sent."""
    return [
        (a.session, r.job_id, r.outcome, None if r.error is None else r.error.code)
        for a in actions
        if isinstance(a, SendMessage) and isinstance(a.message, wire.Finished)
        for r in a.message.results
    ]


# Sessions


@pytest.mark.parametrize(("low", "high", "fits"), [(1, 1, 1), (0, 9, 1), (2, 3, 0), (0, 0, 0)])
def test_a_session_opens_where_the_protocol_versions_meet(low: int, high: int, fits: int) -> None:
    core = new_core()
    (action,) = core.open_session("s", wire.Hello(low, high, "client", "a"))
    assert isinstance(action, SendMessage)
    if fits:
        welcome = wire.Welcome(1, "boot", "s", "0.1", 4711, DEVICE, LIMITS)
        assert (action.message, core.sessions) == (welcome, ("s",))
    else:
        assert isinstance(action.message, wire.Error)
        assert (action.message.error.code, core.sessions) == (Code.PROTOCOL_VERSION, ())


def test_a_second_hello_is_refused() -> None:
    assert CoreFixture("a").error("a", wire.Hello(1, 1, "client", "b")) == Code.BAD_MESSAGE


def test_goodbye_is_answered_and_ends_the_session() -> None:
    desk = CoreFixture("a")
    plan = desk.start("a", 7, store(0))
    assert desk.ask("a", wire.Goodbye("bye")) == [
        SendMessage("a", wire.Goodbye()),
        CloseSession("a"),
        CancelTransfers(plan.registration, (plan.serial,)),
        UnmapTensors(plan.registration),
    ]
    assert desk.core.sessions == ()


# Registering


def test_registering_maps_first_and_answers_then() -> None:
    desk = CoreFixture("a", registered=False)
    where = ((memory.FdAllocation(5, 8192),), (memory.Location(0, 0),))
    (mapping,) = desk.ask("a", wire.RegisterKVCaches(9, LAYOUT, *where, 8192, 6))
    assert mapping == MapTensors(1, "a", mapping.layout, *where, 6)
    assert desk.refused("a", 1, store(0)) == Code.NOT_REGISTERED
    answer = SendMessage("a", wire.Registered(9, memory.HostRegion(4, 2048, False)))
    assert desk.report(TensorsMapped(1, "a")) == [answer]
    desk.start("a", 1, store(0))


def test_allocating_answers_with_where_the_tensors_are() -> None:
    desk = CoreFixture("a", registered=False)
    desk.ask("a", wire.AllocateKVCaches(9, LAYOUT))
    where = ((memory.FdAllocation(5, 8192),), (memory.Location(0, 0),))
    (action,) = desk.report(TensorsMapped(1, "a", allocations=where[0], locations=where[1]))
    whole_pool = memory.HostRegion(POOL // 2048, 2048, False)
    assert action == SendMessage("a", wire.Allocated(9, whole_pool, *where))


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
    desk = CoreFixture("a", registered=False)
    where = tuple(memory.FdAllocation(n, size) for n, size in enumerate(allocations))
    places = tuple(memory.Location(*place) for place in locations)
    assert desk.error("a", wire.RegisterKVCaches(1, layout, where, places)) == code
    assert not desk.core.busy


def test_what_cannot_be_mapped_is_told_and_the_name_is_free_again() -> None:
    desk = CoreFixture("a", registered=False)
    desk.ask("a", wire.AllocateKVCaches(1, LAYOUT))
    error = ErrorInfo(Code.MAP_FAILED, "no memory")
    assert desk.report(TensorsMapped(1, "a", error)) == [SendMessage("a", wire.Error(1, error))]
    assert not desk.core.busy
    assert isinstance(desk.ask("a", wire.AllocateKVCaches(2, LAYOUT))[0], MapTensors)


def test_what_was_never_mapped_is_no_region_to_come_back_to() -> None:
    """Its bytes are somebody else's, or nobody's."""
    desk = CoreFixture("a", registered=False)
    desk.ask("a", wire.AllocateKVCaches(1, LAYOUT))
    desk.report(TensorsMapped(1, "a", ErrorInfo(Code.MAP_FAILED, "no memory")))
    desk.ask("a", wire.AllocateKVCaches(2, LAYOUT))
    (action,) = desk.report(TensorsMapped(2, "a"))
    assert isinstance(action, SendMessage)
    assert isinstance(action.message, wire.Allocated)
    assert not action.message.region.reattached


def test_a_layout_with_more_blocks_than_can_be_kept_in_mind_is_refused() -> None:
    desk = CoreFixture("a", registered=False)
    many = 256
    tensors = (TensorLayout((1 << 31) - 1, 1, 1),) * many
    layout = KVLayout(tensors, tuple((TensorRef(n, 1),) for n in range(many)))
    assert desk.error("a", wire.AllocateKVCaches(1, layout))
    assert desk.core.status(101.0).pool.reserved_bytes == 0
    assert not desk.core.busy


def test_a_region_of_more_host_blocks_than_can_be_kept_in_mind_is_refused() -> None:
    """A pool of terabytes is no strange pool, but a host block of one byte is a strange block."""
    desk = CoreFixture("a", registered=False, pool_bytes=1 << 42)
    layout = KVLayout((TensorLayout(1, 1, 1),), ((TensorRef(0, 1),),))
    assert desk.error("a", wire.AllocateKVCaches(1, layout))
    assert desk.core.status(101.0).pool.reserved_bytes == 0
    assert not desk.core.busy


def test_an_engine_s_name_is_held_by_one_process() -> None:
    desk = CoreFixture("a/worker", "a/scheduler", "b")
    for session, whose in (("a/scheduler", "another process"), ("a/worker", "this client")):
        (action,) = desk.ask(session, wire.AllocateKVCaches(1, LAYOUT))
        assert action.message.error.code == Code.ALREADY_REGISTERED
        assert whose in action.message.error.message


def test_a_pool_that_is_full_refuses_and_counts_it() -> None:
    desk = CoreFixture("a", "b", registered=False)
    desk.ask("a", wire.AllocateKVCaches(1, LAYOUT))
    assert desk.error("b", wire.AllocateKVCaches(1, LAYOUT)) == Code.POOL_FULL
    assert desk.core.status(101.0).errors == {"pool_full": 1}


def test_a_successor_waits_until_the_old_mapping_is_gone() -> None:
    desk = CoreFixture("a/old", "a/new", "a/third")
    plan = desk.start("a/old", 1, store(0))
    assert UnmapTensors(1) in desk.core.close_session("a/old")
    assert desk.ask("a/new", wire.AllocateKVCaches(5, LAYOUT, 4096)) == []
    assert desk.ask("a/third", wire.AllocateKVCaches(6, LAYOUT, 4096)) == []
    assert desk.error("a/new", wire.AllocateKVCaches(7, LAYOUT, 4096)) == Code.BUSY
    assert desk.refused("a/new", 1, store(0)) == Code.NOT_REGISTERED
    assert desk.report(TransferCompleted(plan.serial, Outcome.CANCELLED)) == []
    mapping, refusal = desk.report(TensorsUnmapped(1))
    assert isinstance(mapping, MapTensors)
    assert (mapping.registration, mapping.session) == (2, "a/new")
    assert (refusal.session, refusal.message.request_id) == ("a/third", 6)
    assert refusal.message.error.code == Code.ALREADY_REGISTERED
    answer = wire.Allocated(5, memory.HostRegion(2, 2048, True), (), ())
    assert desk.report(TensorsMapped(2, "a/new")) == [SendMessage("a/new", answer)]


def test_a_successor_that_finds_no_room_is_told() -> None:
    desk = CoreFixture("a/old", "b", "a/new")
    desk.core.close_session("a/old")
    assert desk.ask("a/new", wire.AllocateKVCaches(5, LAYOUT, 2 * POOL)) == []
    (action,) = desk.report(TensorsUnmapped(1))
    assert isinstance(action, SendMessage)
    assert isinstance(action.message, wire.Error)
    assert (action.session, action.message.request_id) == ("a/new", 5)
    assert action.message.error.code == Code.POOL_FULL


def test_who_needs_the_room_of_one_that_leaves_waits_until_it_is_gone() -> None:
    desk = CoreFixture("a", "b", "c", registered=False)
    desk.ask("a", wire.AllocateKVCaches(1, LAYOUT))
    desk.report(TensorsMapped(1, "a"))
    assert desk.error("b", wire.AllocateKVCaches(1, LAYOUT, 4096)) == Code.POOL_FULL
    desk.core.close_session("a")
    for session in "bc":
        assert desk.ask(session, wire.AllocateKVCaches(2, LAYOUT, POOL)) == []
    first, second = desk.report(TensorsUnmapped(1))
    assert isinstance(first, MapTensors)
    assert first.session == "b"
    assert (second.session, second.message.error.code) == ("c", Code.POOL_FULL)
    assert desk.core.status(101.0).errors == {"pool_full": 2}


def test_of_several_that_leave_the_last_may_make_the_room() -> None:
    desk = CoreFixture("a", "b")
    desk.core.open_session("c", wire.Hello(1, 1, "c", "c"))
    desk.core.close_session("a")
    desk.core.close_session("b")
    assert desk.ask("c", wire.AllocateKVCaches(2, LAYOUT, POOL)) == []
    assert desk.report(TensorsUnmapped(2)) == []
    (mapping,) = desk.report(TensorsUnmapped(1))
    assert isinstance(mapping, MapTensors)


def test_a_daemon_that_stops_gives_nothing_to_those_who_wait() -> None:
    desk = CoreFixture("a/old", "a/new")
    desk.core.close_session("a/old")
    assert desk.ask("a/new", wire.AllocateKVCaches(5, LAYOUT, 4096)) == []
    desk.core.stop()
    (refusal,) = desk.report(TensorsUnmapped(1))
    assert refusal.message.error.code == Code.SHUTTING_DOWN


def test_a_successor_that_leaves_waits_no_more() -> None:
    desk = CoreFixture("a/old", "a/new")
    desk.core.close_session("a/old")
    desk.ask("a/new", wire.AllocateKVCaches(5, LAYOUT, 4096))
    assert desk.core.close_session("a/new") == [CloseSession("a/new")]
    assert desk.report(TensorsUnmapped(1)) == []
    assert not desk.core.busy


def test_a_session_that_leaves_while_its_tensors_are_mapped_gets_no_answer() -> None:
    desk = CoreFixture("a", registered=False)
    desk.ask("a", wire.AllocateKVCaches(1, LAYOUT))
    assert desk.core.close_session("a") == [CloseSession("a"), UnmapTensors(1)]
    assert desk.report(TensorsMapped(1, "a")) == []
    assert desk.core.busy
    assert desk.report(TensorsUnmapped(1)) == []
    assert not desk.core.busy


# Jobs


def test_a_host_block_that_the_engine_never_stored_is_not_loaded() -> None:
    """What lies there is another engine's, perhaps."""
    desk = CoreFixture("a", "b")
    desk.start("a", 1, store(0, 1, hosts=(0,)))
    desk.start("a", 2, load(0, 1, hosts=(0,)))
    (action,) = desk.submit("a", 3, load(0, 1, 2, 3, hosts=(0, 1)))
    (result,) = action.message.results
    assert (result.error.code, result.error.value) == (Code.STALE, "1")
    assert desk.refused("b", 1, load(0, 1, hosts=(0,))) == Code.STALE


def test_what_an_engine_stored_it_may_load_when_it_is_back() -> None:
    desk = CoreFixture("a/old", "a/new")
    plan = desk.start("a/old", 1, store(0, 1, hosts=(0,)))
    desk.report(TransferCompleted(plan.serial, Outcome.DONE))
    desk.core.close_session("a/old")
    desk.report(TensorsUnmapped(1))
    (mapping,) = desk.ask("a/new", wire.AllocateKVCaches(5, LAYOUT, 4096))
    desk.report(TensorsMapped(mapping.registration, "a/new"))
    desk.start("a/new", 1, load(0, 1, hosts=(0,)))
    assert desk.refused("a/new", 2, load(0, 1, hosts=(1,))) == Code.STALE


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_a_host_block_whose_last_store_did_not_complete_is_stale(outcome: Outcome) -> None:
    desk = CoreFixture("a")
    desk.fill("a")
    plan = desk.start("a", 1, store(0, 1, hosts=(0,)))
    desk.report(TransferCompleted(plan.serial, outcome))
    assert desk.refused("a", 2, load(0, 1, hosts=(0,))) == Code.STALE
    desk.start("a", 3, load(0, 1, hosts=(1,)))


def test_nobody_loads_what_the_owner_before_left_by_way_of_a_store_that_never_ran() -> None:
    desk = CoreFixture("a", "b", registered=False, pool_bytes=4096)
    for session in ("a", "b"):
        (*_, mapping) = desk.ask(session, wire.AllocateKVCaches(1, LAYOUT, 4096, timeline=3))
        desk.report(TensorsMapped(mapping.registration, session))
        if session == "a":
            desk.fill("a")
            desk.core.close_session("a")
            desk.report(TensorsUnmapped(mapping.registration))
    plan = desk.start("b", 1, store(0, 1, hosts=(0,)), wait_for=1 << 40)
    desk.ask("b", wire.Cancel((1,)))
    desk.report(TransferCompleted(plan.serial, Outcome.CANCELLED))
    assert desk.refused("b", 2, load(0, 1, hosts=(0,))) == Code.STALE


def test_a_load_requires_the_stores_of_its_blocks_that_have_not_ended() -> None:
    desk = CoreFixture("a")
    desk.fill("a")
    first = desk.start("a", 1, store(0, hosts=(0,)))
    second = desk.start("a", 2, store(2, 3, hosts=(1,)))
    assert desk.start("a", 3, load(4, 5, 6, 7, hosts=(0, 1))).requires == (
        first.serial,
        second.serial,
    )
    third = desk.start("a", 4, store(0, hosts=(0,)))
    assert desk.start("a", 5, load(4, hosts=(0,))).requires == (third.serial,)
    desk.report(TransferCompleted(first.serial, Outcome.FAILED))
    desk.report(TransferCompleted(third.serial, Outcome.DONE))
    desk.report(TransferCompleted(second.serial, Outcome.DONE))
    assert desk.start("a", 6, load(4, hosts=(0,))).requires == ()


def test_what_was_not_stored_of_a_host_block_is_stale() -> None:
    desk = CoreFixture("a")
    plan = desk.start("a", 1, store(0, hosts=(0,)))
    desk.report(TransferCompleted(plan.serial, Outcome.DONE))
    assert desk.refused("a", 2, load(0, 1, hosts=(0,))) == Code.STALE
    desk.start("a", 3, load(0, hosts=(0,)))


def test_a_completed_store_is_committed_with_the_parts_that_are_loadable() -> None:
    desk = CoreFixture("a")
    plans = [desk.start("a", 1, store(0, hosts=(1,))), desk.start("a", 2, store(1, 2, hosts=(0,)))]
    for plan, parts in zip(plans, ({1: (0, 1)}, {}), strict=True):
        _, commit = desk.core.report(TransferCompleted(plan.serial, Outcome.DONE))
        assert isinstance(commit, CommitBlocks)
        assert (commit.serial, commit.block_set.parts) == (plan.serial, parts)
        assert commit.block_set.owner == engine_owner("a")
    rest = GPULoadStoreSpec([3], (1,), (1,)), CPULoadStoreSpec([1])
    _, commit = desk.core.report(TransferCompleted(desk.start("a", 3, rest).serial, Outcome.DONE))
    assert isinstance(commit, CommitBlocks)
    assert commit.block_set.parts == {}  # both halves of it are there now


def test_loads_in_flight_of_a_corrupt_block_fail_and_it_is_stale_then() -> None:
    desk = CoreFixture("a")
    desk.fill("a")
    plans = [desk.start("a", job, load(0, 1, hosts=(job,))) for job in (0, 1)]
    assert desk.report(BlocksCorrupted(engine_owner("a"), np.array([1]))) == []
    for plan, outcome in zip(plans, (Outcome.DONE, Outcome.FAILED), strict=True):
        (action,) = desk.report(TransferCompleted(plan.serial, Outcome.DONE))
        (result,) = action.message.results
        assert result.outcome == outcome
    assert (result.error.code, result.error.value, result.nbytes) == (Code.CORRUPT_BLOCK, "1", 0)
    assert desk.refused("a", 3, load(0, 1, hosts=(1,))) == Code.STALE
    desk.start("a", 4, load(0, 1, hosts=(0,)))
    assert desk.core.status(101.0).errors[Code.CORRUPT_BLOCK] == 2


def test_blocks_of_an_earlier_daemon_are_stale_until_they_are_verified() -> None:
    old, desk = CoreFixture("a"), CoreFixture(registered=False)
    plans = [old.start("a", 1, store(0, hosts=(0,))), old.start("a", 2, store(2, 3, hosts=(1,)))]
    for plan in plans:
        old.report(TransferCompleted(plan.serial, Outcome.DONE))
    desk.books = old.books
    desk.core.restore_region(*old.books.found())
    desk.core.open_session("a", wire.Hello(1, 1, "client", "a"))
    (mapping,) = desk.ask("a", wire.AllocateKVCaches(1, LAYOUT, 4096))
    (answer,) = desk.report(TensorsMapped(mapping.registration, "a"))
    assert answer.message.region.reattached
    assert desk.refused("a", 1, load(0, hosts=(0,))) == Code.STALE
    desk.report(BlocksVerified(engine_owner("a"), np.array([0])))
    desk.start("a", 2, load(0, hosts=(0,)))
    assert desk.refused("a", 3, load(0, 1, hosts=(0,))) == Code.STALE
    assert desk.refused("a", 4, load(0, 1, hosts=(1,))) == Code.STALE
    assert desk.report(BlocksVerified(engine_owner("nobody"), np.array([0]))) == []


@pytest.mark.parametrize("restarted", [False, True])
def test_another_user_never_gets_the_host_blocks_of_an_engine_s_name(restarted: bool) -> None:
    """Its owner does, also after a restart of the daemon."""
    hello = wire.Hello(1, 1, "client", "a")
    for uid, back in ((1000, True), (1001, False)):
        desk = CoreFixture(registered=False)
        desk.core.open_session("old", hello, 1000)
        (mapping,) = desk.ask("old", wire.AllocateKVCaches(1, LAYOUT, 4096))
        desk.report(TensorsMapped(mapping.registration, "old"))
        desk.fill("old")
        desk.core.close_session("old")
        desk.report(TensorsUnmapped(mapping.registration))
        if restarted:
            books, desk = desk.books, CoreFixture(registered=False)
            desk.books = books
            desk.core.restore_region(*books.found())
        desk.core.open_session("new", hello, uid)
        (mapping,) = desk.ask("new", wire.AllocateKVCaches(1, LAYOUT, 4096))
        (answer,) = desk.report(TensorsMapped(mapping.registration, "new"))
        assert answer.message.region.reattached is back
        desk.report(BlocksVerified(engine_owner("a"), np.array([0, 1])))
        if back:
            desk.start("new", 1, load(0, 1, hosts=(0,)))
        else:
            assert desk.refused("new", 1, load(0, 1, hosts=(0,))) == Code.STALE


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
    """Their size would not fit into the number that the driver takes."""
    desk = CoreFixture("a", registered=False)
    layout = KVLayout((TensorLayout(blocks, page, stride),), ((TensorRef(0, 1),),))
    assert desk.error("a", wire.AllocateKVCaches(1, layout, POOL)) == Code.BAD_LAYOUT
    where = (memory.FdAllocation(1, (1 << 48) - 1),), (memory.Location(0, 0),)
    assert desk.error("a", wire.RegisterKVCaches(2, layout, *where)) == Code.BAD_LAYOUT
    assert not desk.core.busy


def test_a_job_is_started_whole_and_ends_with_what_it_moved() -> None:
    desk = CoreFixture("a", timeline=3)
    plan = desk.start("a", 7, store(1, 2, 3, hosts=(1, 0)), wait_for=12)
    assert (plan.registration, plan.direction, plan.nbytes) == (1, Direction.STORE, 3 * 1024)
    assert (plan.wait_for, plan.after, plan.host_end) == (12, 0, 4096)
    assert desk.start("a", 8, load(4, 5, hosts=(1,))).after == plan.serial
    (action,) = desk.report(TransferCompleted(plan.serial, Outcome.DONE, 0.25))
    result = wire.JobResult(7, Direction.STORE, Outcome.DONE, 3072, 0.25)
    assert action == SendMessage("a", wire.Finished((result,)))
    assert desk.core.status(101.0).totals == told.Totals(stores=1, stored_bytes=3072)


def test_a_job_without_success_moved_nothing() -> None:
    desk = CoreFixture("a")
    for job, outcome in enumerate((Outcome.FAILED, Outcome.CANCELLED)):
        plan = desk.start("a", job, store(1, 2))
        error = FAULT if outcome is Outcome.FAILED else None
        (action,) = desk.report(TransferCompleted(plan.serial, outcome, error=error))
        assert isinstance(action, SendMessage)
        assert isinstance(action.message, wire.Finished)
        (result,) = action.message.results
        assert (result.outcome, result.nbytes) == (outcome, 0)
    assert desk.core.status(101.0).totals == told.Totals(failed=1, cancelled=1)


@pytest.mark.parametrize(
    ("spec", "wait_for", "code"),
    [
        (store(8), 0, Code.BLOCK_OUT_OF_RANGE),
        (store(0, hosts=(2,)), 0, Code.BLOCK_OUT_OF_RANGE),
        (store(0, 1, 2), 0, Code.SIZE_MISMATCH),
        (load(1, 1), 0, Code.DUPLICATE_BLOCK),
        ((GPULoadStoreSpec([0]), GPULoadStoreSpec([1])), 0, Code.BAD_SPEC),
        ((GPULoadStoreSpec([0], (1, 0)), CPULoadStoreSpec([1])), 0, Code.UNKNOWN_GROUP),
        (store(0), 1, Code.NO_TIMELINE),
    ],
)
def test_a_bad_job_is_refused_and_leaves_no_trace(
    spec: TransferSpec, wait_for: int, code: Code
) -> None:
    desk = CoreFixture("a")
    assert desk.refused("a", 1, spec, wait_for) == code
    assert not desk.core.busy
    for job in range(1, 1 + MAX_JOBS):  # neither the id nor a credit is spent
        assert desk.start("a", job, store(job)).serial == job


def test_a_refused_job_says_which_way_it_would_have_gone() -> None:
    desk = CoreFixture("a")
    for spec, direction in ((store(9), Direction.STORE), (load(9), Direction.LOAD)):
        (action,) = desk.submit("a", 1, spec)
        assert action.message.results[0].direction is direction


def test_an_engine_s_unfinished_jobs_have_different_ids() -> None:
    desk = CoreFixture("a/worker", "a/scheduler", "b")
    plan = desk.start("a/worker", 1, store(0))
    assert desk.refused("a/worker", 1, load(1)) == Code.DUPLICATE_JOB
    assert desk.refused("a/scheduler", 1, store(1)) == Code.DUPLICATE_JOB
    desk.start("b", 1, store(0))
    desk.report(TransferCompleted(plan.serial, Outcome.DONE))
    desk.start("a/scheduler", 1, store(1))


@pytest.mark.parametrize(("spec", "other"), [(store, load), (load, store)])
def test_a_session_has_so_many_jobs_of_a_direction_under_way_and_no_more(
    spec: Callable[[int], TransferSpec], other: Callable[[int], TransferSpec]
) -> None:
    desk = CoreFixture("a/worker", "a/scheduler")
    desk.fill("a/worker")
    plans = [desk.start("a/worker", job, spec(job)) for job in range(MAX_JOBS)]
    assert desk.refused("a/worker", 9, spec(5)) == Code.BUSY
    desk.start("a/worker", 20, other(6))
    desk.start("a/scheduler", 10, spec(5))
    desk.report(TransferCompleted(plans[1].serial, Outcome.FAILED, error=FAULT))
    desk.start("a/worker", 9, spec(5))
    assert desk.refused("a/worker", 11, spec(6)) == Code.BUSY


def test_cancelling_names_what_is_under_way_and_only_that() -> None:
    desk = CoreFixture("a/worker", "a/scheduler", "b")
    plan = desk.start("a/worker", 1, store(0))
    desk.start("b", 2, store(0))
    assert desk.ask("a/scheduler", wire.Cancel((1, 2, 3))) == [CancelTransfers(1, (plan.serial,))]
    actions = desk.report(TransferCompleted(plan.serial, Outcome.CANCELLED))
    assert finished(actions) == [("a/worker", 1, "cancelled", "cancelled")]
    assert desk.ask("a/worker", wire.Cancel((1,))) == []


def test_what_the_lane_has_not_done_of_an_order_it_is_told_again() -> None:
    """In its turn: others come between."""
    rest = CancelTransfers(1, (3, 4))
    assert CoreFixture("a").report(Continue(rest)) == [rest]


def test_a_cancel_that_came_too_late_changes_nothing() -> None:
    desk = CoreFixture("a")
    plan = desk.start("a", 1, store(0))
    desk.ask("a", wire.Cancel((1,)))
    assert finished(desk.report(TransferCompleted(plan.serial, Outcome.DONE))) == [
        ("a", 1, "done", None)
    ]


def test_waiting_ends_behind_the_last_of_the_jobs() -> None:
    desk = CoreFixture("a/worker", "a/scheduler")
    plans = [desk.start("a/worker", job, store(job)) for job in range(3)]
    assert desk.ask("a/worker", wire.Wait(5, (0, 2, 2, 77))) == []
    assert desk.ask("a/scheduler", wire.Wait(6, (2,))) == []
    assert len(desk.report(TransferCompleted(plans[0].serial, Outcome.DONE))) == 1
    actions = desk.report(TransferCompleted(plans[2].serial, Outcome.FAILED, error=FAULT))
    assert finished(actions) == [("a/worker", 2, "failed", "copy_failed")]
    assert actions[1:] == [
        SendMessage("a/worker", wire.Waited(5)),
        SendMessage("a/scheduler", wire.Waited(6)),
    ]


@pytest.mark.parametrize("job_ids", [(), (77,), (1, 77)])
def test_waiting_for_what_has_ended_ends_at_once(job_ids: tuple[int, ...]) -> None:
    desk = CoreFixture("a")
    plan = desk.start("a", 1, store(0))
    desk.report(TransferCompleted(plan.serial, Outcome.DONE))
    assert desk.ask("a", wire.Wait(5, job_ids)) == [SendMessage("a", wire.Waited(5))]


def test_waits_are_bounded_and_come_free_again() -> None:
    desk = CoreFixture("a")
    plan = desk.start("a", 1, store(0))
    for number in range(MAX_WAITS):
        assert desk.ask("a", wire.Wait(number, (1,))) == []
    assert desk.error("a", wire.Wait(999, (1,))) == Code.BUSY
    assert len(desk.report(TransferCompleted(plan.serial, Outcome.DONE))) == 1 + MAX_WAITS
    desk.start("a", 1, store(0))
    assert desk.ask("a", wire.Wait(999, (1,))) == []


def test_a_session_that_left_waits_no_more() -> None:
    desk = CoreFixture("a/worker", "a/scheduler")
    plan = desk.start("a/worker", 1, store(0))
    desk.ask("a/scheduler", wire.Wait(5, (1,)))
    desk.core.close_session("a/scheduler")
    actions = desk.report(TransferCompleted(plan.serial, Outcome.DONE))
    assert finished(actions) == [("a/worker", 1, "done", None)]
    assert len(actions) == 1


def test_of_a_session_that_left_nothing_is_counted_any_more() -> None:
    """They are named anew each time, and a daemon sees any number of them."""
    desk = CoreFixture("a/worker", "a/scheduler")
    done, late = (desk.start("a/scheduler", n, store(n)) for n in (1, 2))
    desk.ask("a/scheduler", wire.Wait(5, (2,)))
    desk.report(TransferCompleted(done.serial, Outcome.DONE))
    desk.core.close_session("a/scheduler")
    assert finished(desk.report(TransferCompleted(late.serial, Outcome.CANCELLED))) == []
    transfers = desk.core._transfers
    assert (transfers.moved_bytes, transfers._used_credits, transfers._pending_waits) == (
        {},
        {},
        {},
    )


def test_jobs_end_when_the_process_that_owns_the_tensors_goes() -> None:
    desk = CoreFixture("a/worker", "a/scheduler")
    mine, theirs = desk.start("a/worker", 1, store(0)), desk.start("a/scheduler", 2, store(1))
    desk.ask("a/scheduler", wire.Wait(5, (1, 2)))
    assert desk.core.close_session("a/worker") == [
        CloseSession("a/worker"),
        CancelTransfers(1, (mine.serial,)),
        UnmapTensors(1),
    ]
    assert desk.report(TransferCompleted(mine.serial, Outcome.CANCELLED)) == []
    actions = desk.report(TransferCompleted(theirs.serial, Outcome.CANCELLED))
    assert finished(actions) == [("a/scheduler", 2, "failed", "engine_gone")]
    assert actions[1:] == [SendMessage("a/scheduler", wire.Waited(5))]
    assert desk.refused("a/scheduler", 3, store(1)) == Code.NOT_REGISTERED


def test_the_tensors_stay_when_another_process_of_the_engine_goes() -> None:
    desk = CoreFixture("a/worker", "a/scheduler")
    desk.start("a/worker", 1, store(0))
    plan = desk.start("a/scheduler", 2, store(1))
    expected = [CloseSession("a/scheduler"), CancelTransfers(1, (plan.serial,))]
    assert desk.core.close_session("a/scheduler") == expected
    desk.start("a/worker", 3, store(2))


# Stopping, status


def test_a_daemon_that_stops_takes_no_new_work_and_ends_the_old() -> None:
    desk = CoreFixture("a", "b", registered=False)
    desk.ask("a", wire.AllocateKVCaches(1, LAYOUT, 4096))
    desk.report(TensorsMapped(1, "a"))
    plan = desk.start("a", 1, store(0))
    desk.core.stop()
    assert desk.refused("a", 2, store(1)) == Code.SHUTTING_DOWN
    assert desk.error("b", wire.AllocateKVCaches(1, LAYOUT)) == Code.SHUTTING_DOWN
    (action,) = desk.core.open_session("c", wire.Hello(1, 1, "client", "c"))
    assert isinstance(action, SendMessage)
    assert isinstance(action.message, wire.Error)
    assert (action.message.error.code, "c" in desk.core.sessions) == (Code.SHUTTING_DOWN, False)
    assert desk.ask("a", wire.Wait(5, (1,))) == []
    assert desk.core.cancel_all_transfers() == [CancelTransfers(1, (plan.serial,))]
    assert desk.core.busy
    desk.report(TransferCompleted(plan.serial, Outcome.CANCELLED))
    assert not desk.core.busy


def test_a_daemon_that_stops_turns_a_successor_away() -> None:
    desk = CoreFixture("a/old", "a/new")
    desk.core.close_session("a/old")
    desk.ask("a/new", wire.AllocateKVCaches(5, LAYOUT, 4096))
    desk.core.stop()
    (action,) = desk.report(TensorsUnmapped(1))
    assert isinstance(action, SendMessage)
    assert isinstance(action.message, wire.Error)
    assert (action.session, action.message.request_id) == ("a/new", 5)
    assert action.message.error.code == Code.SHUTTING_DOWN
    assert not desk.core.busy


def test_status_tells_what_is_there() -> None:
    desk = CoreFixture("a/worker", "a/scheduler", "b")
    desk.start("a/scheduler", 1, store(0))
    desk.refused("a/worker", 2, store(99))
    desk.core.close_session("b")
    desk.report(TensorsUnmapped(2))
    desk.report(PoolRegistered(8192))
    copying = told.CopyStatus("auto", told.CalibrationPoint(1 << 20, 55.0, 54.0), (), 1, 1)
    health = told.HealthStatus(True)
    desk.report(CopyCalibrated(copying))
    desk.report(HealthChecked(health))
    (action,) = desk.ask("a/worker", wire.StatusRequest(5))
    assert action == SendMessage(
        "a/worker",
        wire.StatusReport(
            5,
            told.DaemonStatus(
                version="0.1",
                boot_id="boot",
                pid=4711,
                uptime_seconds=1.0,
                device=DEVICE,
                pool=told.PoolStatus(POOL, 8192, 8192),
                sessions=2,
                engines=(
                    told.EngineStatus("a", True, 2, 2048, 1),
                    told.EngineStatus("b", False, 2, 2048, 0),
                ),
                totals=told.Totals(),
                errors={"block_out_of_range": 1},
                copying=copying,
                health=health,
            ),
        ),
    )


# Anything may happen


@dataclass
class ExpectedRegistration:
    """A registration as the device worker sees it: to be mapped, mapped, to be let go."""

    number: int
    engine: str
    session: str
    mapped: bool = False
    failed: bool = False
    leaving: bool = False
    timeline: bool = False
    plans: dict[int, CopyPlan] = field(default_factory=dict)


class Shell(RuleBasedStateMachine):
    """Server and device worker. `owed` is what every living session has still to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.core = new_core()
        self.books = RegionRecordsModel()
        self.names = (f"s{n}" for n in count())
        self.request_ids = count(1)
        self.engine_of: dict[str, str] = {}
        self.claims: dict[int, ExpectedRegistration] = {}
        self.jobs: dict[int, tuple[str, int]] = {}
        """serial -> (engine, job id) of every plan that has not ended"""
        self.owner: dict[int, str] = {}
        """serial -> the session that wants to hear of it"""
        self.abandoned: set[int] = set()
        self.owed: dict[tuple[str, int], tuple[type[wire.DaemonMessage], ...]] = {}
        self.waits: dict[tuple[str, int], set[int]] = {}
        self.ending: tuple[int, str, str | None] | None = None
        """(serial, outcome, error code) that the result has to tell"""
        self.refusing: int | None = None
        self.refusals: list[str] = []

    # What the core may ask for

    def perform(self, actions: list[Action]) -> None:
        for action in self.books.hear(actions):
            match action:
                case SendMessage(session, message):
                    assert session in self.engine_of
                    self.told(session, message)
                case CloseSession(session):
                    self.forget(session)
                case MapTensors(number, session):
                    assert number not in self.claims
                    engine = self.engine_of[session]
                    assert engine not in {claim.engine for claim in self.claims.values()}
                    timeline = action.timeline is not None
                    self.claims[number] = ExpectedRegistration(
                        number, engine, session, timeline=timeline
                    )
                case UnmapTensors(number):
                    assert not self.claims[number].leaving
                    self.claims[number].leaving = True
                case StartTransfer(plan=plan):
                    claim = self.claims[plan.registration]
                    assert claim.mapped
                    assert not claim.leaving
                    assert plan.serial not in self.jobs
                    assert plan.after < plan.serial
                    claim.plans[plan.serial] = plan
                case CancelTransfers(number, serials):
                    assert self.claims[number].plans.keys() >= set(serials)
                    self.abandoned |= set(serials)

    def told(self, session: str, message: wire.DaemonMessage) -> None:
        match message:
            case wire.Finished((result,)) if result.outcome is Outcome.REFUSED:
                assert result.job_id == self.refusing
                assert result.error is not None
                self.refusals.append(result.error.code)
            case wire.Finished((result,)):
                assert self.ending is not None
                serial, outcome, code = self.ending
                assert self.owner.pop(serial) == session  # only once, and to whom it belongs
                assert (result.job_id, result.outcome) == (self.jobs[serial][1], outcome)
                assert (result.error and result.error.code) == code
            case (
                wire.Finished()
                | wire.Welcome()
                | wire.Goodbye()
                | wire.Snapshot()
                | wire.KeyEvents()
            ):
                raise AssertionError(message)
            case reply:
                assert reply.request_id is not None  # an Error to nothing
                key = session, reply.request_id
                assert isinstance(reply, self.owed.pop(key))
                if isinstance(reply, wire.Waited):
                    assert not self.waits.pop(key, set())  # all of them have ended

    def forget(self, session: str) -> None:
        del self.engine_of[session]
        self.owed = {key: kind for key, kind in self.owed.items() if key[0] != session}
        self.owner = {serial: who for serial, who in self.owner.items() if who != session}

    def ask(self, session: str, message: wire.ClientMessage, *kinds: Any) -> None:
        request_id = getattr(message, "request_id", None)
        if request_id is not None:
            self.owed[session, request_id] = (*kinds, wire.Error)
        self.perform(self.core.handle(session, message, now=101.0))

    def session(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.engine_of)))

    def open_claim(self, engine: str) -> ExpectedRegistration | None:
        claims = [c for c in self.claims.values() if c.engine == engine]
        return next((c for c in claims if c.mapped and not c.leaving), None)

    # Clients

    @initialize()
    def begin(self) -> None:
        self.hello("a")

    @rule(engine=st.sampled_from("ab"))
    def come(self, engine: str) -> None:
        self.hello(engine)

    def hello(self, engine: str) -> None:
        name = next(self.names)
        (action,) = self.core.open_session(name, wire.Hello(1, 1, "client", engine))
        assert isinstance(action, SendMessage)
        if self.core.stopping:
            assert isinstance(action.message, wire.Error)
        else:
            assert isinstance(action.message, wire.Welcome)
            self.engine_of[name] = engine

    @precondition(lambda self: self.engine_of)
    @rule(
        data=st.data(),
        layout=st.sampled_from([LAYOUT, OTHER]),
        host_bytes=st.sampled_from([None, 1, 4096, 8192, POOL]),
        timeline=st.sampled_from([None, 3]),
        own=st.booleans(),
    )
    def register(
        self,
        data: st.DataObject,
        layout: KVLayout,
        host_bytes: int | None,
        timeline: int | None,
        own: bool,
    ) -> None:
        request_id, session = next(self.request_ids), self.session(data)
        if own:
            where = (memory.FdAllocation(1, 8192),), (memory.Location(0, data.draw(_OFFSETS)),)
            message: wire.ClientMessage = wire.RegisterKVCaches(
                request_id, layout, *where, host_bytes, timeline
            )
            self.ask(session, message, wire.Registered)
        else:
            message = wire.AllocateKVCaches(request_id, layout, host_bytes, timeline)
            self.ask(session, message, wire.Allocated)

    @precondition(lambda self: self.engine_of)
    @rule(
        data=st.data(),
        job_id=st.integers(0, 5),
        make=st.sampled_from([store, load]),
        blocks=st.lists(st.integers(0, 8), max_size=3),
        hosts=st.lists(st.integers(0, 2), max_size=3),
        wait_for=st.sampled_from([0, 0, 4]),
    )
    def submit(
        self,
        data: st.DataObject,
        job_id: int,
        make: Any,
        blocks: list[int],
        hosts: list[int],
        wait_for: int,
    ) -> None:
        session = self.session(data)
        engine = self.engine_of[session]
        claim = self.open_claim(engine)
        busy = [serial for serial, who in self.owner.items() if who == session]
        faults = {
            Code.SHUTTING_DOWN: self.core.stopping,
            Code.NOT_REGISTERED: claim is None,
            Code.DUPLICATE_JOB: (engine, job_id) in self.jobs.values(),
            Code.BUSY: len(busy) >= MAX_JOBS,
            Code.NO_TIMELINE: bool(wait_for) and claim is not None and not claim.timeline,
        }
        src, dst = make(*blocks, hosts=tuple(hosts))
        self.refusing = job_id
        before = {} if claim is None else dict(claim.plans)
        self.ask(session, wire.Submit(job_id, src, dst, wait_for))
        self.refusing, refusals = None, self.refusals
        self.refusals = []
        if any(faults.values()):
            assert len(refusals) == 1
            assert faults.get(Code(refusals[0]))
        elif refusals:
            assert set(refusals) <= _SPEC_FAULTS | ({Code.STALE} if make is load else set())
            assert len(refusals) == 1
        else:
            assert claim is not None
            (serial,) = claim.plans.keys() - before.keys()
            self.jobs[serial], self.owner[serial] = (engine, job_id), session

    @precondition(lambda self: self.engine_of)
    @rule(data=st.data(), job_ids=st.lists(st.integers(0, 6), max_size=4))
    def cancel(self, data: st.DataObject, job_ids: list[int]) -> None:
        session = self.session(data)
        wanted = {(self.engine_of[session], job_id) for job_id in job_ids}
        before = set(self.abandoned)
        self.ask(session, wire.Cancel(tuple(job_ids)))
        assert self.abandoned == before | {s for s, job in self.jobs.items() if job in wanted}

    @precondition(lambda self: self.engine_of)
    @rule(data=st.data(), job_ids=st.lists(st.integers(0, 6), max_size=4))
    def wait(self, data: st.DataObject, job_ids: list[int]) -> None:
        session, request_id = self.session(data), next(self.request_ids)
        wanted = {(self.engine_of[session], job_id) for job_id in job_ids}
        serials = {serial for serial, job in self.jobs.items() if job in wanted}
        self.ask(session, wire.Wait(request_id, tuple(job_ids)), wire.Waited)
        if serials:
            assert (session, request_id) in self.owed
            self.waits[session, request_id] = serials
        else:
            assert (session, request_id) not in self.owed

    @precondition(lambda self: self.engine_of)
    @rule(data=st.data())
    def status(self, data: st.DataObject) -> None:
        session, request_id = self.session(data), next(self.request_ids)
        self.ask(session, wire.StatusRequest(request_id), wire.StatusReport)
        assert (session, request_id) not in self.owed

    @precondition(lambda self: self.engine_of)
    @rule(data=st.data(), polite=st.booleans())
    def leave(self, data: st.DataObject, polite: bool) -> None:
        session = self.session(data)
        mine = {serial for serial, who in self.owner.items() if who == session}
        held = {c.number for c in self.claims.values() if c.session == session and not c.failed}
        if polite:
            first, *actions = self.core.handle(session, wire.Goodbye(), now=101.0)
            assert first == SendMessage(session, wire.Goodbye())
        else:
            actions = self.core.close_session(session)
        self.perform(actions)
        assert session not in self.engine_of
        assert mine <= self.abandoned
        assert all(self.claims[number].leaving for number in held)

    @rule(sure=st.integers(0, 7))
    def stop(self, sure: int) -> None:
        if not sure:
            self.core.stop()

    # The device worker

    @precondition(lambda self: any(not c.mapped for c in self.claims.values()))
    @rule(data=st.data(), works=st.sampled_from([True, True, False]))
    def lane_maps(self, data: st.DataObject, works: bool) -> None:
        claim = data.draw(st.sampled_from([c for c in self.claims.values() if not c.mapped]))
        claim.mapped, claim.failed = True, not works
        error = None if works else ErrorInfo(Code.MAP_FAILED, "no memory")
        self.perform(self.core.report(TensorsMapped(claim.number, claim.session, error)))
        if claim.failed and not claim.leaving:
            del self.claims[claim.number]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.DONE, Outcome.DONE, Outcome.FAILED]))
    def lane_ends(self, data: st.DataObject, outcome: Outcome) -> None:
        serial = data.draw(st.sampled_from(sorted(self.jobs)))
        self.end(serial, outcome)

    @precondition(lambda self: self.abandoned)
    @rule(data=st.data())
    def lane_cancels(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.abandoned))), Outcome.CANCELLED)

    @precondition(lambda self: any(c.mapped and c.leaving for c in self.claims.values()))
    @rule(data=st.data())
    def lane_unmaps(self, data: st.DataObject) -> None:
        leaving = [c for c in self.claims.values() if c.mapped and c.leaving]
        self.unmap(data.draw(st.sampled_from(leaving)))

    def end(self, serial: int, outcome: Outcome) -> None:
        (claim,) = [c for c in self.claims.values() if serial in c.plans]
        told: tuple[str, str | None] = (outcome, None)
        if outcome is Outcome.FAILED:
            told = outcome, FAULT.code
        elif outcome is Outcome.CANCELLED:
            told = ("failed", Code.ENGINE_GONE) if claim.leaving else (outcome, Code.CANCELLED)
        self.ending = serial, *told
        heard = serial in self.owner
        due = {key for key, serials in self.waits.items() if serials <= {serial}}
        for serials in self.waits.values():
            serials.discard(serial)
        error = FAULT if outcome is Outcome.FAILED else None
        ended = TransferCompleted(serial, outcome, 0.0, error)
        actions = self.core.report(ended)
        if heard:
            assert finished(actions[:1])  # Finished first, then Waited
        del claim.plans[serial]
        self.perform(actions)
        self.ending = None
        assert serial not in self.owner
        assert not due & self.owed.keys()
        del self.jobs[serial]
        self.abandoned.discard(serial)

    def unmap(self, claim: ExpectedRegistration) -> None:
        for serial in tuple(claim.plans):
            self.end(serial, Outcome.CANCELLED)
        del self.claims[claim.number]
        self.perform(self.core.report(TensorsUnmapped(claim.number)))

    # Always

    @invariant()
    def busy_while_anything_is_under_way(self) -> None:
        settled = all(c.mapped and not c.leaving for c in self.claims.values())
        assert self.core.busy == bool(self.jobs or not settled)

    @invariant()
    def sessions_are_those_that_came_and_did_not_go(self) -> None:
        assert set(self.core.sessions) == set(self.engine_of)

    @invariant()
    def jobs_are_those_that_were_accepted_and_did_not_end(self) -> None:
        status = self.core.status(now=101.0)
        assert sum(engine.jobs for engine in status.engines) == len(self.jobs)
        assert status.pool.reserved_bytes <= POOL

    def teardown(self) -> None:
        """Let the device worker do all that it was asked for: then nobody is owed anything."""
        while any(not c.mapped or c.leaving for c in self.claims.values()) or self.jobs:
            for claim in tuple(self.claims.values()):
                if not claim.mapped:
                    claim.mapped = True
                    self.perform(self.core.report(TensorsMapped(claim.number, claim.session)))
                elif claim.leaving:
                    self.unmap(claim)
                else:
                    for serial in tuple(claim.plans):
                        self.end(serial, Outcome.DONE)
        assert not self.owed
        assert not self.owner
        assert not self.core.busy


_OFFSETS = st.sampled_from([0, 0, 4096, 8192])
_SPEC_FAULTS = {Code.BLOCK_OUT_OF_RANGE, Code.SIZE_MISMATCH, Code.DUPLICATE_BLOCK}
"""Of a load also STALE, where its host blocks were never stored to."""


def test_anything_may_happen() -> None:
    run_state_machine_as_test(
        Shell,
        settings=settings(max_examples=200, stateful_step_count=40),
    )
