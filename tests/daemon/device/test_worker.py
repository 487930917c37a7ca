"""The device worker, over an engine whose chunks end when the test says so, and over real copies.

Nothing here sleeps: `settle` makes the worker go round until it has done all that it can do now, so
that "not submitted" is a fact and not a guess.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.core.actions import (
    CancelTransfers,
    Continue,
    CopyCalibrated,
    CopyPlan,
    ForgetStores,
    MapTensors,
    Pong,
    Report,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.hazards import HazardTracker
from kvferry.daemon.core.layout import BlockLayout, Extent
from kvferry.daemon.device.command_queue import Ping
from kvferry.daemon.device.mappings import MapCommand
from kvferry.daemon.device.transfer_queues import LARGE
from kvferry.daemon.device.worker import MAX_CANCELS, DeviceWorker
from kvferry.daemon.engine import reference
from kvferry.daemon.engine.base import (
    NO_ROOM,
    ChunkBudget,
    ChunkRequest,
    CopyEngine,
    Mapping,
    OwnerThread,
    Shared,
)
from kvferry.daemon.engine.reference import Faults, ReferenceEngine
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, Failed, KVFerryError, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import Allocation, CudaAllocation, FdAllocation, Location
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import CalibrationPoint, CopyStatus, DeviceInfo, GroupCopying
from kvferry.shm.memfd import sealed_memfd
from kvferry.testing.engine import until
from support.region_records_model import NO_BLOCKS

STORE, LOAD = Direction.STORE, Direction.LOAD
PATIENCE = 20.0
"""Seconds after which a test gives up; nothing takes that long."""
NOBODY = 999
"""A registration that is never there: that it is gone is reported as soon as it is asked for."""


def layout(page: int, blocks: int = 64) -> KVLayout:
    return KVLayout((TensorLayout(blocks, page, page),), ((TensorRef(0, page),),))


SMALL = layout(64)
BIG = 2 * LARGE


@dataclass(eq=False)
class FakeChunk:
    direction: Direction
    mapping: Mapping
    run: Extent
    number: int
    """Its place in the order submitted, from 0, over both directions."""
    done: bool = False
    error: KVFerryError | None = None

    @property
    def blocks(self) -> list[int]:
        return [int(block) for block in self.run.gpu_blocks]


class StubEngine:
    """Takes chunks, and says of each what the test says of it. Its clock counts submissions."""

    info = DeviceInfo("cpu", "cpu", "stub")
    numa_node: int | None = None

    def __init__(self) -> None:
        self.chunk = ChunkBudget(1 << 40)
        """What a chunk may be; how many at once in one direction:"""
        self.most = 4
        self.submitted: queue.SimpleQueue[FakeChunk] = queue.SimpleQueue()
        self.in_flight: list[FakeChunk] = []
        self.closed: list[Mapping] = []
        self.requests: list[tuple[Direction, ChunkRequest]] = []
        self.flushes: list[tuple[Direction, bool]] = []
        self.timed: list[tuple[list[int], list[int] | None]] = []
        """Blocks of the first chunk of a plan that was timed, and of the one in flight before."""
        self.crowded = False
        """Whether there is no room for anything."""
        self.refusals: list[KVFerryError | None] = []
        """What the next submissions say: an error, or None where they work; empty: they work."""
        self.on_submit: Callable[[], object] = lambda: None
        self._owner = OwnerThread()
        self.accepted = 0
        """Chunks that were submitted."""

    def attach(self, pool_address: int) -> CopyStatus | None:
        self._owner.bind()
        return None

    def pin(self, address: int, nbytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...

    def map_tensors(
        self,
        geometry: BlockLayout,
        allocations: Sequence[Allocation],
        locations: Sequence[Location],
        descriptors: Sequence[int],
    ) -> Mapping:
        return Mapping(geometry, np.zeros(len(locations), dtype=np.int64))

    def allocate_tensors(self, geometry: BlockLayout, kept: Sequence[int] = ()) -> Shared:
        raise Failed(Code.MAP_FAILED, "no memory")

    def unmap_tensors(self, mapping: Mapping) -> None:
        assert not [chunk for chunk in self.in_flight if chunk.mapping is mapping]
        assert mapping not in self.closed
        self.closed.append(mapping)

    def chunk_budget(
        self, direction: Direction, mapping: Mapping, request: ChunkRequest
    ) -> ChunkBudget:
        self._owner.assert_owner()
        self.requests.append((direction, request))
        if self.crowded:
            return NO_ROOM
        flying = [chunk for chunk in self.in_flight if chunk.direction is direction]
        return self.chunk if len(flying) < self.most else NO_ROOM

    def submit(self, direction: Direction, mapping: Mapping, run: Extent) -> FakeChunk:
        self._owner.assert_owner()
        assert 1 <= run.gpu_blocks.size <= self.chunk.blocks
        assert run.gpu_blocks.size == 1 or mapping.layout.count_bytes((run,)) <= self.chunk.nbytes
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        chunk = FakeChunk(direction, mapping, run, self.accepted)
        self.accepted += 1
        self.in_flight.append(chunk)
        self.submitted.put(chunk)
        self.on_submit()
        return chunk

    def flush(self, direction: Direction, more: bool) -> None:
        self._owner.assert_owner()
        self.flushes.append((direction, more))

    def poll(self, ticket: object) -> bool:
        self._owner.assert_owner()
        assert isinstance(ticket, FakeChunk)
        if ticket.done or ticket.error is not None:
            self.in_flight.remove(ticket)
        if ticket.error is not None:
            raise ticket.error
        return ticket.done

    def elapsed(self, first: object, last: object, before: object | None) -> float:
        assert isinstance(first, FakeChunk)
        assert isinstance(last, FakeChunk)
        assert not {first, last, before} & {*self.in_flight}
        self.timed.append((first.blocks, before.blocks if isinstance(before, FakeChunk) else None))
        return 1.0 + last.number - first.number

    def copying(self, mapping: Mapping) -> tuple[GroupCopying, ...]:
        return (GroupCopying("direct", "staged"),)

    def shutdown(self) -> None: ...


@dataclass
class WorkerFixture:
    """A device worker, and what the core would have told it."""

    engine: CopyEngine
    pool: HostPool = field(default_factory=lambda: HostPool(1 << 16, 1 << 16))
    deaths: list[KVFerryError] = field(default_factory=list)
    expected: int = 0
    """Deaths that the test provokes."""
    pings: int = 0
    told: int = 0
    """Ends that were reported."""
    held: tuple[int, ...] = ()
    """Descriptors of memory that an earlier daemon held."""
    between: Callable[[], object] = lambda: None
    """What happens when a command is continued."""

    def __post_init__(self) -> None:
        self.pool.ready_bytes = self.pool.nbytes
        self.batches: queue.SimpleQueue[list[Report]] = queue.SimpleQueue()
        self.worker = DeviceWorker(self.engine, self.pool, self.take, self.died)
        self.geometries: dict[int, BlockLayout] = {}
        self.orderings: dict[int, HazardTracker] = {}
        self.serial = 0
        self.plans: dict[int, CopyPlan] = {}
        if self.held:
            self.worker.hold_memory(NOBODY, *self.held)
        self.worker.start()

    def map(
        self, number: int = 1, shape: KVLayout = SMALL, *, clock: int | None = None, **where: Any
    ) -> TensorsMapped:
        """Map a registration; its own tensors unless locations=None says: allocate."""
        geometry = self.geometries[number] = BlockLayout(LayoutArrays.from_layout(shape), 0, 64)
        self.orderings[number] = HazardTracker(geometry.gpu_slots, 64)
        locations = where.get("locations", (Location(0, 0),) * len(shape.tensors))
        allocations = where.get("allocations", ())
        wanted = MapTensors(number, "session", geometry, allocations, locations, clock)
        self.worker.post_command(MapCommand(wanted, where.get("descriptors", ()), clock))
        (report,) = self.settle()
        assert isinstance(report, TensorsMapped)
        return report

    def map_large(self, number: int = 1, page: int = BIG) -> None:
        """A registration whose blocks are large chunks, in a pool as large: of no memory."""
        self.pool.ready_bytes = 1 << 40
        self.map(number, layout(page))

    def start(
        self,
        direction: Direction,
        blocks: Sequence[int],
        hosts: Sequence[int] | None = None,
        *,
        number: int = 1,
        wait_for: int = 0,
        accepted: float = 0.0,
        requires: tuple[int, ...] = (),
    ) -> int:
        """Start a plan as the core would have made it; hosts: as many as blocks, by default."""
        self.serial += 1
        geometry = self.geometries[number]
        ids = np.array(blocks if hosts is None else hosts, dtype=np.int64)
        resolved = geometry.resolve(direction, GPULoadStoreSpec(blocks), ids)
        plan = CopyPlan(
            self.serial,
            number,
            direction,
            resolved.extents,
            geometry.count_bytes(resolved.extents),
            wait_for,
            self.orderings[number].add_transfer(self.serial, direction, resolved),
            geometry.end_offset(resolved.extents),
            accepted,
            requires,
        )
        self.plans[plan.serial] = plan
        self.worker.post_command(StartTransfer(plan, "session", plan.serial, NO_BLOCKS))
        return self.serial

    def take(self, batch: list[Report]) -> None:
        """What is left of a command is posted again, as the core does."""
        self.told += len(serials(batch))
        for report in batch:
            if isinstance(report, Continue):
                if isinstance(report.command, CancelTransfers):
                    self.between()
                self.worker.post_command(report.command)
        self.batches.put([report for report in batch if not _is_forget(report)])

    def died(self, error: KVFerryError) -> None:
        self.deaths.append(error)
        self.batches.put([])  # wakes who waits for a report

    def reports(self) -> list[Report]:
        """The next batch; when the worker has failed there will be none."""
        batch = self.batches.get(timeout=PATIENCE)
        assert batch, self.deaths
        return batch

    def settle(self) -> list[Report]:
        """Let the worker do all that it can; what it reported meanwhile."""
        seen: list[Report] = []
        before = None
        while before != (now := (len(seen), getattr(self.engine, "accepted", 0))):
            before = now
            for _ in range(2):  # the second is handled when the step of the first is over
                self.pings += 1
                self.worker.post_command(Ping(-self.pings))
                while not (pongs := [one for one in seen if self._is_pong(one)]):
                    seen += self.reports()
                seen.remove(*pongs)
        return seen

    def _is_pong(self, report: Report) -> bool:
        return isinstance(report, Pong) and report.posted == -self.pings

    def close(self) -> None:
        self.worker.close()
        self.pool.close(self.engine)
        assert len(self.deaths) == self.expected


def _is_forget(report: Report) -> bool:
    """Such a command is between the worker and the core, and no test waits for it."""
    return isinstance(report, Continue) and isinstance(report.command, ForgetStores)


@pytest.fixture
def stub() -> StubEngine:
    return StubEngine()


@pytest.fixture
def fixture(stub: StubEngine) -> Iterator[WorkerFixture]:
    fixture = WorkerFixture(stub)
    yield fixture
    fixture.close()


def taken(stub: StubEngine) -> list[FakeChunk]:
    """The chunks submitted since the last time."""
    chunks = []
    while not stub.submitted.empty():
        chunks.append(stub.submitted.get())
    return chunks


def finish(fixture: WorkerFixture, *chunks: FakeChunk) -> list[Report]:
    for chunk in chunks:
        chunk.done = True
    return fixture.settle()


def run_out(fixture: WorkerFixture, stub: StubEngine) -> list[Report]:
    """Finish everything there is, oldest first."""
    reports = fixture.settle()
    while stub.in_flight:
        reports += finish(fixture, stub.in_flight[0])
    return reports


def done(serial: int, seconds: float = 1.0) -> TransferCompleted:
    return TransferCompleted(serial, Outcome.DONE, seconds)


def cancelled(serial: int) -> TransferCompleted:
    return TransferCompleted(serial, Outcome.CANCELLED)


def serials(reports: Sequence[Report]) -> list[int]:
    return [report.serial for report in reports if isinstance(report, TransferCompleted)]


@pytest.fixture
def clock() -> Iterator[TimelineFixture]:
    clock = TimelineFixture()
    yield clock
    os.close(clock.descriptor)
    clock.page.close()


class TimelineFixture:
    """The writing end of a timeline."""

    def __init__(self) -> None:
        self.descriptor = sealed_memfd("timeline", PAGE)
        self.page = mmap.mmap(self.descriptor, PAGE)

    def show(self, value: int) -> None:
        self.page[:8] = value.to_bytes(8, "little")

    def revoke(self) -> None:
        self.page[8:16] = bytes([1] * 8)

    @property
    def copy(self) -> int:
        """A descriptor for the worker to close."""
        return os.dup(self.descriptor)


ERROR = Failed(Code.DRIVER, "the device says no", 700)


def failed(serial: int) -> TransferCompleted:
    return TransferCompleted(serial, Outcome.FAILED, error=ERROR.info)


# Order


@pytest.mark.parametrize("direction", Direction)
def test_plans_of_one_direction_run_and_end_in_order(
    fixture: WorkerFixture, stub: StubEngine, direction: Direction
) -> None:
    fixture.map()
    first, second = (fixture.start(direction, [block, block + 1]) for block in (0, 2))
    assert fixture.settle() == []
    one, two = taken(stub)
    assert (one.blocks, two.blocks, one.direction) == ([0, 1], [2, 3], direction)
    assert finish(fixture, two) == []
    assert finish(fixture, one) == [done(first), done(second)]
    assert stub.timed == [([0, 1], None), ([2, 3], [0, 1])]


def test_the_two_directions_overlap(fixture: WorkerFixture, stub: StubEngine) -> None:
    fixture.map()
    fixture.start(STORE, [0])
    load = fixture.start(LOAD, [1])
    fixture.settle()
    store_chunk, load_chunk = sorted(taken(stub), key=lambda chunk: chunk.direction, reverse=True)
    assert (store_chunk.direction, load_chunk.direction) == (STORE, LOAD)
    assert finish(fixture, load_chunk) == [done(load)]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("blocks", "hosts"), [([5], [1]), ([1], [5])], ids=["host block", "GPU block"]
)
def test_a_transfer_waits_for_the_other_direction_where_they_meet(
    fixture: WorkerFixture,
    stub: StubEngine,
    direction: Direction,
    blocks: list[int],
    hosts: list[int],
) -> None:
    fixture.map()
    first = fixture.start(direction, [0, 1], [0, 1])
    second = fixture.start(direction, [2])
    meets = fixture.start(direction.other, blocks, hosts)
    fixture.settle()
    one, two = taken(stub)
    assert (one.direction, two.direction) == (direction, direction)
    assert finish(fixture, one) == [done(first)]
    (three,) = taken(stub)  # it need not wait for the second
    assert three.direction is direction.other
    assert sorted(serials(finish(fixture, two, three))) == [second, meets]


def test_a_plan_of_many_chunks_is_waited_for_to_its_end(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.most = ChunkBudget(64), 2
    fixture.map()
    store = fixture.start(STORE, [0, 1, 2, 3])
    load = fixture.start(LOAD, [9], [0])
    fixture.settle()
    for block in range(4):
        assert all(chunk.direction is STORE for chunk in stub.in_flight)
        assert stub.in_flight[0].blocks == [block]
        reports = finish(fixture, stub.in_flight[0])
    assert reports == [done(store, 4.0)]  # from the begin of the first to the end of the last
    assert serials(run_out(fixture, stub)) == [load]


def test_nothing_to_move_is_done_at_once(fixture: WorkerFixture, stub: StubEngine) -> None:
    fixture.map()
    serial = fixture.start(STORE, [])
    assert fixture.settle() == [done(serial, 0.0)]
    assert taken(stub) == []


def test_nothing_to_move_ends_behind_what_was_submitted_before(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    fixture.map()
    first, nothing = fixture.start(STORE, [0]), fixture.start(STORE, [])
    assert serials(fixture.settle()) == []
    assert serials(run_out(fixture, stub)) == [first, nothing]


def test_a_plan_that_fails_at_once_ends_behind_what_was_submitted_before(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    fixture.map()
    stub.refusals += [None, ERROR]
    first, failing = fixture.start(STORE, [0]), fixture.start(STORE, [1])
    assert serials(fixture.settle()) == []
    assert serials(run_out(fixture, stub)) == [first, failing]


def test_what_is_over_behind_a_cancelled_plan_is_told_behind_it(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    fixture.map()
    stub.refusals += [None, ERROR]
    first, failing = fixture.start(STORE, [0]), fixture.start(STORE, [1])
    nothing = fixture.start(STORE, [])
    fixture.settle()
    fixture.worker.post_command(CancelTransfers(1, (first,)))
    assert fixture.settle() == []
    ends = [cancelled(first), failed(failing), done(nothing, 0.0)]
    assert run_out(fixture, stub) == ends


# Fences


def test_a_plan_waits_for_the_timeline(
    fixture: WorkerFixture, stub: StubEngine, clock: TimelineFixture
) -> None:
    fixture.map(clock=clock.copy)
    clock.show(2)
    fixture.start(STORE, [0], wait_for=2)
    held, behind = fixture.start(STORE, [1], wait_for=3), fixture.start(STORE, [2])
    other_way = fixture.start(LOAD, [3])
    fixture.settle()
    assert sorted(chunk.blocks for chunk in taken(stub)) == [[0], [3]]
    assert other_way in serials(run_out(fixture, stub))
    clock.show(4)
    chunks = [stub.submitted.get(timeout=PATIENCE) for _ in range(2)]  # nobody woke the worker
    assert [chunk.blocks for chunk in chunks] == [[1], [2]]
    assert finish(fixture, *chunks) == [done(held), done(behind)]


def test_nothing_to_move_waits_for_the_timeline_too(
    fixture: WorkerFixture, stub: StubEngine, clock: TimelineFixture
) -> None:
    fixture.map(clock=clock.copy)
    first, nothing = fixture.start(STORE, [0]), fixture.start(STORE, [], wait_for=1)
    assert serials(run_out(fixture, stub)) == [first]
    clock.show(1)
    assert fixture.settle() == [done(nothing, 0.0)]


def test_it_tells_since_when_the_oldest_go_and_since_when_engines_hold_theirs(
    fixture: WorkerFixture, stub: StubEngine, clock: TimelineFixture
) -> None:
    """Who waits for one that is held is held; what has begun goes, whatever the page says now."""
    fixture.map(clock=clock.copy)
    fixture.map(2, clock=clock.copy)
    now = time.monotonic()
    fixture.worker.post_command(Ping(1.0))
    assert fixture.settle() == [Pong(1.0, None, None)]
    clock.show(1)
    begun = fixture.start(STORE, [1], number=2, wait_for=1, accepted=now - 60)
    fixture.start(STORE, [2], number=2, accepted=now - 30)
    fixture.settle()
    clock.show(0)
    fixture.start(STORE, [0], wait_for=1, accepted=now - 80)
    fixture.start(LOAD, [5], [0], accepted=now - 90)
    fixture.worker.post_command(Ping(2.0))
    assert fixture.settle() == [Pong(2.0, now - 60, now - 90)]
    (ended,) = finish(fixture, stub.in_flight[0])
    assert isinstance(ended, TransferCompleted)
    assert (ended.serial, ended.queued >= 60) == (begun, True)


def test_a_fence_holds_its_own_registration_alone(
    fixture: WorkerFixture, stub: StubEngine, clock: TimelineFixture
) -> None:
    fixture.map(1, clock=clock.copy)
    fixture.map(2)
    fixture.start(STORE, [0], number=1, wait_for=1)
    free = fixture.start(STORE, [1], number=2)
    assert serials(run_out(fixture, stub)) == [free]


def test_a_plan_waits_for_the_part_of_the_pool_that_it_touches(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    fixture.pool.ready_bytes = 3 * 64
    fixture.map()
    ready, not_ready = fixture.start(STORE, [0], [2]), fixture.start(STORE, [1], [3])
    assert serials(run_out(fixture, stub)) == [ready]
    fixture.pool.ready_bytes = 4 * 64
    assert serials(run_out(fixture, stub)) == [not_ready]


# Cancelling


def test_a_plan_that_waits_is_cancelled_at_once(
    fixture: WorkerFixture, stub: StubEngine, clock: TimelineFixture
) -> None:
    fixture.map(clock=clock.copy)
    held = fixture.start(STORE, [0], wait_for=1)
    behind, after_it = fixture.start(STORE, [1]), fixture.start(LOAD, [5], [0])
    fixture.settle()
    fixture.worker.post_command(CancelTransfers(1, (held,)))
    assert fixture.settle() == [cancelled(held)]
    assert [chunk.blocks for chunk in taken(stub)] in ([[5], [1]], [[1], [5]])
    assert sorted(serials(run_out(fixture, stub))) == [behind, after_it]


def test_a_plan_that_runs_is_cancelled_within_a_chunk(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.most = ChunkBudget(64), 2
    fixture.map()
    running, behind = fixture.start(STORE, range(10)), fixture.start(STORE, [20])
    fixture.settle()
    one, two = taken(stub)
    fixture.worker.post_command(CancelTransfers(1, (running,)))
    assert fixture.settle() == []  # its chunks are in flight, and there is no room
    assert finish(fixture, one) == []
    assert [chunk.blocks for chunk in taken(stub)] == [[20]]
    assert finish(fixture, two) == [cancelled(running)]
    assert serials(run_out(fixture, stub)) == [behind]


def test_who_waits_for_a_cancelled_plan_waits_for_its_chunks(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    fixture.map()
    store = fixture.start(STORE, [0])
    load = fixture.start(LOAD, [1], [0])
    fixture.settle()
    fixture.worker.post_command(CancelTransfers(1, (store,)))
    assert fixture.settle() == []
    (chunk,) = taken(stub)
    assert chunk.direction is STORE
    assert serials(finish(fixture, chunk)) == [store]
    assert serials(run_out(fixture, stub)) == [load]


def test_an_engine_that_revokes_its_timeline_has_given_up_all_its_jobs(
    fixture: WorkerFixture, stub: StubEngine, clock: TimelineFixture
) -> None:
    """No chunk begins any more, and what one under way brings does not count."""
    fixture.map(clock=clock.copy)
    stub.most = 1
    first, second = fixture.start(STORE, [1]), fixture.start(STORE, [2])
    fixture.settle()
    clock.revoke()
    (ended,) = [r for r in finish(fixture, stub.in_flight[0]) if isinstance(r, TransferCompleted)]
    assert (ended.serial, ended.outcome) == (first, Outcome.CANCELLED)
    fixture.settle()
    assert not stub.in_flight
    fixture.worker.post_command(UnmapTensors(1))
    assert serials(fixture.settle()) == [second]


@pytest.mark.parametrize("dies", [False, True], ids=["cancels", "dies"])
def test_who_gives_up_very_many_keeps_nobody_waiting(
    fixture: WorkerFixture, stub: StubEngine, dies: bool
) -> None:
    """Some at a time; and once its engine has died nothing more of it is submitted."""
    fixture.map()
    fixture.map(2)
    stub.crowded = True
    held = [fixture.start(STORE, [1]) for _ in range(5 * MAX_CANCELS)]
    fixture.settle()
    stub.crowded = False
    told: list[tuple[Direction, int]] = []
    stub.on_submit = lambda: told.append((stub.in_flight[-1].direction, fixture.told))
    loads: list[int] = []

    def load() -> None:
        if not loads:
            loads.append(fixture.start(LOAD, [1], number=2))

    fixture.between = load
    fixture.worker.post_command(
        UnmapTensors(1) if dies else CancelTransfers(1, tuple(reversed(held)))
    )
    ended = serials(run_out(fixture, stub))
    assert sorted(ended) == sorted([*held, *loads])
    (before,) = [count for direction, count in told if direction is LOAD]
    assert before <= 2 * MAX_CANCELS
    assert dies == (STORE not in dict(told))
    assert len(stub.closed) == dies


@pytest.mark.parametrize(
    "order", [CancelTransfers(1, (1,)), CancelTransfers(1, (77,)), CancelTransfers(NOBODY, (1,))]
)
def test_a_cancel_that_comes_too_late_is_ignored(
    fixture: WorkerFixture, stub: StubEngine, order: CancelTransfers
) -> None:
    fixture.map()
    fixture.start(STORE, [0])
    assert serials(run_out(fixture, stub)) == [1]
    fixture.worker.post_command(order)
    assert fixture.settle() == []


def test_a_cancel_comes_once_however_often_it_is_asked_for(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    fixture.map()
    fixture.start(STORE, [0])
    fixture.settle()
    for _ in range(3):
        fixture.worker.post_command(CancelTransfers(1, (1,)))
    assert fixture.settle() == []
    assert finish(fixture, *taken(stub)) == [cancelled(1)]


# Failures


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_load_is_not_copied_if_a_store_that_it_requires(
    fixture: WorkerFixture, stub: StubEngine, how: str
) -> None:
    """A store of block 0 completes, the next of block 1 does not; loads of both wait for them."""
    fixture.map()
    good, bad = (fixture.start(STORE, [block]) for block in (0, 1))
    loads = [
        fixture.start(LOAD, [block], [block - 4], requires=(store,))
        for block, store in ((4, good), (5, bad))
    ]
    first, second = stub.submitted.get(), stub.submitted.get()
    first.done = True
    if how == "fails":
        second.error = Failed(Code.COPY_FAILED, "broken")
    else:
        fixture.worker.post_command(CancelTransfers(1, (bad,)))
        second.done = True
    copied = stub.submitted.get(timeout=PATIENCE)
    assert (copied.direction, copied.blocks) == (LOAD, [4])
    copied.done = True
    ends = {one.serial: one for one in fixture.settle() if isinstance(one, TransferCompleted)}
    assert ends[loads[0]].outcome is Outcome.DONE
    refused = ends[loads[1]]
    assert refused.outcome is Outcome.FAILED
    assert refused.error is not None
    assert refused.error.code == Code.STALE
    assert stub.submitted.empty()


def test_a_load_that_comes_right_after_the_end_of_its_store_is_not_copied(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    """The core planned it before it heard of that end."""
    fixture.map()
    late: list[int] = []

    def plan_a_load(batch: list[Report]) -> None:
        if not late and any(isinstance(one, TransferCompleted) for one in batch):
            late.append(fixture.start(LOAD, [4], [0], requires=(1,)))

    take = fixture.take
    fixture.worker._report = lambda batch: (plan_a_load(batch), take(batch))  # type: ignore[assignment, func-returns-value]
    fixture.start(STORE, [0])
    stub.submitted.get().error = Failed(Code.COPY_FAILED, "broken")
    ends = {one.serial: one for one in fixture.settle() if isinstance(one, TransferCompleted)}
    assert ends[late[0]].error is not None
    assert stub.submitted.empty()
    queues = fixture.worker._registrations[1]
    assert not queues.failed_stores


def test_a_chunk_that_cannot_be_submitted_fails_its_plan_alone(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    fixture.map()
    stub.refusals.append(ERROR)
    failing, fine = fixture.start(STORE, [0]), fixture.start(STORE, [1])
    assert run_out(fixture, stub) == [failed(failing), done(fine)]


def test_a_later_chunk_that_cannot_be_submitted_fails_the_plan_once(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.refusals = ChunkBudget(64), [None, ERROR]
    fixture.map()
    failing, fine = fixture.start(STORE, range(5)), fixture.start(STORE, [9])
    assert fixture.settle() == []  # the first chunk may still write
    assert [chunk.blocks for chunk in stub.in_flight] == [[0], [9]]
    assert run_out(fixture, stub) == [failed(failing), done(fine)]


def test_a_chunk_that_fails_on_the_device_fails_its_plan_once(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.most = ChunkBudget(64), 2
    fixture.map()
    failing, fine = fixture.start(STORE, range(5)), fixture.start(STORE, [9])
    fixture.settle()
    one, two = taken(stub)
    one.error = ERROR
    assert fixture.settle() == []  # its second chunk may still write
    assert [chunk.blocks for chunk in taken(stub)] == [[9]]
    two.error = Failed(Code.COPY_FAILED, "the first reason counts")
    assert fixture.settle() == [failed(failing)]
    assert run_out(fixture, stub) == [done(fine)]


def test_a_plan_whose_only_chunk_in_flight_fails_ends_with_chunks_left(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.most = ChunkBudget(64), 1
    fixture.map()
    failing, fine = fixture.start(STORE, range(5)), fixture.start(STORE, [9])
    fixture.settle()
    stub.in_flight[0].error = ERROR
    assert fixture.settle() == [failed(failing)]
    assert run_out(fixture, stub) == [done(fine)]


def test_a_cancelled_plan_that_fails_is_cancelled(fixture: WorkerFixture, stub: StubEngine) -> None:
    fixture.map()
    serial = fixture.start(STORE, [0])
    fixture.settle()
    fixture.worker.post_command(CancelTransfers(1, (serial,)))
    fixture.settle()
    stub.in_flight[0].error = ERROR
    assert fixture.settle() == [cancelled(serial)]


def test_a_plan_whose_time_cannot_be_told_ends_all_the_same(
    fixture: WorkerFixture, stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elapsed(*_: object) -> float:
        raise ERROR

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(stub, "elapsed", elapsed)
    fixture.map()
    plans = [fixture.start(STORE, [block]) for block in (0, 1)]
    assert serials(run_out(fixture, stub)) == plans


def test_an_engine_that_breaks_ends_the_worker_and_says_so(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = threading.Event()

    def breaks(*_: object) -> FakeChunk:
        return cast(FakeChunk, [].pop())

    monkeypatch.setattr(threading, "excepthook", lambda _: raised.set())
    monkeypatch.setattr(stub, "submit", breaks)
    fixture = WorkerFixture(stub, expected=1)
    fixture.map()
    fixture.start(STORE, [0])
    assert raised.wait(PATIENCE)
    assert "IndexError" in fixture.deaths[0].message
    fixture.close()


@pytest.mark.parametrize("error", [Refused(Code.NO_DEVICE, "no device"), RuntimeError("no")])
def test_a_device_that_does_not_come_up_is_told_at_the_start(
    stub: StubEngine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(*_: object) -> CopyStatus | None:
        raise error

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(stub, "attach", attach)
    with pytest.raises(type(error), match="no"):
        WorkerFixture(stub)


def test_at_its_end_it_lets_go_of_what_it_held_and_of_the_device(
    stub: StubEngine, clock: TimelineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []
    held = clock.copy
    where = f"/proc/self/fd/{held}"
    monkeypatch.setattr(stub, "shutdown", lambda: there.append(os.path.lexists(where)))
    fixture = WorkerFixture(stub, held=(held,))
    fixture.close()
    assert there == [False]


# Unmapping


def test_unmapping_ends_everything_once_and_closes_behind_the_last_chunk(
    fixture: WorkerFixture, stub: StubEngine, clock: TimelineFixture
) -> None:
    fixture.map(1, clock=clock.copy)
    fixture.map(2)
    running = {fixture.start(STORE, [0]), fixture.start(STORE, [1]), fixture.start(LOAD, [2])}
    waiting = {
        fixture.start(STORE, [3], wait_for=1),
        fixture.start(LOAD, [4], [0]),
        fixture.start(LOAD, [5]),
    }
    fixture.settle()
    chunks = taken(stub)
    assert len(chunks) == 3
    other = fixture.start(STORE, [0], number=2)
    fixture.worker.post_command(UnmapTensors(1))
    reports = fixture.settle()
    assert set(serials(reports)) == waiting
    assert stub.closed == []
    reports += finish(fixture, *chunks[:2])
    assert stub.closed == []
    assert TensorsUnmapped(1) not in reports
    reports += finish(fixture, chunks[2])
    assert stub.closed == [chunks[0].mapping]
    assert reports[-1] == TensorsUnmapped(1)
    ended = [report for report in reports if isinstance(report, TransferCompleted)]
    assert sorted(serials(ended)) == sorted(running | waiting)
    assert {report.outcome for report in ended} == {Outcome.CANCELLED}
    assert serials(run_out(fixture, stub)) == [other]


def test_a_number_that_was_unmapped_can_come_again(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    for _ in range(2):
        fixture.map(1)
        serial = fixture.start(STORE, [0])
        assert serials(run_out(fixture, stub)) == [serial]
        fixture.worker.post_command(UnmapTensors(1))
        assert fixture.settle() == [TensorsUnmapped(1)]
    assert len(stub.closed) == 2


def test_what_cannot_be_mapped_is_told_and_can_be_unmapped(fixture: WorkerFixture) -> None:
    assert fixture.map(locations=None) == TensorsMapped(
        1, "session", Failed(Code.MAP_FAILED, "no memory").info
    )
    fixture.worker.post_command(UnmapTensors(1))
    assert fixture.settle() == [TensorsUnmapped(1)]


@pytest.mark.parametrize("works", [True, False])
def test_descriptors_of_a_map_command_are_closed(
    fixture: WorkerFixture, clock: TimelineFixture, works: bool
) -> None:
    given, time = os.dup(clock.descriptor), clock.copy
    where: dict[str, Any] = {} if works else {"locations": None}
    report = fixture.map(clock=time, descriptors=(given,), **where)
    assert (report.error is None) == works
    closed = {str(given), str(time)}
    until(lambda: not closed & open_descriptors(), PATIENCE)  # a thread closes them


def test_an_unsealed_timeline_is_refused(fixture: WorkerFixture) -> None:
    descriptor = os.memfd_create("timeline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE)
    error = fixture.map(clock=descriptor).error
    assert error is not None
    assert error.code == Code.NOT_SHAREABLE


# Many


def test_registrations_take_turns_chunk_by_chunk(fixture: WorkerFixture, stub: StubEngine) -> None:
    stub.chunk, stub.most = ChunkBudget(64), 1
    for number in (1, 2, 3):
        fixture.map(number)
    fixture.start(STORE, [60], number=3)
    fixture.settle()  # there is no room until all plans stand behind it
    plans = [fixture.start(STORE, range(4 - n), number=n) for n in (1, 2, 3)]
    fixture.settle()
    geometries = {geometry: number for number, geometry in fixture.geometries.items()}
    order: list[tuple[int, int]] = []
    reports: list[Report] = []
    while stub.in_flight:
        chunk = stub.in_flight[0]
        order.append((geometries[chunk.mapping.layout], chunk.blocks[0]))
        reports += finish(fixture, chunk)
    assert order[0] == (3, 60)
    turns = [number for number, _ in order[1:]]
    assert sorted(turns[:3]) == [1, 2, 3]
    assert sorted(turns[3:5]) == [1, 2]
    assert turns[5:] == [1]
    assert [block for number, block in order if number == 1] == [0, 1, 2]
    assert sorted(serials(reports)[1:]) == plans


def test_a_load_goes_before_stores_that_are_not_submitted_yet(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    """It arrives while the worker submits the first of many chunks of a store."""
    stub.chunk, stub.most = ChunkBudget(64), 100
    fixture.map()
    load: list[int] = []

    def once() -> None:
        if not load:
            load.append(fixture.start(LOAD, [40]))

    stub.on_submit = once
    fixture.start(STORE, range(8))
    reports = run_out(fixture, stub)
    order = [chunk.direction for chunk in taken(stub)]
    assert order == [STORE, LOAD] + [STORE] * 7
    assert sorted(serials(reports)) == [1, 2]


def test_a_load_goes_before_a_store_that_waits_longer(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    fixture.map()
    stub.crowded = True
    fixture.start(STORE, [0])
    fixture.settle()
    fixture.start(LOAD, [1])
    fixture.settle()
    stub.crowded = False
    run_out(fixture, stub)
    assert [chunk.direction for chunk in taken(stub)] == [LOAD, STORE]


def test_a_cancel_acts_between_two_chunks(fixture: WorkerFixture, stub: StubEngine) -> None:
    """It arrives while the first is submitted, and there is room for all."""
    stub.chunk, stub.most = ChunkBudget(64), 100
    fixture.map()
    stub.on_submit = lambda: fixture.worker.post_command(CancelTransfers(1, (1,)))
    fixture.start(STORE, range(8))
    assert run_out(fixture, stub) == [cancelled(1)]
    assert len(taken(stub)) == 1


def test_an_end_is_reported_before_the_next_chunk_is_submitted(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.most = 1
    fixture.map()
    first, second = fixture.start(STORE, [0]), fixture.start(STORE, [1])
    fixture.settle()
    reported: list[list[Report]] = []
    stub.on_submit = lambda: reported.append(fixture.batches.get_nowait())
    stub.in_flight[0].done = True
    until(lambda: len(reported) == 1, PATIENCE)
    assert reported == [[done(first)]]
    stub.on_submit = lambda: None
    assert serials(run_out(fixture, stub)) == [second]


def test_stores_go_on_though_commands_never_end(fixture: WorkerFixture, stub: StubEngine) -> None:
    """A chunk is submitted in each step of the worker."""
    stub.chunk, stub.most = ChunkBudget(64), 100
    fixture.map()
    stub.on_submit = lambda: fixture.worker.post_command(UnmapTensors(NOBODY))
    store = fixture.start(STORE, range(8))
    until(lambda: len(stub.in_flight) == 8, PATIENCE)
    stub.on_submit = lambda: None
    assert serials(run_out(fixture, stub)) == [store]


def test_no_more_is_submitted_than_the_engine_has_room_for(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.most = ChunkBudget(1 << 20, blocks=2), 3
    fixture.map()
    plan = fixture.start(STORE, range(10))
    small = [fixture.start(STORE, [block]) for block in range(20, 24)]
    fixture.settle()
    chunks: list[list[int]] = []
    reports: list[Report] = []
    while stub.in_flight:
        assert len(stub.in_flight) == min(3, 9 - len(chunks))
        chunks.append(stub.in_flight[0].blocks)
        reports += finish(fixture, stub.in_flight[0])
    assert chunks == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [20], [21], [22], [23]]
    assert serials(reports) == [plan, *small]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("large", [False, True])
def test_room_that_one_direction_leaves_the_other_takes(
    fixture: WorkerFixture, stub: StubEngine, direction: Direction, large: bool
) -> None:
    """Nothing else happens meanwhile that could have it tried again."""
    if large:
        fixture.map_large()
    else:
        fixture.map()
    for number, way in enumerate((direction, direction.other)):
        if large or way is direction:
            fixture.start(way, [number])
    fixture.settle()
    first, *_ = [chunk for chunk in taken(stub) if chunk.direction is direction]
    stub.crowded = True
    refused = fixture.start(direction.other, [9])
    fixture.settle()
    stub.crowded = False
    first.done = True
    assert stub.submitted.get(timeout=PATIENCE).blocks == [9]
    assert refused in serials(run_out(fixture, stub))


@pytest.mark.parametrize("how", ["cancel", "start"])
def test_what_found_no_room_is_tried_again_when_another_is_given_up_or_comes(
    fixture: WorkerFixture, stub: StubEngine, how: str
) -> None:
    fixture.map()
    stub.crowded = True
    first, second = fixture.start(STORE, [0]), fixture.start(STORE, [1])
    fixture.settle()
    stub.crowded = False
    if how == "cancel":
        fixture.worker.post_command(CancelTransfers(1, (first,)))
    else:
        fixture.start(STORE, [2])
    assert stub.submitted.get(timeout=PATIENCE).blocks == [int(how == "cancel")]
    assert second in serials(run_out(fixture, stub))


def test_the_engine_is_told_that_a_round_is_over_and_whether_more_waits_for_room(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.most = ChunkBudget(1 << 20, blocks=2), 2
    fixture.map()
    fixture.settle()
    assert not stub.flushes
    fixture.start(STORE, range(6))
    fixture.settle()
    assert stub.flushes[-1] == (STORE, True)
    finish(fixture, stub.in_flight[0])
    assert stub.flushes[-1] == (STORE, False)
    assert (LOAD, False) not in stub.flushes


def test_the_engine_is_told_what_is_wanted_and_whether_alone(
    fixture: WorkerFixture, stub: StubEngine
) -> None:
    stub.chunk, stub.most = ChunkBudget(128), 1
    fixture.map()
    fixture.start(STORE, range(5))
    fixture.settle()
    assert set(stub.requests) == {
        (STORE, ChunkRequest(0, 5 * 64, False)),
        (STORE, ChunkRequest(0, 3 * 64, False)),
    }
    fixture.start(LOAD, [9])
    fixture.start(LOAD, [10])
    fixture.settle()
    stub.requests.clear()
    fixture.settle()
    assert set(stub.requests) == {
        (LOAD, ChunkRequest(0, 64, True)),
        (STORE, ChunkRequest(0, 3 * 64, True)),
    }


def test_what_a_calibration_found_is_reported_first(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CopyStatus("auto", CalibrationPoint(1, 1.0, 1.0), (), 1, 1)
    monkeypatch.setattr(stub, "attach", lambda *_: found)
    fixture = WorkerFixture(stub)
    assert fixture.settle() == [CopyCalibrated(found)]
    fixture.close()


# Anything may happen

few = st.lists(st.integers(0, 5), max_size=4, unique=True)
events = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(Direction), few, st.permutations(range(6))),
    st.tuples(
        st.sampled_from(["finish", "finish", "finish", "fail", "abandon"]), st.integers(0, 9)
    ),
    st.just(("refuse",)),
)


@settings(max_examples=150)
@given(
    st.lists(events, max_size=30),
    st.sampled_from([ChunkBudget(1 << 30), ChunkBudget(64), ChunkBudget(1 << 30, 2)]),
    st.integers(1, 4),
    st.booleans(),
)
def test_whatever_happens_every_plan_ends_once_and_in_order(
    history: list[tuple[Any, ...]], room: ChunkBudget, most: int, unmapped: bool
) -> None:
    stub = StubEngine()
    stub.chunk, stub.most = room, most
    fixture = WorkerFixture(stub)
    fixture.map()
    plans: dict[int, tuple[Direction, list[int]]] = {}
    ended: list[TransferCompleted] = []
    for event in history:
        match event:
            case "start", direction, blocks, hosts:
                serial = fixture.start(direction, blocks, hosts[: len(blocks)])
                plans[serial] = direction, blocks
            case ("refuse",):
                stub.refusals.append(ERROR)
            case "abandon", number:
                fixture.worker.post_command(CancelTransfers(1, (number + 1,)))
            case verb, number if number < len(stub.in_flight):
                chunk = stub.in_flight[number]
                chunk.done, chunk.error = verb == "finish", None if verb == "finish" else ERROR
        ended += [report for report in fixture.settle() if isinstance(report, TransferCompleted)]
        check_apart(stub.in_flight)
    stub.refusals.clear()
    if unmapped:
        fixture.worker.post_command(UnmapTensors(1))
    ended += [report for report in run_out(fixture, stub) if isinstance(report, TransferCompleted)]
    fixture.close()
    chunks = taken(stub)
    assert sorted(serials(ended)) == sorted(plans)
    assert len(stub.closed) == unmapped
    for direction in Direction:
        mine = [end for end in ended if plans[end.serial][0] is direction]
        told = [end.serial for end in mine if end.outcome is not Outcome.CANCELLED]
        assert told == sorted(told)
        submitted = [p.blocks for p in chunks if p.direction is direction]
        if {end.outcome for end in mine} <= {Outcome.DONE}:  # then nothing is left out
            assert [*chain(*submitted)] == [*chain(*(plans[serial][1] for serial in told))]


def check_apart(chunks: Sequence[FakeChunk]) -> None:
    """No two chunks in flight, one each way, touch the same block on either side."""
    for store in (chunk for chunk in chunks if chunk.direction is STORE):
        for load in (chunk for chunk in chunks if chunk.direction is LOAD):
            assert not set(store.blocks) & set(load.blocks)
            assert not {*store.run.host_offsets.tolist()} & {*load.run.host_offsets.tolist()}


# Real copies


@dataclass
class CopyFixture:
    """A registration that the reference engine allocated, and its bytes: (block, byte) arrays."""

    fixture: WorkerFixture
    gpu: np.ndarray[Any, np.dtype[np.uint8]]
    host: np.ndarray[Any, np.dtype[np.uint8]]


BYTES = 64


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def copies(request: pytest.FixtureRequest, faults: Faults) -> Iterator[CopyFixture]:
    """Its parameter, if any, has arguments of the engine."""
    fixture = WorkerFixture(ReferenceEngine(faults, **getattr(request, "param", {})))
    report = fixture.map(locations=None)
    (descriptor,), (location,) = report.descriptors, report.locations
    memory = mmap.mmap(descriptor, 64 * BYTES)
    os.close(descriptor)
    assert location == Location(0, 0)
    gpu = np.frombuffer(memory, dtype=np.uint8).reshape(64, BYTES)
    pool: Any = (ctypes.c_ubyte * (64 * BYTES)).from_address(fixture.pool.address)
    random = np.random.default_rng(3)
    gpu[:] = random.integers(0, 256, gpu.shape, dtype=np.uint8)
    yield CopyFixture(fixture, gpu, np.frombuffer(pool, dtype=np.uint8).reshape(64, BYTES))
    fixture.close()


# Chunks of any size are copied in threads of the engine.
IN_THREADS = pytest.mark.parametrize("copies", [{"at_once_bytes": 0}], indirect=True)


def wait_for(fixture: WorkerFixture, *wanted: int) -> dict[int, TransferCompleted]:
    """Until all of these have ended."""
    ended: dict[int, TransferCompleted] = {}
    while not ended.keys() >= set(wanted):
        ended |= {r.serial: r for r in fixture.reports() if isinstance(r, TransferCompleted)}
    return ended


def test_bytes_arrive_where_they_should_and_nowhere_else(copies: CopyFixture) -> None:
    before, host = copies.gpu.copy(), copies.host.copy()
    store = copies.fixture.start(STORE, [3, 0, 7], [5, 6, 0])
    load = copies.fixture.start(LOAD, [20, 21], [0, 5])
    ended = wait_for(copies.fixture, store, load)
    assert {r.outcome for r in ended.values()} == {Outcome.DONE}
    host[[5, 6, 0]] = before[[3, 0, 7]]
    assert np.array_equal(copies.host, host)
    before[[20, 21]] = before[[7, 3]]
    assert np.array_equal(copies.gpu, before)


@IN_THREADS
@pytest.mark.parametrize("first", Direction)
def test_real_copies_that_meet_are_done_one_after_the_other(
    copies: CopyFixture, first: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, copied = threading.Event(), queue.SimpleQueue[Direction]()
    copy = reference._copy

    def slow_copy(chunk: Any) -> None:
        if chunk.direction is first:
            assert gate.wait(PATIENCE)
        copy(chunk)
        copied.put(chunk.direction)

    monkeypatch.setattr(reference, "_copy", slow_copy)
    gpu, host = copies.gpu.copy(), copies.host.copy()
    plans = copies.fixture.start(first, [1], [1]), copies.fixture.start(first.other, [2], [1])
    free = copies.fixture.start(first.other, [9], [9])
    assert copies.fixture.settle() == []
    assert copied.empty()
    gate.set()
    wait_for(copies.fixture, *plans, free)
    assert [copied.get(timeout=PATIENCE) for _ in range(3)] == [first, first.other, first.other]
    if first is STORE:
        assert np.array_equal(copies.gpu[2], gpu[1])
    else:
        assert np.array_equal(copies.gpu[1], host[1])
        assert np.array_equal(copies.host[1], gpu[2])


def test_a_real_copy_that_fails_ends_once_and_the_next_is_fine(
    copies: CopyFixture, faults: Faults
) -> None:
    faults.fail_every = 2
    plans = [copies.fixture.start(STORE, [block]) for block in range(4)]
    ended = wait_for(copies.fixture, *plans)
    assert [ended[serial].outcome for serial in plans] == ["done", "failed", "done", "failed"]
    errors = [error.code for serial in plans if (error := ended[serial].error)]
    assert errors == [Code.COPY_FAILED, Code.COPY_FAILED]
    assert copies.fixture.settle() == []


@IN_THREADS
def test_the_reference_engine_takes_few_chunks_at_once(
    copies: CopyFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(reference, "_copy", lambda _: gate.wait(PATIENCE))
    engine = copies.fixture.engine
    taken_in: list[object] = []
    submit = engine.submit

    def counted(*arguments: Any) -> object:
        taken_in.append(submit(*arguments))
        return taken_in[-1]

    monkeypatch.setattr(engine, "submit", counted)
    plans = [copies.fixture.start(STORE, [block]) for block in range(30)]
    until(lambda: len(taken_in) == reference.MAX_CHUNKS, PATIENCE)
    assert copies.fixture.settle() == []
    assert len(taken_in) == reference.MAX_CHUNKS
    gate.set()
    assert sorted(wait_for(copies.fixture, *plans)) == plans
    assert len(taken_in) == 30


def test_unmapping_lets_real_memory_go(copies: CopyFixture) -> None:
    plans = [copies.fixture.start(STORE, [block]) for block in range(20)]
    copies.fixture.worker.post_command(UnmapTensors(1))
    reports: list[Report] = []
    while TensorsUnmapped(1) not in reports:
        reports += copies.fixture.reports()
    assert sorted(serials(reports)) == plans
    assert copies.fixture.settle() == []


CUDA = CudaAllocation("GPU-1", bytes(64), PAGE)


@pytest.mark.parametrize(
    ("shape", "where"),
    [
        (SMALL, {"allocations": (CUDA,)}),
        (SMALL, {"allocations": (FdAllocation(0, 1 << 40),), "files": 1}),
        (SMALL, {"allocations": (FdAllocation(0, PAGE), CUDA), "files": 1}),
        (SMALL, {"allocations": (FdAllocation(0, PAGE),), "files": 1, "clock": "pipe"}),
        (layout(1 << 47, 1 << 20), {"locations": None}),
        (layout(1 << 40, 1 << 10), {"locations": None}),
    ],
    ids=["CUDA", "too short", "mixed", "a pipe for a timeline", "beyond 64 bits", "no such memory"],
)
def test_what_a_client_gets_wrong_is_its_error_and_not_the_workers_end(
    shape: KVLayout, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = dict(where)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    fixture = WorkerFixture(ReferenceEngine())
    gc.collect()  # or what other tests left may be closed meanwhile
    before = open_descriptors()
    descriptors = tuple(sealed_memfd("kv", PAGE) for _ in range(where.pop("files", 0)))
    ends = os.pipe() if where.pop("clock", None) else None
    report = fixture.map(shape=shape, clock=ends and ends[0], descriptors=descriptors, **where)
    assert report.error is not None
    if ends is not None:
        os.close(ends[1])
    until(lambda: open_descriptors() <= before, PATIENCE)  # a thread closes them
    fixture.close()


def open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
