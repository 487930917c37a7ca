"""A device worker with a stub engine, whose chunks end when the test ends them.

No test sleeps: `settle` returns when the worker has done all that it can do now. So a chunk that is
not submitted then is not late.
"""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.daemon.core.actions import (
    CancelTransfers,
    Continue,
    CopyPlan,
    ForgetStores,
    MapTensors,
    Pong,
    Report,
    StartTransfer,
    TensorsMapped,
    TransferCompleted,
)
from kvferry.daemon.core.hazards import HazardTracker
from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s
from kvferry.daemon.device.command_queue import Ping
from kvferry.daemon.device.device_worker import DeviceWorker
from kvferry.daemon.device.mappings import MapCommand
from kvferry.daemon.device.transfer_queues import LARGE
from kvferry.daemon.engine.base import (
    NO_ROOM,
    AllocatedTensors,
    ChunkBudget,
    ChunkRequest,
    CopyEngine,
    Mapping,
    OwnerThread,
)
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, Failed, KVFerryError
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import Allocation, Location
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import CopyStatus, DeviceInfo, GroupCopying
from kvferry.shm.memfd import sealed_memfd
from support.time_limits import TIMEOUT

STORE, LOAD = Direction.STORE, Direction.LOAD
# The number of a registration that never exists.
UNKNOWN = 999


def layout(page: int, blocks: int = 64) -> KVLayout:
    return KVLayout((TensorLayout(blocks, page, page),), ((TensorRef(0, page),),))


SMALL = layout(64)
BIG = 2 * LARGE


@dataclass(eq=False)
class FakeChunk:
    direction: Direction
    mapping: Mapping
    run: Extent
    # Position in the order of submission, from 0, over both directions.
    number: int
    done: bool = False
    error: KVFerryError | None = None

    @property
    def blocks(self) -> list[int]:
        return [int(block) for block in self.run.gpu_blocks]


class StubEngine:
    """Accepts chunks. The test sets their results. Times are differences of chunk numbers."""

    info = DeviceInfo("cpu", "cpu", "stub")
    numa_node: int | None = None

    def __init__(self) -> None:
        # Limits of a chunk.
        self.chunk = ChunkBudget(1 << 40)
        # Most chunks in flight in one direction.
        self.max_in_flight = 4
        self.submitted: queue.SimpleQueue[FakeChunk] = queue.SimpleQueue()
        self.in_flight: list[FakeChunk] = []
        self.closed: list[Mapping] = []
        self.requests: list[tuple[Direction, ChunkRequest]] = []
        self.flushes: list[tuple[Direction, bool]] = []
        # For each timed plan: blocks of its first chunk, and of the chunk in flight before it.
        self.timed: list[tuple[list[int], list[int] | None]] = []
        # Whether the engine accepts no chunk.
        self.is_full = False
        # Outcomes of the next submissions: an error, or None for success. Later ones succeed.
        self.refusals: list[KVFerryError | None] = []
        self.on_submit: Callable[[], object] = lambda: None
        self._owner = OwnerThread()
        # Number of submitted chunks.
        self.accepted = 0

    def attach(self, pool_address: int) -> CopyStatus | None:
        self._owner.bind()
        return None

    def pin(self, address: int, nbytes: int, *, writable: bool = True) -> None: ...

    def unpin(self, address: int) -> None: ...

    def map_tensors(
        self,
        geometry: BlockLayout,
        allocations: Sequence[Allocation],
        locations: Sequence[Location],
        descriptors: Sequence[int],
    ) -> Mapping:
        return Mapping(geometry, np.zeros(len(locations), dtype=np.int64))

    def allocate_tensors(self, geometry: BlockLayout, kept: Sequence[int] = ()) -> AllocatedTensors:
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
        if self.is_full:
            return NO_ROOM
        in_flight = [chunk for chunk in self.in_flight if chunk.direction is direction]
        return self.chunk if len(in_flight) < self.max_in_flight else NO_ROOM

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

    def unpackable_blocks(self, submission: object) -> Int64s:
        raise AssertionError("no layout is packed")

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
    """A device worker, and the plans that the core would create for it."""

    engine: CopyEngine
    pool: HostPool = field(default_factory=lambda: HostPool(1 << 16, 1 << 16))
    deaths: list[KVFerryError] = field(default_factory=list)
    # Deaths that the test provokes.
    expected: int = 0
    pings: int = 0
    # Number of reported transfers that have ended.
    reported_ends: int = 0
    # Descriptors of memory that an earlier daemon held.
    held: tuple[int, ...] = ()
    # Called when a CancelTransfers command is continued.
    on_cancel_continued: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.pool.ready_bytes = self.pool.nbytes
        self.batches: queue.SimpleQueue[list[Report]] = queue.SimpleQueue()
        self.worker = DeviceWorker(self.engine, self.pool, self.receive_batch, self.record_death)
        self.geometries: dict[int, BlockLayout] = {}
        self.orderings: dict[int, HazardTracker] = {}
        self.serial = 0
        self.plans: dict[int, CopyPlan] = {}
        if self.held:
            self.worker.hold_memory(UNKNOWN, *self.held)
        self.worker.start()

    def map(
        self, number: int = 1, shape: KVLayout = SMALL, *, timeline: int | None = None, **where: Any
    ) -> TensorsMapped:
        """Map a registration with tensors of its own, or with locations=None allocate them."""
        geometry = self.geometries[number] = BlockLayout(LayoutArrays.from_layout(shape), 0, 64)
        self.orderings[number] = HazardTracker(geometry.gpu_slots, 64)
        locations = where.get("locations", (Location(0, 0),) * len(shape.tensors))
        allocations = where.get("allocations", ())
        wanted = MapTensors(number, "session", geometry, allocations, locations, timeline)
        self.worker.post_command(MapCommand(wanted, where.get("descriptors", ()), timeline))
        (report,) = self.settle()
        assert isinstance(report, TensorsMapped)
        return report

    def map_large(self, number: int = 1, page: int = BIG) -> None:
        """Map a registration whose blocks are large chunks. The pool claims enough memory."""
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
        """Start a plan as the core would create it. hosts: the same as `blocks` by default."""
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
        self.worker.post_command(StartTransfer(plan, "session", plan.serial))
        return self.serial

    def receive_batch(self, batch: list[Report]) -> None:
        """Receive a batch of reports. Posts the rest of a command again, as the core does."""
        self.reported_ends += len(serials(batch))
        for report in batch:
            if isinstance(report, Continue):
                if isinstance(report.command, CancelTransfers):
                    self.on_cancel_continued()
                self.worker.post_command(report.command)
        self.batches.put([report for report in batch if not _is_forget(report)])

    def record_death(self, error: KVFerryError) -> None:
        self.deaths.append(error)
        self.batches.put([])  # wakes a test that waits for a report

    def reports(self) -> list[Report]:
        """The next batch of reports. Fails if the worker has died."""
        batch = self.batches.get(timeout=TIMEOUT)
        assert batch, self.deaths
        return batch

    def settle(self) -> list[Report]:
        """Wait until the worker has done all that it can. Returns its reports."""
        seen: list[Report] = []
        before = None
        while before != (now := (len(seen), getattr(self.engine, "accepted", 0))):
            before = now
            for _ in range(2):  # the second ping is handled after the step of the first
                self.pings += 1
                self.worker.post_command(Ping(-self.pings))
                while not (pongs := [each for each in seen if self._is_pong(each)]):
                    seen += self.reports()
                seen.remove(*pongs)
        return seen

    def _is_pong(self, report: Report) -> bool:
        return isinstance(report, Pong) and report.posted == -self.pings

    def close(self) -> None:
        self.worker.close()
        self.pool.ready_bytes = self.pool.nbytes  # `map_large` claims more
        self.pool.close(self.engine)
        assert len(self.deaths) == self.expected


def _is_forget(report: Report) -> bool:
    """Whether a report continues ForgetStores, which no test waits for."""
    return isinstance(report, Continue) and isinstance(report.command, ForgetStores)


def take_submitted(stub: StubEngine) -> list[FakeChunk]:
    """The chunks submitted since the last call."""
    chunks = []
    while not stub.submitted.empty():
        chunks.append(stub.submitted.get())
    return chunks


def finish(fixture: WorkerFixture, *chunks: FakeChunk) -> list[Report]:
    for chunk in chunks:
        chunk.done = True
    return fixture.settle()


def finish_all(fixture: WorkerFixture, stub: StubEngine) -> list[Report]:
    """Finish all chunks, oldest first."""
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


class TimelineFixture:
    """The writing side of a timeline."""

    def __init__(self) -> None:
        self.descriptor = sealed_memfd("timeline", PAGE)
        self.page = mmap.mmap(self.descriptor, PAGE)

    def write_value(self, value: int) -> None:
        self.page[:8] = value.to_bytes(8, "little")

    def revoke(self) -> None:
        self.page[8:16] = bytes([1] * 8)

    @property
    def copy(self) -> int:
        """A descriptor for the worker to close."""
        return os.dup(self.descriptor)


ERROR = Failed(Code.DRIVER, "the device failed", 700)


def failed(serial: int) -> TransferCompleted:
    return TransferCompleted(serial, Outcome.FAILED, error=ERROR.info)


def open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
