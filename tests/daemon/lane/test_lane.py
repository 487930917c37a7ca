"""The lane's thread, over an engine whose pieces end when the test says so, and over real copies.

Nothing here sleeps: `settle` makes the lane go round until it has done all that it can do now, so
that "not submitted" is a fact and not a guess.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, count
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
from kvferry.daemon.engine import reference
from kvferry.daemon.engine.base import NO_ROOM, CopyEngine, Mapping, Room, Shared, Want
from kvferry.daemon.engine.memory import PAGE
from kvferry.daemon.engine.pool import HostPool
from kvferry.daemon.engine.reference import Faults, ReferenceEngine
from kvferry.daemon.lane import lane as lane_module
from kvferry.daemon.lane.courtesy import ENOUGH, MOMENT
from kvferry.daemon.lane.inbox import Listen
from kvferry.daemon.lane.lane import GIVEN_UP, PREPARED, STEP, Lane
from kvferry.daemon.lane.naps import LINK
from kvferry.daemon.lane.quay import MapOrder
from kvferry.proto.errors import Code, Failed, KVFerryError, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import Allocation, CudaAllocation, FdAllocation, Location
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import CalibrationPoint, CopyStatus, DeviceInfo, GroupCopying
from kvferry.shm.memfd import sealed_memfd
from kvferry.testing.books import NO_CARGO
from kvferry.testing.engine import until

STORE, LOAD = Direction.STORE, Direction.LOAD
PATIENCE = 20.0
"""Seconds after which a test gives up; nothing takes that long."""
NOBODY = 999
"""A registration that is never there: that it is gone is reported as soon as it is asked for."""


def layout(page: int, blocks: int = 64) -> KVLayout:
    return KVLayout((TensorLayout(blocks, page, page),), ((TensorRef(0, page),),))


SMALL = layout(64)
BIG, HUGE = 16 << 20, 1 << 36
SOME = 1 + math.ceil(ENOUGH * LINK / BIG)
"""Pieces as big: what is behind the first is enough to do."""


@dataclass(eq=False)
class Piece:
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
    """Takes pieces, and says of each what the test says of it. Its clock counts submissions."""

    info = DeviceInfo("cpu", "cpu", "stub")
    numa_node: int | None = None

    def __init__(self) -> None:
        self.piece = Room(1 << 40)
        """What a piece may be; how many at once in one direction:"""
        self.most = 4
        self.submitted: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self.in_flight: list[Piece] = []
        self.closed: list[Mapping] = []
        self.wants: list[tuple[Direction, Want]] = []
        self.pushes: list[tuple[Direction, bool]] = []
        self.wants_pushes: Callable[[], bool] = lambda: False
        """Whether one is wanted before more stores are submitted."""
        self.prepared: list[tuple[Direction, list[int]]] = []
        self.timed: list[tuple[list[int], list[int] | None]] = []
        """Blocks of the first piece of a plan that was timed, and of the one in flight before."""
        self.crowded = False
        """Whether there is no room for anything."""
        self.refusals: list[KVFerryError | None] = []
        """What the next submissions say: an error, or None where they work; empty: they work."""
        self.on_submit: Callable[[], object] = lambda: None
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens while the driver takes a store."""
        self.entered: list[int] = []
        self.submitters: list[int] = []
        """Threads that said they would submit, and those that did."""
        self._numbers = count()

    def attach(self, pool_address: int, aside: AbstractContextManager[None]) -> CopyStatus | None:
        self._aside = aside
        return None

    def pin(self, address: int, nbytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...

    def open(
        self,
        geometry: BlockLayout,
        allocations: Sequence[Allocation],
        locations: Sequence[Location],
        descriptors: Sequence[int],
    ) -> Mapping:
        return Mapping(geometry, np.zeros(len(locations), dtype=np.int64))

    def allocate(self, geometry: BlockLayout, kept: Sequence[int] = ()) -> Shared:
        raise Failed(Code.MAP_FAILED, "no memory")

    def enter(self) -> None:
        self.entered.append(threading.get_ident())

    def close(self, mapping: Mapping) -> None:
        assert not [piece for piece in self.in_flight if piece.mapping is mapping]
        assert mapping not in self.closed
        self.closed.append(mapping)

    def prepare(self, direction: Direction, mapping: Mapping, run: Extent) -> None:
        self.prepared.append((direction, run.gpu_blocks.tolist()))

    def full(self, direction: Direction) -> bool:
        return self.crowded

    def room(self, direction: Direction, mapping: Mapping, want: Want) -> Room:
        self.wants.append((direction, want))
        flying = [piece for piece in self.in_flight if piece.direction is direction]
        return self.piece if len(flying) < self.most else NO_ROOM

    def submit(self, direction: Direction, mapping: Mapping, run: Extent) -> Piece:
        assert 1 <= run.gpu_blocks.size <= self.piece.blocks
        assert run.gpu_blocks.size == 1 or mapping.geometry.nbytes((run,)) <= self.piece.nbytes
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        if direction is STORE:
            with self._aside:
                self.meanwhile()
        piece = Piece(direction, mapping, run, next(self._numbers))
        self.in_flight.append(piece)
        self.submitters.append(threading.get_ident())
        self.submitted.put(piece)
        self.on_submit()
        return piece

    def wants_push(self, direction: Direction) -> bool:
        return direction is STORE and self.wants_pushes()

    def push(self, direction: Direction, more: bool) -> bool:
        self.pushes.append((direction, more))
        return False

    def unsent(self, direction: Direction) -> int:
        return 0

    def poll(self, ticket: object) -> bool:
        assert isinstance(ticket, Piece)
        if ticket.done or ticket.error is not None:
            self.in_flight.remove(ticket)
        if ticket.error is not None:
            raise ticket.error
        return ticket.done

    def elapsed(self, first: object, last: object, after: object | None) -> float:
        assert isinstance(first, Piece)
        assert isinstance(last, Piece)
        assert not {first, last, after} & {*self.in_flight}
        self.timed.append((first.blocks, after.blocks if isinstance(after, Piece) else None))
        return 1.0 + last.number - first.number

    def copying(self, mapping: Mapping) -> tuple[GroupCopying, ...]:
        return (GroupCopying("direct", "staged"),)

    def shutdown(self) -> None: ...


@dataclass
class Harbour:
    """A lane at work, and what the core would have told it."""

    engine: CopyEngine
    pool: HostPool = field(default_factory=lambda: HostPool(1 << 16, 1 << 16))
    deaths: list[KVFerryError] = field(default_factory=list)
    expected: int = 0
    """Deaths that the test provokes."""
    begins: bool = False
    """Whether who posts begins transfers."""
    said: int = 0
    """By clients, and not heard yet."""
    told: int = 0
    """Ends that were reported."""
    between: Callable[[], object] = lambda: None
    """What happens where an order is left to go on with."""

    def __post_init__(self) -> None:
        self.pool.ready_bytes = self.pool.nbytes
        self.batches: queue.SimpleQueue[list[Report]] = queue.SimpleQueue()
        self.lane = Lane(self.engine, self.pool, self.take, self.died, lambda: self.said)
        self.geometries: dict[int, BlockLayout] = {}
        self.orderings: dict[int, HazardTracker] = {}
        self.serial = 0
        self.plans: dict[int, CopyPlan] = {}
        self.lane.start()
        if self.begins:
            self.lane.enter()

    def map(
        self, number: int = 1, shape: KVLayout = SMALL, *, clock: int | None = None, **where: Any
    ) -> TensorsMapped:
        """Map a registration; its own tensors unless locations=None says: allocate."""
        geometry = self.geometries[number] = BlockLayout(LayoutArrays.from_layout(shape), 0, 64)
        self.orderings[number] = HazardTracker(geometry.gpu_slots, 64)
        locations = where.get("locations", (Location(0, 0),) * len(shape.tensors))
        allocations = where.get("allocations", ())
        order = MapTensors(number, "session", geometry, allocations, locations, clock)
        self.lane.post(MapOrder(order, where.get("descriptors", ()), clock))
        (report,) = self.settle()
        assert isinstance(report, TensorsMapped)
        return report

    def map_large(self, number: int = 1, page: int = BIG) -> None:
        """A registration whose blocks are large pieces, in a pool as large: of no memory."""
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
            resolved.runs,
            geometry.nbytes(resolved.runs),
            wait_for,
            self.orderings[number].admit(self.serial, direction, resolved),
            geometry.end(resolved.runs),
            accepted,
            requires,
        )
        self.plans[plan.serial] = plan
        self.lane.post(StartTransfer(plan, "session", plan.serial, NO_CARGO))
        return self.serial

    def take(self, batch: list[Report]) -> None:
        """What is left of an order is posted again, as the core has it."""
        self.told += len(serials(batch))
        for report in batch:
            if isinstance(report, Continue):
                if isinstance(report.order, CancelTransfers):
                    self.between()
                self.lane.post(report.order)
        self.batches.put([report for report in batch if not _is_forget(report)])

    def died(self, error: KVFerryError) -> None:
        self.deaths.append(error)
        self.batches.put([])  # wakes who waits for a report

    def reports(self) -> list[Report]:
        """The next batch; at the lane's death there will be none."""
        batch = self.batches.get(timeout=PATIENCE)
        assert batch, self.deaths
        return batch

    def settle(self) -> list[Report]:
        """Let the lane do all that it can; what it reported meanwhile."""
        seen: list[Report] = []
        for _ in range(3):  # what one stream does may set the other free
            self.lane.post(UnmapTensors(NOBODY))
            while TensorsUnmapped(NOBODY) not in seen:
                seen += self.reports()
            seen.remove(TensorsUnmapped(NOBODY))
        return seen

    def asleep(self) -> None:
        """Wait until the lane has slept for long enough."""
        inbox = self.lane._inbox
        until(lambda: inbox.helm.free and inbox._rested())

    def close(self) -> None:
        self.lane.close()
        self.pool.close(self.engine)
        assert len(self.deaths) == self.expected


def _is_forget(report: Report) -> bool:
    """Such an order is between the lane and the core, and no test waits for it."""
    return isinstance(report, Continue) and isinstance(report.order, ForgetStores)


@pytest.fixture
def stub() -> StubEngine:
    return StubEngine()


@pytest.fixture
def harbour(stub: StubEngine) -> Iterator[Harbour]:
    harbour = Harbour(stub)
    yield harbour
    harbour.close()


def taken(stub: StubEngine) -> list[Piece]:
    """The pieces submitted since the last time."""
    pieces = []
    while not stub.submitted.empty():
        pieces.append(stub.submitted.get())
    return pieces


def finish(harbour: Harbour, *pieces: Piece) -> list[Report]:
    for piece in pieces:
        piece.done = True
    return harbour.settle()


def start_huge_store(harbour: Harbour, stub: StubEngine) -> int:
    """Two pieces of it are under way, and for the third there is no room."""
    stub.piece, stub.most = Room(HUGE), 2
    harbour.map()
    harbour.map_large(2, HUGE)
    store = harbour.start(STORE, range(3), number=2)
    harbour.settle()
    return store


def pushed_before_submits(harbour: Harbour, stub: StubEngine) -> list[list[tuple[Direction, bool]]]:
    """At each submit from now on, what was pushed so far. At the first a load is started."""
    pushed: list[list[tuple[Direction, bool]]] = []

    def note() -> None:
        pushed.append([*stub.pushes])
        if len(pushed) == 1:
            harbour.start(LOAD, [40])

    stub.on_submit = note
    return pushed


def run_out(harbour: Harbour, stub: StubEngine) -> list[Report]:
    """Finish everything there is, oldest first."""
    reports = harbour.settle()
    while stub.in_flight:
        reports += finish(harbour, stub.in_flight[0])
    return reports


def done(serial: int, seconds: float = 1.0) -> TransferCompleted:
    return TransferCompleted(serial, Outcome.DONE, seconds)


def cancelled(serial: int) -> TransferCompleted:
    return TransferCompleted(serial, Outcome.CANCELLED)


def serials(reports: Sequence[Report]) -> list[int]:
    return [report.serial for report in reports if isinstance(report, TransferCompleted)]


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    yield clock
    os.close(clock.descriptor)
    clock.page.close()


class Clock:
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
        """A descriptor for the lane to close."""
        return os.dup(self.descriptor)


ERROR = Failed(Code.DRIVER, "the device says no", 700)


def failed(serial: int) -> TransferCompleted:
    return TransferCompleted(serial, Outcome.FAILED, error=ERROR.info)


# Order


@pytest.mark.parametrize("direction", Direction)
def test_plans_of_one_direction_run_and_end_in_order(
    harbour: Harbour, stub: StubEngine, direction: Direction
) -> None:
    harbour.map()
    first, second = (harbour.start(direction, [block, block + 1]) for block in (0, 2))
    assert harbour.settle() == []
    one, two = taken(stub)
    assert (one.blocks, two.blocks, one.direction) == ([0, 1], [2, 3], direction)
    assert finish(harbour, two) == []
    assert finish(harbour, one) == [done(first), done(second)]
    assert stub.timed == [([0, 1], None), ([2, 3], [0, 1])]


def test_the_two_directions_overlap(harbour: Harbour, stub: StubEngine) -> None:
    harbour.map()
    harbour.start(STORE, [0])
    load = harbour.start(LOAD, [1])
    harbour.settle()
    store_piece, load_piece = sorted(taken(stub), key=lambda piece: piece.direction, reverse=True)
    assert (store_piece.direction, load_piece.direction) == (STORE, LOAD)
    assert finish(harbour, load_piece) == [done(load)]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("blocks", "hosts"), [([5], [1]), ([1], [5])], ids=["host block", "GPU block"]
)
def test_a_transfer_waits_for_the_other_direction_where_they_meet(
    harbour: Harbour, stub: StubEngine, direction: Direction, blocks: list[int], hosts: list[int]
) -> None:
    harbour.map()
    first = harbour.start(direction, [0, 1], [0, 1])
    second = harbour.start(direction, [2])
    meets = harbour.start(direction.other, blocks, hosts)
    harbour.settle()
    one, two = taken(stub)
    assert (one.direction, two.direction) == (direction, direction)
    assert finish(harbour, one) == [done(first)]
    (three,) = taken(stub)  # it need not wait for the second
    assert three.direction is direction.other
    assert sorted(serials(finish(harbour, two, three))) == [second, meets]


def test_a_plan_of_many_pieces_is_waited_for_to_its_end(harbour: Harbour, stub: StubEngine) -> None:
    stub.piece, stub.most = Room(64), 2
    harbour.map()
    store = harbour.start(STORE, [0, 1, 2, 3])
    load = harbour.start(LOAD, [9], [0])
    harbour.settle()
    for block in range(4):
        assert all(piece.direction is STORE for piece in stub.in_flight)
        assert stub.in_flight[0].blocks == [block]
        reports = finish(harbour, stub.in_flight[0])
    assert reports == [done(store, 4.0)]  # from the begin of the first to the end of the last
    assert serials(run_out(harbour, stub)) == [load]


def test_nothing_to_move_is_done_at_once(harbour: Harbour, stub: StubEngine) -> None:
    harbour.map()
    serial = harbour.start(STORE, [])
    assert harbour.settle() == [done(serial, 0.0)]
    assert taken(stub) == []


def test_nothing_to_move_ends_behind_what_was_submitted_before(
    harbour: Harbour, stub: StubEngine
) -> None:
    harbour.map()
    first, nothing = harbour.start(STORE, [0]), harbour.start(STORE, [])
    assert serials(harbour.settle()) == []
    assert serials(run_out(harbour, stub)) == [first, nothing]


def test_a_plan_that_fails_at_once_ends_behind_what_was_submitted_before(
    harbour: Harbour, stub: StubEngine
) -> None:
    harbour.map()
    stub.refusals += [None, ERROR]
    first, failing = harbour.start(STORE, [0]), harbour.start(STORE, [1])
    assert serials(harbour.settle()) == []
    assert serials(run_out(harbour, stub)) == [first, failing]


def test_what_is_over_behind_a_cancelled_plan_is_told_behind_it(
    harbour: Harbour, stub: StubEngine
) -> None:
    harbour.map()
    stub.refusals += [None, ERROR]
    first, failing = harbour.start(STORE, [0]), harbour.start(STORE, [1])
    nothing = harbour.start(STORE, [])
    harbour.settle()
    harbour.lane.post(CancelTransfers(1, (first,)))
    assert harbour.settle() == []
    ends = [cancelled(first), failed(failing), done(nothing, 0.0)]
    assert run_out(harbour, stub) == ends


# Fences


def test_a_plan_waits_for_the_timeline(harbour: Harbour, stub: StubEngine, clock: Clock) -> None:
    harbour.map(clock=clock.copy)
    clock.show(2)
    harbour.start(STORE, [0], wait_for=2)
    held, behind = harbour.start(STORE, [1], wait_for=3), harbour.start(STORE, [2])
    other_way = harbour.start(LOAD, [3])
    harbour.settle()
    assert sorted(piece.blocks for piece in taken(stub)) == [[0], [3]]
    assert other_way in serials(run_out(harbour, stub))
    clock.show(4)
    pieces = [stub.submitted.get(timeout=PATIENCE) for _ in range(2)]  # nobody woke the lane
    assert [piece.blocks for piece in pieces] == [[1], [2]]
    assert finish(harbour, *pieces) == [done(held), done(behind)]


def test_nothing_to_move_waits_for_the_timeline_too(
    harbour: Harbour, stub: StubEngine, clock: Clock
) -> None:
    harbour.map(clock=clock.copy)
    first, nothing = harbour.start(STORE, [0]), harbour.start(STORE, [], wait_for=1)
    assert serials(run_out(harbour, stub)) == [first]
    clock.show(1)
    assert harbour.settle() == [done(nothing, 0.0)]


def test_it_tells_since_when_the_oldest_go_and_since_when_engines_hold_theirs(
    harbour: Harbour, stub: StubEngine, clock: Clock
) -> None:
    """Who waits for one that is held is held; what has begun goes, whatever the page says now."""
    harbour.map(clock=clock.copy)
    harbour.map(2, clock=clock.copy)
    now = time.monotonic()
    harbour.lane.post(Listen(1.0))
    assert harbour.settle() == [Pong(1.0, None, None)]
    clock.show(1)
    begun = harbour.start(STORE, [1], number=2, wait_for=1, accepted=now - 60)
    harbour.start(STORE, [2], number=2, accepted=now - 30)
    harbour.settle()
    clock.show(0)
    harbour.start(STORE, [0], wait_for=1, accepted=now - 80)
    harbour.start(LOAD, [5], [0], accepted=now - 90)
    harbour.lane.post(Listen(2.0))
    assert harbour.settle() == [Pong(2.0, now - 60, now - 90)]
    (ended,) = finish(harbour, stub.in_flight[0])
    assert isinstance(ended, TransferCompleted)
    assert (ended.serial, ended.queued >= 60) == (begun, True)


def test_a_fence_holds_its_own_registration_alone(
    harbour: Harbour, stub: StubEngine, clock: Clock
) -> None:
    harbour.map(1, clock=clock.copy)
    harbour.map(2)
    harbour.start(STORE, [0], number=1, wait_for=1)
    free = harbour.start(STORE, [1], number=2)
    assert serials(run_out(harbour, stub)) == [free]


def test_a_plan_waits_for_the_part_of_the_pool_that_it_touches(
    harbour: Harbour, stub: StubEngine
) -> None:
    harbour.pool.ready_bytes = 3 * 64
    harbour.map()
    ready, not_ready = harbour.start(STORE, [0], [2]), harbour.start(STORE, [1], [3])
    assert serials(run_out(harbour, stub)) == [ready]
    harbour.pool.ready_bytes = 4 * 64
    assert serials(run_out(harbour, stub)) == [not_ready]


# Cancelling


def test_a_plan_that_waits_is_cancelled_at_once(
    harbour: Harbour, stub: StubEngine, clock: Clock
) -> None:
    harbour.map(clock=clock.copy)
    held = harbour.start(STORE, [0], wait_for=1)
    behind, after_it = harbour.start(STORE, [1]), harbour.start(LOAD, [5], [0])
    harbour.settle()
    harbour.lane.post(CancelTransfers(1, (held,)))
    assert harbour.settle() == [cancelled(held)]
    assert [piece.blocks for piece in taken(stub)] in ([[5], [1]], [[1], [5]])
    assert sorted(serials(run_out(harbour, stub))) == [behind, after_it]


def test_a_plan_that_runs_is_cancelled_within_a_piece(harbour: Harbour, stub: StubEngine) -> None:
    stub.piece, stub.most = Room(64), 2
    harbour.map()
    running, behind = harbour.start(STORE, range(10)), harbour.start(STORE, [20])
    harbour.settle()
    one, two = taken(stub)
    harbour.lane.post(CancelTransfers(1, (running,)))
    assert harbour.settle() == []  # its pieces are in flight, and there is no room
    assert finish(harbour, one) == []
    assert [piece.blocks for piece in taken(stub)] == [[20]]
    assert finish(harbour, two) == [cancelled(running)]
    assert serials(run_out(harbour, stub)) == [behind]


def test_who_waits_for_a_cancelled_plan_waits_for_its_pieces(
    harbour: Harbour, stub: StubEngine
) -> None:
    harbour.map()
    store = harbour.start(STORE, [0])
    load = harbour.start(LOAD, [1], [0])
    harbour.settle()
    harbour.lane.post(CancelTransfers(1, (store,)))
    assert harbour.settle() == []
    (piece,) = taken(stub)
    assert piece.direction is STORE
    assert serials(finish(harbour, piece)) == [store]
    assert serials(run_out(harbour, stub)) == [load]


def test_an_engine_that_revokes_its_timeline_has_given_up_all_its_jobs(
    harbour: Harbour, stub: StubEngine, clock: Clock
) -> None:
    """No piece begins any more, and what one under way brings does not count."""
    harbour.map(clock=clock.copy)
    stub.most = 1
    first, second = harbour.start(STORE, [1]), harbour.start(STORE, [2])
    harbour.settle()
    clock.revoke()
    (ended,) = [r for r in finish(harbour, stub.in_flight[0]) if isinstance(r, TransferCompleted)]
    assert (ended.serial, ended.outcome) == (first, Outcome.CANCELLED)
    harbour.settle()
    assert not stub.in_flight
    harbour.lane.post(UnmapTensors(1))
    assert serials(harbour.settle()) == [second]


@pytest.mark.parametrize("dies", [False, True], ids=["cancels", "dies"])
def test_who_gives_up_very_many_keeps_nobody_waiting(
    harbour: Harbour, stub: StubEngine, dies: bool
) -> None:
    """Some at a time; and once its engine has died nothing more of it is submitted."""
    harbour.map()
    harbour.map(2)
    stub.crowded = True
    held = [harbour.start(STORE, [1]) for _ in range(5 * GIVEN_UP)]
    harbour.settle()
    stub.crowded = False
    told: list[tuple[Direction, int]] = []
    stub.on_submit = lambda: told.append((stub.in_flight[-1].direction, harbour.told))
    loads: list[int] = []

    def load() -> None:
        if not loads:
            loads.append(harbour.start(LOAD, [1], number=2))

    harbour.between = load
    harbour.lane.post(UnmapTensors(1) if dies else CancelTransfers(1, tuple(reversed(held))))
    ended = serials(run_out(harbour, stub))
    assert sorted(ended) == sorted([*held, *loads])
    (before,) = [count for direction, count in told if direction is LOAD]
    assert before <= 2 * GIVEN_UP
    assert dies == (STORE not in dict(told))
    assert len(stub.closed) == dies


@pytest.mark.parametrize(
    "order", [CancelTransfers(1, (1,)), CancelTransfers(1, (77,)), CancelTransfers(NOBODY, (1,))]
)
def test_a_cancel_that_comes_too_late_is_ignored(
    harbour: Harbour, stub: StubEngine, order: CancelTransfers
) -> None:
    harbour.map()
    harbour.start(STORE, [0])
    assert serials(run_out(harbour, stub)) == [1]
    harbour.lane.post(order)
    assert harbour.settle() == []


def test_a_cancel_comes_once_however_often_it_is_asked_for(
    harbour: Harbour, stub: StubEngine
) -> None:
    harbour.map()
    harbour.start(STORE, [0])
    harbour.settle()
    for _ in range(3):
        harbour.lane.post(CancelTransfers(1, (1,)))
    assert harbour.settle() == []
    assert finish(harbour, *taken(stub)) == [cancelled(1)]


# Failures


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_load_is_not_copied_if_a_store_that_it_requires(
    harbour: Harbour, stub: StubEngine, how: str
) -> None:
    """A store of block 0 completes, the next of block 1 does not; loads of both wait for them."""
    harbour.map()
    good, bad = (harbour.start(STORE, [block]) for block in (0, 1))
    loads = [
        harbour.start(LOAD, [block], [block - 4], requires=(store,))
        for block, store in ((4, good), (5, bad))
    ]
    first, second = stub.submitted.get(), stub.submitted.get()
    first.done = True
    if how == "fails":
        second.error = Failed(Code.COPY_FAILED, "broken")
    else:
        harbour.lane.post(CancelTransfers(1, (bad,)))
        second.done = True
    copied = stub.submitted.get(timeout=PATIENCE)
    assert (copied.direction, copied.blocks) == (LOAD, [4])
    copied.done = True
    ends = {one.serial: one for one in harbour.settle() if isinstance(one, TransferCompleted)}
    assert ends[loads[0]].outcome is Outcome.DONE
    refused = ends[loads[1]]
    assert refused.outcome is Outcome.FAILED
    assert refused.error is not None
    assert refused.error.code == Code.STALE
    assert stub.submitted.empty()


def test_a_load_that_comes_right_after_the_end_of_its_store_is_not_copied(
    harbour: Harbour, stub: StubEngine
) -> None:
    """The core planned it before it heard of that end."""
    harbour.map()
    late: list[int] = []

    def plan_a_load(batch: list[Report]) -> None:
        if not late and any(isinstance(one, TransferCompleted) for one in batch):
            late.append(harbour.start(LOAD, [4], [0], requires=(1,)))

    take = harbour.take
    harbour.lane._report = lambda batch: (plan_a_load(batch), take(batch))  # type: ignore[assignment, func-returns-value]
    harbour.start(STORE, [0])
    stub.submitted.get().error = Failed(Code.COPY_FAILED, "broken")
    ends = {one.serial: one for one in harbour.settle() if isinstance(one, TransferCompleted)}
    assert ends[late[0]].error is not None
    assert stub.submitted.empty()
    berth = harbour.lane._berths[1]
    assert not berth.failed_stores


def test_a_piece_that_cannot_be_submitted_fails_its_plan_alone(
    harbour: Harbour, stub: StubEngine
) -> None:
    harbour.map()
    stub.refusals.append(ERROR)
    failing, fine = harbour.start(STORE, [0]), harbour.start(STORE, [1])
    assert run_out(harbour, stub) == [failed(failing), done(fine)]


def test_a_later_piece_that_cannot_be_submitted_fails_the_plan_once(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.refusals = Room(64), [None, ERROR]
    harbour.map()
    failing, fine = harbour.start(STORE, range(5)), harbour.start(STORE, [9])
    assert harbour.settle() == []  # the first piece may still write
    assert [piece.blocks for piece in stub.in_flight] == [[0], [9]]
    assert run_out(harbour, stub) == [failed(failing), done(fine)]


def test_a_piece_that_fails_on_the_device_fails_its_plan_once(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.most = Room(64), 2
    harbour.map()
    failing, fine = harbour.start(STORE, range(5)), harbour.start(STORE, [9])
    harbour.settle()
    one, two = taken(stub)
    one.error = ERROR
    assert harbour.settle() == []  # its second piece may still write
    assert [piece.blocks for piece in taken(stub)] == [[9]]
    two.error = Failed(Code.COPY_FAILED, "the first reason counts")
    assert harbour.settle() == [failed(failing)]
    assert run_out(harbour, stub) == [done(fine)]


def test_a_plan_whose_only_piece_in_flight_fails_ends_with_pieces_left(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.most = Room(64), 1
    harbour.map()
    failing, fine = harbour.start(STORE, range(5)), harbour.start(STORE, [9])
    harbour.settle()
    stub.in_flight[0].error = ERROR
    assert harbour.settle() == [failed(failing)]
    assert run_out(harbour, stub) == [done(fine)]


def test_a_cancelled_plan_that_fails_is_cancelled(harbour: Harbour, stub: StubEngine) -> None:
    harbour.map()
    serial = harbour.start(STORE, [0])
    harbour.settle()
    harbour.lane.post(CancelTransfers(1, (serial,)))
    harbour.settle()
    stub.in_flight[0].error = ERROR
    assert harbour.settle() == [cancelled(serial)]


def test_a_plan_whose_time_cannot_be_told_ends_all_the_same(
    harbour: Harbour, stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elapsed(*_: object) -> float:
        raise ERROR

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(stub, "elapsed", elapsed)
    harbour.map()
    plans = [harbour.start(STORE, [block]) for block in (0, 1)]
    assert serials(run_out(harbour, stub)) == plans


@pytest.mark.parametrize("begins", [False, True])
def test_an_engine_that_breaks_ends_the_lane_and_says_so(
    stub: StubEngine, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had the helm."""
    raised, submit = threading.Event(), stub.submit

    def breaks(*_: object) -> Piece:
        monkeypatch.setattr(stub, "submit", submit)  # once: what it left is in no order
        return cast(Piece, [].pop())

    monkeypatch.setattr(threading, "excepthook", lambda _: raised.set())
    monkeypatch.setattr(stub, "submit", breaks)
    harbour = Harbour(stub, begins=begins, expected=1)
    harbour.map()
    harbour.asleep()
    harbour.start(STORE, [0])
    assert raised.wait(PATIENCE)
    assert "IndexError" in harbour.deaths[0].message
    harbour.close()


@pytest.mark.parametrize("error", [Refused(Code.NO_DEVICE, "no device"), RuntimeError("no")])
def test_a_device_that_does_not_come_up_is_told_at_the_start(
    stub: StubEngine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(*_: object) -> CopyStatus | None:
        raise error

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(stub, "attach", attach)
    with pytest.raises(type(error), match="no"):
        Harbour(stub)


def test_at_its_end_it_lets_go_of_what_it_held_and_of_the_device(
    stub: StubEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []
    held = clock.copy
    where = f"/proc/self/fd/{held}"
    monkeypatch.setattr(stub, "shutdown", lambda: there.append(os.path.lexists(where)))
    harbour = Harbour(stub)
    harbour.lane.hold(5, held)
    harbour.close()
    assert there == [False]


# Unmapping


def test_unmapping_ends_everything_once_and_closes_behind_the_last_piece(
    harbour: Harbour, stub: StubEngine, clock: Clock
) -> None:
    harbour.map(1, clock=clock.copy)
    harbour.map(2)
    running = {harbour.start(STORE, [0]), harbour.start(STORE, [1]), harbour.start(LOAD, [2])}
    waiting = {
        harbour.start(STORE, [3], wait_for=1),
        harbour.start(LOAD, [4], [0]),
        harbour.start(LOAD, [5]),
    }
    harbour.settle()
    pieces = taken(stub)
    assert len(pieces) == 3
    other = harbour.start(STORE, [0], number=2)
    harbour.lane.post(UnmapTensors(1))
    reports = harbour.settle()
    assert set(serials(reports)) == waiting
    assert stub.closed == []
    reports += finish(harbour, *pieces[:2])
    assert stub.closed == []
    assert TensorsUnmapped(1) not in reports
    reports += finish(harbour, pieces[2])
    assert stub.closed == [pieces[0].mapping]
    assert reports[-1] == TensorsUnmapped(1)
    ended = [report for report in reports if isinstance(report, TransferCompleted)]
    assert sorted(serials(ended)) == sorted(running | waiting)
    assert {report.outcome for report in ended} == {Outcome.CANCELLED}
    assert serials(run_out(harbour, stub)) == [other]


def test_a_number_that_was_unmapped_can_come_again(harbour: Harbour, stub: StubEngine) -> None:
    for _ in range(2):
        harbour.map(1)
        serial = harbour.start(STORE, [0])
        assert serials(run_out(harbour, stub)) == [serial]
        harbour.lane.post(UnmapTensors(1))
        assert harbour.settle() == [TensorsUnmapped(1)]
    assert len(stub.closed) == 2


def test_what_cannot_be_mapped_is_told_and_can_be_unmapped(harbour: Harbour) -> None:
    assert harbour.map(locations=None) == TensorsMapped(
        1, "session", Failed(Code.MAP_FAILED, "no memory").info
    )
    harbour.lane.post(UnmapTensors(1))
    assert harbour.settle() == [TensorsUnmapped(1)]


@pytest.mark.parametrize("works", [True, False])
def test_descriptors_of_a_map_order_are_closed(harbour: Harbour, clock: Clock, works: bool) -> None:
    given, time = os.dup(clock.descriptor), clock.copy
    where: dict[str, Any] = {} if works else {"locations": None}
    report = harbour.map(clock=time, descriptors=(given,), **where)
    assert (report.error is None) == works
    for descriptor in (given, time):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_an_unsealed_timeline_is_refused(harbour: Harbour) -> None:
    descriptor = os.memfd_create("timeline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE)
    error = harbour.map(clock=descriptor).error
    assert error is not None
    assert error.code == Code.NOT_SHAREABLE


# Many


def test_registrations_take_turns_piece_by_piece(harbour: Harbour, stub: StubEngine) -> None:
    stub.piece, stub.most = Room(64), 1
    for number in (1, 2, 3):
        harbour.map(number)
    harbour.start(STORE, [60], number=3)
    harbour.settle()  # there is no room until all plans stand behind it
    plans = [harbour.start(STORE, range(4 - n), number=n) for n in (1, 2, 3)]
    harbour.settle()
    geometries = {geometry: number for number, geometry in harbour.geometries.items()}
    order: list[tuple[int, int]] = []
    reports: list[Report] = []
    while stub.in_flight:
        piece = stub.in_flight[0]
        order.append((geometries[piece.mapping.geometry], piece.blocks[0]))
        reports += finish(harbour, piece)
    assert order[0] == (3, 60)
    turns = [number for number, _ in order[1:]]
    assert sorted(turns[:3]) == [1, 2, 3]
    assert sorted(turns[3:5]) == [1, 2]
    assert turns[5:] == [1]
    assert [block for number, block in order if number == 1] == [0, 1, 2]
    assert sorted(serials(reports)[1:]) == plans


def test_a_load_goes_before_stores_that_are_not_submitted_yet(
    harbour: Harbour, stub: StubEngine
) -> None:
    """It comes while the lane submits the first of many stores."""
    stub.piece, stub.most = Room(64), 100
    harbour.map()
    load: list[int] = []

    def once() -> None:
        if not load:
            load.append(harbour.start(LOAD, [40]))

    stub.on_submit = once
    harbour.start(STORE, range(8))
    reports = run_out(harbour, stub)
    order = [piece.direction for piece in taken(stub)]
    assert order == [STORE, LOAD] + [STORE] * 7
    assert sorted(serials(reports)) == [1, 2]


def test_a_load_goes_before_the_engine_is_told_that_a_round_of_stores_is_over(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.most = Room(64), 100
    harbour.map()
    pushed = pushed_before_submits(harbour, stub)
    harbour.start(STORE, [0])
    assert sorted(serials(run_out(harbour, stub))) == [1, 2]
    assert pushed[1] == pushed[0]


def test_a_short_load_that_ends_makes_no_room_for_large_stores(
    harbour: Harbour, stub: StubEngine
) -> None:
    """Others of them will, and then it is asked for again."""
    store = start_huge_store(harbour, stub)
    load = harbour.start(LOAD, [40])
    until(lambda: len(stub.in_flight) == 3, PATIENCE)
    stub.wants.clear()
    stub.in_flight[2].done = True
    assert serials(harbour.reports()) == [load]
    time.sleep(20 * MOMENT)
    assert not stub.wants
    stub.in_flight[0].done = True
    until(lambda: (STORE, Want(0, HUGE, False)) in stub.wants, PATIENCE)
    assert serials(run_out(harbour, stub)) == [store]


def test_the_engine_is_pushed_once_beside_a_load_while_stores_have_enough_to_do(
    harbour: Harbour, stub: StubEngine
) -> None:
    store = start_huge_store(harbour, stub)
    stub.pushes.clear()
    load = harbour.start(LOAD, [40])
    until(lambda: len(stub.in_flight) == 3, PATIENCE)
    time.sleep(20 * MOMENT)
    assert stub.pushes.count((STORE, True)) <= 1
    assert sorted(serials(run_out(harbour, stub))) == [store, load]


def test_an_end_is_told_before_more_large_stores_begin(harbour: Harbour, stub: StubEngine) -> None:
    stub.piece, stub.most = Room(BIG), 2
    harbour.map_large()
    load, store = harbour.start(LOAD, [40]), harbour.start(STORE, [1, 2, 3])
    harbour.settle()
    told: list[list[Report]] = []
    stub.on_submit = lambda: told.append(harbour.batches.get_nowait())
    loaded, stored, _ = stub.in_flight
    stored.done = loaded.done = True
    until(lambda: len(told) == 1, PATIENCE)
    assert told == [[done(load)]]
    stub.on_submit = lambda: None
    assert serials(run_out(harbour, stub)) == [store]


def test_large_stores_that_have_enough_to_do_wait_for_a_short_load(
    harbour: Harbour, stub: StubEngine
) -> None:
    """One more goes when less is left, and all when the load is done."""
    stub.piece, stub.most = Room(BIG), SOME
    harbour.map()
    harbour.map_large(2)
    load, store = harbour.start(LOAD, [40]), harbour.start(STORE, range(6), number=2)
    harbour.settle()
    stub.most = 100
    harbour.settle()
    assert [piece.direction for piece in stub.in_flight] == [LOAD, *[STORE] * SOME]
    stub.in_flight[1].done = True
    until(
        lambda: [piece.blocks for piece in stub.in_flight[1:]] == [[n] for n in range(1, SOME + 1)],
        PATIENCE,
    )
    harbour.settle()
    assert len(stub.in_flight) == 1 + SOME
    stub.in_flight[0].done = True
    until(lambda: [piece.direction for piece in stub.in_flight] == [STORE] * 5, PATIENCE)
    assert sorted(serials(run_out(harbour, stub))) == [load, store]


def test_stores_that_have_enough_to_do_wait_for_what_was_said(
    harbour: Harbour, stub: StubEngine
) -> None:
    """For a moment: it may be heard late, or never. The lane lets in who has heard a load."""
    stub.piece, stub.most = Room(BIG), SOME
    harbour.map_large()
    store = harbour.start(STORE, range(SOME + 8))
    harbour.settle()
    waits = list[int]()
    inbox = cast(Any, harbour.lane)._inbox
    wait = inbox.wait

    def note(patience: float | None, *, let_in: bool = False) -> None:
        if let_in:
            waits.append(len(stub.in_flight))
        wait(patience, let_in=let_in)

    def let_in(more: int) -> None:
        stub.most += more
        harbour.lane.post(UnmapTensors(NOBODY))
        until(lambda: len(stub.in_flight) == stub.most, PATIENCE)

    inbox.wait = note
    stub.on_submit = lambda: setattr(harbour, "said", harbour.said + 1)
    let_in(3)
    until(lambda: {*waits} == {SOME + 1, SOME + 2, SOME + 3}, PATIENCE)
    stub.on_submit = lambda: None
    let_in(5)
    assert serials(run_out(harbour, stub)) == [store]


def test_a_round_of_large_stores_is_one_though_the_lane_sleeps_in_it(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.most = Room(BIG), 100
    harbour.map_large()
    harbour.settle()
    pushed = len(stub.pushes)
    stores: list[list[tuple[Direction, bool]]] = []
    stub.on_submit = lambda: stores.append([push for push in stub.pushes[pushed:] if STORE in push])
    store = harbour.start(STORE, range(3 * STEP))
    until(lambda: len(stub.in_flight) == 3 * STEP, PATIENCE)
    assert stores == [[]] * 3 * STEP
    until(lambda: stub.pushes[-1:] == [(STORE, False)], PATIENCE)
    assert serials(run_out(harbour, stub)) == [store]


def test_stores_go_on_though_orders_never_end(harbour: Harbour, stub: StubEngine) -> None:
    """A piece of theirs for each time that the lane goes round."""
    stub.piece, stub.most = Room(64), 100
    harbour.map()
    stub.on_submit = lambda: harbour.lane.post(UnmapTensors(NOBODY))
    store = harbour.start(STORE, range(8))
    until(lambda: len(stub.in_flight) == 8, PATIENCE)
    stub.on_submit = lambda: None
    assert serials(run_out(harbour, stub)) == [store]


def test_no_more_is_submitted_than_the_engine_has_room_for(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.most = Room(1 << 20, blocks=2), 3
    harbour.map()
    plan = harbour.start(STORE, range(10))
    small = [harbour.start(STORE, [block]) for block in range(20, 24)]
    harbour.settle()
    pieces: list[list[int]] = []
    reports: list[Report] = []
    while stub.in_flight:
        assert len(stub.in_flight) == min(3, 9 - len(pieces))
        pieces.append(stub.in_flight[0].blocks)
        reports += finish(harbour, stub.in_flight[0])
    assert pieces == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [20], [21], [22], [23]]
    assert serials(reports) == [plan, *small]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("large", [False, True])
def test_room_that_one_direction_leaves_the_other_takes(
    harbour: Harbour, stub: StubEngine, direction: Direction, large: bool
) -> None:
    """Nothing else happens meanwhile that could have it tried again."""
    if large:
        harbour.map_large()
    else:
        harbour.map()
    for number, way in enumerate((direction, direction.other)):
        if large or way is direction:
            harbour.start(way, [number])
    harbour.settle()
    first, *_ = [piece for piece in taken(stub) if piece.direction is direction]
    stub.crowded = True
    refused = harbour.start(direction.other, [9])
    harbour.settle()
    stub.crowded = False
    first.done = True
    assert stub.submitted.get(timeout=PATIENCE).blocks == [9]
    assert refused in serials(run_out(harbour, stub))


@pytest.mark.parametrize("how", ["cancel", "start"])
def test_what_found_no_room_is_tried_again_when_another_is_given_up_or_comes(
    harbour: Harbour, stub: StubEngine, how: str
) -> None:
    harbour.map()
    stub.crowded = True
    first, second = harbour.start(STORE, [0]), harbour.start(STORE, [1])
    harbour.settle()
    stub.crowded = False
    if how == "cancel":
        harbour.lane.post(CancelTransfers(1, (first,)))
    else:
        harbour.start(STORE, [2])
    assert stub.submitted.get(timeout=PATIENCE).blocks == [int(how == "cancel")]
    assert second in serials(run_out(harbour, stub))


def test_the_engine_is_told_that_a_round_is_over_and_whether_more_waits_for_room(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.most = Room(1 << 20, blocks=2), 2
    harbour.map()
    harbour.settle()
    assert not stub.pushes
    harbour.start(STORE, range(6))
    harbour.settle()
    assert stub.pushes[-1] == (STORE, True)
    finish(harbour, stub.in_flight[0])
    assert stub.pushes[-1] == (STORE, False)
    assert (LOAD, False) not in stub.pushes


def test_the_engine_is_pushed_before_more_is_submitted_where_it_wants_that(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.most = Room(64), 100
    harbour.map()
    stub.wants_pushes = lambda: len(stub.in_flight) in {1, 3} and len(stub.pushes) < 2
    pushed: list[int] = []
    stub.on_submit = lambda: pushed.append(len(stub.pushes))
    harbour.start(STORE, range(5))
    harbour.settle()
    assert pushed == [0, 2, 2, 2, 2]
    assert stub.pushes[:2] == [(STORE, True)] * 2
    run_out(harbour, stub)


def test_a_piece_and_the_push_that_it_wants_are_two_steps(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.most = Room(64), 100
    harbour.map()
    stub.wants_pushes = lambda: bool(stub.in_flight) and (STORE, True) not in stub.pushes
    pushed = pushed_before_submits(harbour, stub)
    harbour.start(STORE, range(3))
    run_out(harbour, stub)
    assert [(STORE, True) in so_far for so_far in pushed] == [False, False, True, True]


@pytest.mark.parametrize("begins", [False, True])
def test_what_a_large_plan_needs_is_ready_before_the_lane_has_it(
    stub: StubEngine, begins: bool
) -> None:
    """Of every one, whatever the lane does meanwhile."""
    harbour, seen = Harbour(stub, begins=begins), list[list[int]]()
    stub.on_submit = lambda: seen.append([blocks[0] for _, blocks in stub.prepared])
    harbour.map_large(page=PREPARED)
    large = [harbour.start(STORE, [2 * number, 2 * number + 1]) for number in range(20)]
    harbour.start(STORE, [60])  # which is not
    assert [blocks for _, blocks in stub.prepared] == [[2 * n, 2 * n + 1] for n in range(20)]
    assert len(run_out(harbour, stub)) == len(large) + 1
    assert all(0 in blocks for blocks in seen)
    harbour.close()


def test_what_is_not_there_is_not_made_ready(harbour: Harbour, stub: StubEngine) -> None:
    harbour.map_large(page=PREPARED)
    harbour.start(STORE, [1, 2])
    assert len(stub.prepared) == 1
    run_out(harbour, stub)
    harbour.lane.post(UnmapTensors(1))
    harbour.settle()
    harbour.lane._prepare(harbour.plans[1])
    assert len(stub.prepared) == 1


def test_an_engine_that_has_enough_is_not_asked_for_room(
    harbour: Harbour, stub: StubEngine
) -> None:
    harbour.map()
    stub.crowded = True
    plan = harbour.start(STORE, range(2))
    harbour.settle()
    assert stub.wants == []
    assert stub.pushes[-1] == (STORE, True)
    stub.crowded = False
    harbour.settle()
    assert stub.pushes[-1] == (STORE, False)
    assert serials(finish(harbour, stub.in_flight[0])) == [plan]


def test_the_engine_is_told_what_is_wanted_and_whether_alone(
    harbour: Harbour, stub: StubEngine
) -> None:
    stub.piece, stub.most = Room(128), 1
    harbour.map()
    harbour.start(STORE, range(5))
    harbour.settle()
    assert set(stub.wants) == {(STORE, Want(0, 5 * 64, False)), (STORE, Want(0, 3 * 64, False))}
    harbour.start(LOAD, [9])
    harbour.start(LOAD, [10])
    harbour.settle()
    stub.wants.clear()
    harbour.settle()
    assert set(stub.wants) == {(LOAD, Want(0, 64, True)), (STORE, Want(0, 3 * 64, True))}


def test_what_a_calibration_found_is_reported_first(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CopyStatus("auto", CalibrationPoint(1, 1.0, 1.0), (), 1, 1)
    monkeypatch.setattr(stub, "attach", lambda *_: found)
    harbour = Harbour(stub)
    assert harbour.settle() == [CopyCalibrated(found)]
    harbour.close()


# Who posts begins

ME = threading.get_ident()


@pytest.fixture
def manned(stub: StubEngine) -> Iterator[Harbour]:
    """A harbour whose thread that posts begins transfers."""
    harbour = Harbour(stub, begins=True)
    harbour.map()
    harbour.asleep()
    yield harbour
    harbour.close()


def test_who_posts_begins_while_the_lane_sleeps_and_that_goes_on(
    manned: Harbour, stub: StubEngine
) -> None:
    stub.piece = Room(64)
    manned.start(STORE, [1, 2, 3])
    assert stub.entered == [ME]
    assert stub.submitters[0] == ME
    assert stub.submitted.get().blocks == [1]
    manned.settle()
    assert ME not in stub.submitters[1:]
    assert len(stub.submitters) == 3
    assert serials(run_out(manned, stub)) == [1]


def test_both_directions_are_begun_so_and_a_job_of_one_piece_is_pushed(
    manned: Harbour, stub: StubEngine
) -> None:
    for direction in Direction:
        stub.pushes.clear()
        manned.start(direction, [int(direction is LOAD)])
        assert (direction, False) in stub.pushes
        assert len(run_out(manned, stub)) == 1
        manned.asleep()
    assert stub.submitters == [ME, ME]


def test_what_is_behind_another_is_left_to_the_lane(
    manned: Harbour, stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "LINK", 64.0)  # the first takes a second: the lane sleeps long
    manned.start(STORE, [1])
    manned.asleep()
    manned.start(STORE, [2])
    manned.settle()
    assert stub.submitters[0] == ME
    assert ME not in stub.submitters[1:]
    assert serials(run_out(manned, stub)) == [1, 2]


def test_what_a_fence_holds_is_left_to_the_lane(
    manned: Harbour, stub: StubEngine, clock: Clock
) -> None:
    manned.map(2, clock=clock.copy)
    manned.asleep()
    manned.start(STORE, [1], number=2, wait_for=5)
    assert not stub.submitters
    clock.show(5)
    until(lambda: bool(stub.submitters))
    assert ME not in stub.submitters
    assert serials(run_out(manned, stub)) == [1]


def test_what_the_engine_refuses_at_the_beginning_fails(manned: Harbour, stub: StubEngine) -> None:
    stub.refusals.append(ERROR)
    manned.start(LOAD, [1])
    (end,) = [report for report in manned.settle() if isinstance(report, TransferCompleted)]
    assert (end.outcome, end.error) == (Outcome.FAILED, ERROR.info)


@pytest.fixture
def storing(manned: Harbour, stub: StubEngine) -> Iterator[threading.Event]:
    """The lane has given the driver a store of block 1, which takes it until this is set."""
    begun, over = threading.Event(), threading.Event()

    def take_long() -> None:
        stub.meanwhile = lambda: None
        begun.set()
        assert over.wait(PATIENCE)

    stub.meanwhile = take_long
    poster = threading.Thread(target=manned.start, args=[STORE, [1]])
    poster.start()
    poster.join()
    assert begun.wait(PATIENCE)
    yield over
    over.set()


def test_a_load_begins_while_the_driver_takes_a_store(
    manned: Harbour, stub: StubEngine, storing: threading.Event
) -> None:
    manned.start(LOAD, [5])
    assert (stub.submitters, stub.submitted.get().blocks) == ([ME], [5])
    assert (LOAD, False) in stub.pushes
    storing.set()
    assert sorted(serials(run_out(manned, stub))) == [1, 2]


def test_a_store_does_not_begin_while_the_driver_takes_another(
    manned: Harbour, stub: StubEngine, storing: threading.Event
) -> None:
    manned.start(STORE, [2])
    manned.start(STORE, [3])
    assert stub.submitted.empty()
    storing.set()
    assert serials(run_out(manned, stub)) == [1, 2, 3]
    assert ME not in stub.submitters


def test_a_load_that_has_to_wait_for_that_store_waits(
    manned: Harbour, stub: StubEngine, storing: threading.Event
) -> None:
    manned.start(LOAD, [5], [1])
    assert stub.submitted.empty()
    storing.set()
    assert serials(run_out(manned, stub)) == [1, 2]


def test_who_begins_a_store_does_not_lend_the_helm_on(manned: Harbour, stub: StubEngine) -> None:
    helm, seen = manned.lane._inbox.helm, list[tuple[bool, bool]]()
    stub.meanwhile = lambda: seen.append((helm.lent, helm.free))
    manned.start(STORE, [1])
    assert seen == [(False, False)]
    assert stub.submitters == [ME]


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
    st.sampled_from([Room(1 << 30), Room(64), Room(1 << 30, 2)]),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_whatever_happens_every_plan_ends_once_and_in_order(
    history: list[tuple[Any, ...]], room: Room, most: int, unmapped: bool, begins: bool
) -> None:
    stub = StubEngine()
    stub.piece, stub.most = room, most
    harbour = Harbour(stub, begins=begins)
    harbour.map()
    plans: dict[int, tuple[Direction, list[int]]] = {}
    ended: list[TransferCompleted] = []
    for event in history:
        match event:
            case "start", direction, blocks, hosts:
                serial = harbour.start(direction, blocks, hosts[: len(blocks)])
                plans[serial] = direction, blocks
            case ("refuse",):
                stub.refusals.append(ERROR)
            case "abandon", number:
                harbour.lane.post(CancelTransfers(1, (number + 1,)))
            case verb, number if number < len(stub.in_flight):
                piece = stub.in_flight[number]
                piece.done, piece.error = verb == "finish", None if verb == "finish" else ERROR
        ended += [report for report in harbour.settle() if isinstance(report, TransferCompleted)]
        check_apart(stub.in_flight)
    stub.refusals.clear()
    if unmapped:
        harbour.lane.post(UnmapTensors(1))
    ended += [report for report in run_out(harbour, stub) if isinstance(report, TransferCompleted)]
    harbour.close()
    pieces = taken(stub)
    assert sorted(serials(ended)) == sorted(plans)
    assert len(stub.closed) == unmapped
    for direction in Direction:
        mine = [end for end in ended if plans[end.serial][0] is direction]
        told = [end.serial for end in mine if end.outcome is not Outcome.CANCELLED]
        assert told == sorted(told)
        submitted = [p.blocks for p in pieces if p.direction is direction]
        if {end.outcome for end in mine} <= {Outcome.DONE}:  # then nothing is left out
            assert [*chain(*submitted)] == [*chain(*(plans[serial][1] for serial in told))]


def check_apart(pieces: Sequence[Piece]) -> None:
    """No two pieces in flight, one each way, touch the same block on either side."""
    for store in (piece for piece in pieces if piece.direction is STORE):
        for load in (piece for piece in pieces if piece.direction is LOAD):
            assert not set(store.blocks) & set(load.blocks)
            assert not {*store.run.host_offsets.tolist()} & {*load.run.host_offsets.tolist()}


# Real copies


@dataclass
class Pier:
    """A registration that the reference engine allocated, and its bytes: (block, byte) arrays."""

    harbour: Harbour
    gpu: np.ndarray[Any, np.dtype[np.uint8]]
    host: np.ndarray[Any, np.dtype[np.uint8]]


BYTES = 64


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def pier(faults: Faults) -> Iterator[Pier]:
    harbour = Harbour(ReferenceEngine(faults))
    report = harbour.map(locations=None)
    (descriptor,), (location,) = report.descriptors, report.locations
    memory = mmap.mmap(descriptor, 64 * BYTES)
    os.close(descriptor)
    assert location == Location(0, 0)
    gpu = np.frombuffer(memory, dtype=np.uint8).reshape(64, BYTES)
    pool: Any = (ctypes.c_ubyte * (64 * BYTES)).from_address(harbour.pool.address)
    random = np.random.default_rng(3)
    gpu[:] = random.integers(0, 256, gpu.shape, dtype=np.uint8)
    yield Pier(harbour, gpu, np.frombuffer(pool, dtype=np.uint8).reshape(64, BYTES))
    harbour.close()


def wait_for(harbour: Harbour, *wanted: int) -> dict[int, TransferCompleted]:
    """Until all of these have ended."""
    ended: dict[int, TransferCompleted] = {}
    while not ended.keys() >= set(wanted):
        ended |= {r.serial: r for r in harbour.reports() if isinstance(r, TransferCompleted)}
    return ended


def test_bytes_arrive_where_they_should_and_nowhere_else(pier: Pier) -> None:
    before, host = pier.gpu.copy(), pier.host.copy()
    store = pier.harbour.start(STORE, [3, 0, 7], [5, 6, 0])
    load = pier.harbour.start(LOAD, [20, 21], [0, 5])
    ended = wait_for(pier.harbour, store, load)
    assert {r.outcome for r in ended.values()} == {Outcome.DONE}
    host[[5, 6, 0]] = before[[3, 0, 7]]
    assert np.array_equal(pier.host, host)
    before[[20, 21]] = before[[7, 3]]
    assert np.array_equal(pier.gpu, before)


@pytest.mark.parametrize("first", Direction)
def test_real_copies_that_meet_are_done_one_after_the_other(
    pier: Pier, first: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, copied = threading.Event(), queue.SimpleQueue[Direction]()
    copy = reference._copy

    def slow_copy(piece: Any) -> None:
        if piece.direction is first:
            assert gate.wait(PATIENCE)
        copy(piece)
        copied.put(piece.direction)

    monkeypatch.setattr(reference, "_copy", slow_copy)
    monkeypatch.setattr(reference, "AT_ONCE", 0)  # in threads of their own
    gpu, host = pier.gpu.copy(), pier.host.copy()
    plans = pier.harbour.start(first, [1], [1]), pier.harbour.start(first.other, [2], [1])
    free = pier.harbour.start(first.other, [9], [9])
    assert pier.harbour.settle() == []
    assert copied.empty()
    gate.set()
    wait_for(pier.harbour, *plans, free)
    assert [copied.get(timeout=PATIENCE) for _ in range(3)] == [first, first.other, first.other]
    if first is STORE:
        assert np.array_equal(pier.gpu[2], gpu[1])
    else:
        assert np.array_equal(pier.gpu[1], host[1])
        assert np.array_equal(pier.host[1], gpu[2])


def test_a_real_copy_that_fails_ends_once_and_the_next_is_fine(pier: Pier, faults: Faults) -> None:
    faults.fail_every = 2
    plans = [pier.harbour.start(STORE, [block]) for block in range(4)]
    ended = wait_for(pier.harbour, *plans)
    assert [ended[serial].outcome for serial in plans] == ["done", "failed", "done", "failed"]
    errors = [error.code for serial in plans if (error := ended[serial].error)]
    assert errors == [Code.COPY_FAILED, Code.COPY_FAILED]
    assert pier.harbour.settle() == []


def test_the_reference_engine_takes_few_pieces_at_once(
    pier: Pier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(reference, "_copy", lambda _: gate.wait(PATIENCE))
    monkeypatch.setattr(reference, "AT_ONCE", 0)
    engine = pier.harbour.engine
    taken_in: list[object] = []
    submit = engine.submit

    def counted(*arguments: Any) -> object:
        taken_in.append(submit(*arguments))
        return taken_in[-1]

    monkeypatch.setattr(engine, "submit", counted)
    plans = [pier.harbour.start(STORE, [block]) for block in range(30)]
    # One is being copied. Where that came late the lane tries again with the next order
    until(lambda: pier.harbour.settle() == [] and len(taken_in) > reference.MAX_WAITING)
    assert len(taken_in) == 1 + reference.MAX_WAITING
    gate.set()
    assert sorted(wait_for(pier.harbour, *plans)) == plans
    assert len(taken_in) == 30


def test_unmapping_lets_real_memory_go(pier: Pier) -> None:
    plans = [pier.harbour.start(STORE, [block]) for block in range(20)]
    pier.harbour.lane.post(UnmapTensors(1))
    reports: list[Report] = []
    while TensorsUnmapped(1) not in reports:
        reports += pier.harbour.reports()
    assert sorted(serials(reports)) == plans
    assert pier.harbour.settle() == []


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
def test_what_a_client_gets_wrong_is_its_error_and_not_the_lane_s_end(
    shape: KVLayout, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = dict(where)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    harbour = Harbour(ReferenceEngine())
    gc.collect()  # or what other tests left may be closed meanwhile
    before = open_descriptors()
    descriptors = tuple(sealed_memfd("kv", PAGE) for _ in range(where.pop("files", 0)))
    ends = os.pipe() if where.pop("clock", None) else None
    report = harbour.map(shape=shape, clock=ends and ends[0], descriptors=descriptors, **where)
    assert report.error is not None
    if ends is not None:
        os.close(ends[1])
    assert open_descriptors() <= before
    harbour.close()


def open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
