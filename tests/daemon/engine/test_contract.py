"""The contract of copy engines, tested with all of them.

These are the reference engine, the CUDA engine on a GPU in all modes, and the CUDA engine with a
simulated driver, which runs operations in any order that streams and events allow. Each test uses
a real device worker and a real pool. It compares every byte of the tensors and of the pool with a
simple model: loops over blocks and pages.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import pytest

from kvferry.daemon.core.actions import (
    CancelTransfers,
    MapTensors,
    ReleaseTensors,
    Report,
    TensorsMapped,
    TransferCompleted,
)
from kvferry.daemon.device.device_worker import DeviceWorker
from kvferry.daemon.device.mappings import MapCommand
from kvferry.daemon.engine.base import ChunkRequest
from kvferry.daemon.engine.cuda.cuda_engine import CudaEngine
from kvferry.daemon.engine.cuda.dma import FEW
from kvferry.daemon.engine.reference import Faults, ReferenceEngine
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.memory.shared_memory import ReadOnlyFiles
from kvferry.proto.errors import Code, KVFerryError
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction, GPULoadStoreSpec
from kvferry.shm.memfd import sealed_memfd

from .contract_fixture import (
    CHUNK,
    ENGINES,
    JOBS,
    LAYOUTS,
    MIXED,
    POOL,
    ContractFixture,
    Make,
    has_gpu,
    layout,
    of_section,
    simulated,
    transfer,
)
from .simulated_driver import SimulatedDriver

pytestmark = pytest.mark.usefixtures("close_without_thread")


@pytest.fixture(params=ENGINES)
def fixture(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ContractFixture]:
    if request.node.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("no CUDA device on this machine")
    make: Make = request.param
    engine, pool = make(monkeypatch), HostPool(POOL, CHUNK)
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    errors: list[KVFerryError] = []

    def put_reports(batch: list[Report]) -> None:
        for report in batch:
            reports.put(report)

    worker = DeviceWorker(engine, pool, put_reports, errors.append)
    worker.start()
    pool.start_filling(engine, lambda nbytes: None, errors.append)
    yield ContractFixture(engine, pool, worker, reports)
    worker.close()
    pool.close(engine)
    assert not errors


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_equals_the_model(fixture: ContractFixture, name: str) -> None:
    engine = fixture.open(LAYOUTS[name])
    rng = np.random.default_rng(len(name))
    for _ in range(6):
        for direction in (Direction.STORE, Direction.LOAD):
            spec, hosts = transfer(LAYOUTS[name], engine.block_layout.host_blocks, rng)
            spec = of_section(direction, spec, LAYOUTS[name], rng)
            serial = engine.start(direction, spec, hosts)
            ended = fixture.report(TransferCompleted)
            assert (ended.serial, ended.outcome, ended.error) == (serial, Outcome.DONE, None)
            assert ended.seconds >= 0
            unpackable = [] if ended.unpackable is None else ended.unpackable.tolist()
            assert unpackable == engine.unpackable
        engine.check()


@pytest.mark.parametrize("name", ["layers", "odd widths", "two groups", "large", "packed sections"])
def test_loads_read_another_pool_that_is_mapped_read_only(
    fixture: ContractFixture, name: str
) -> None:
    engine, rng = fixture.open(LAYOUTS[name]), np.random.default_rng(4)
    own, engine.host = engine.host, rng.integers(0, 256, POOL, dtype=np.uint8)
    with ExitStack() as stack:
        files = [sealed_memfd("other", CHUNK) for _ in range(POOL // CHUNK)]
        for number, file in enumerate(files):
            stack.callback(os.close, file)
            os.pwrite(file, engine.host[number * CHUNK :][:CHUNK].tobytes(), 0)
        memory = ReadOnlyFiles(files, CHUNK, fixture.pool.address)
        stack.callback(memory.close)
        for address in range(memory.address, memory.address + POOL, CHUNK):
            fixture.engine.pin(address, CHUNK, writable=False)
            stack.callback(fixture.engine.unpin, address)
        for _ in range(6):
            spec, hosts = transfer(LAYOUTS[name], engine.block_layout.host_blocks, rng)
            spec = of_section(Direction.LOAD, spec, LAYOUTS[name], rng)
            engine.start_borrowed(spec, hosts, memory.address - fixture.pool.address)
            assert fixture.report(TransferCompleted).outcome is Outcome.DONE
        engine.host = own
        engine.check()


@pytest.mark.parametrize("name", MIXED)
def test_many_concurrent_jobs_of_both_directions(fixture: ContractFixture, name: str) -> None:
    engine = fixture.open(MIXED[name])
    rng = np.random.default_rng(5)
    started = [engine.start(*job) for _ in range(JOBS) for job in engine.both_directions(rng)]
    ended = [fixture.report(TransferCompleted) for _ in started]
    assert sorted(end.serial for end in ended) == started
    assert {end.outcome for end in ended} == {Outcome.DONE}
    engine.check()


def test_many_jobs_of_one_direction(fixture: ContractFixture) -> None:
    """More of them than chunks may be in flight."""
    shape = LAYOUTS["two groups"]
    engine = fixture.open(shape)
    rng = np.random.default_rng(12)
    for direction in (*Direction, *Direction):
        jobs = [transfer(shape, engine.block_layout.host_blocks, rng) for _ in range(JOBS)]
        started = [engine.start(direction, *job) for job in jobs]
        ended = [fixture.report(TransferCompleted) for _ in started]
        assert [(end.serial, end.outcome) for end in ended] == [(s, Outcome.DONE) for s in started]
        assert all(end.seconds >= 0 for end in ended)
        engine.check()


def test_cancelled_jobs_in_flight_do_not_affect_others(fixture: ContractFixture) -> None:
    engine = fixture.open(MIXED["staged"])
    rng = np.random.default_rng(6)
    if isinstance(fixture.engine, ReferenceEngine):  # otherwise it ends before the cancel
        fixture.engine.faults = Faults(stall=1e-3)
    rows = [before.copy() for before in engine.rows]
    started = []
    for _ in range(JOBS // 4):
        commands = [engine.command(*job) for _ in range(2) for job in engine.both_directions(rng)]
        started += [command.plan.serial for command in commands]
        cancel = CancelTransfers(engine.number, (int(rng.choice(started[-len(commands) :])),))
        for command in commands:  # all at once, so that they do not end before the cancel
            fixture.worker.post_command(command)
        fixture.worker.post_command(cancel)
    ended = [fixture.report(TransferCompleted) for _ in started]
    assert {end.outcome for end in ended} == {Outcome.DONE, Outcome.CANCELLED}
    half = rows[0].size // 2
    for index, before in enumerate(rows):  # only loads write, and only into their half
        assert np.array_equal(engine.read(index)[:half], before[:half])
        engine.rows[index] = engine.read(index)
    engine.host = engine.pool.copy()
    again = [engine.start(*job) for _ in range(JOBS // 4) for job in engine.both_directions(rng)]
    assert {fixture.report(TransferCompleted).outcome for _ in again} == {Outcome.DONE}
    engine.check()


# These jobs have few copies. With few_copies=0 they are enqueued as a batch, like many copies.
@pytest.mark.parametrize(
    ("fixture", "call"),
    [
        (simulated(mode, few_copies=few), call)
        for mode in ("staged", "auto")
        for call, few in (("launch", FEW), ("cuMemcpyAsync", FEW), ("cuMemcpyBatchAsync", 0))
    ],
    indirect=["fixture"],
)
def test_a_driver_error_fails_only_its_job(fixture: ContractFixture, call: str) -> None:
    engine, rng = fixture.open(MIXED["staged and direct"]), np.random.default_rng(8)
    assert isinstance(fixture.engine, CudaEngine)
    device = cast(SimulatedDriver, fixture.engine._driver)
    device.refuse = lambda name: name == call and bool(rng.random() < 0.1)
    job_rng = np.random.default_rng(9)
    started = [
        engine.start(*job, model=False)
        for _ in range(JOBS // 4)
        for job in engine.both_directions(job_rng)
    ]
    ended = [fixture.report(TransferCompleted) for _ in started]
    assert {end.outcome for end in ended} == {Outcome.DONE, Outcome.FAILED}
    device.refuse = lambda name: False
    engine.rows = [engine.read(index) for index in range(len(engine.rows))]
    engine.host = engine.pool.copy()
    again = [
        engine.start(*job) for _ in range(JOBS // 4) for job in engine.both_directions(job_rng)
    ]
    assert {fixture.report(TransferCompleted).outcome for _ in again} == {Outcome.DONE}
    engine.check()


@pytest.mark.parametrize(
    "fixture",
    [
        simulated(mode, seed, **options)
        for mode in ("staged", "auto")
        for seed in (1, 2)
        for options in ({"few_copies": 0}, {"few_copies": FEW}, {"write_back_bytes": 1})
    ],
    indirect=True,
)
def test_jobs_are_correct_for_any_order_of_device_operations(fixture: ContractFixture) -> None:
    for name in ("staged and direct", "odd blocks"):
        engine, rng = fixture.open(MIXED[name]), np.random.default_rng(11)
        started = [
            engine.start(*job) for _ in range(JOBS // 4) for job in engine.both_directions(rng)
        ]
        assert {fixture.report(TransferCompleted).outcome for _ in started} == {Outcome.DONE}
        engine.check()


def test_engine_calls_from_other_threads_fail(fixture: ContractFixture) -> None:
    """`pin` and `unpin` are exceptions: the pool calls them in its own threads."""
    engine, opened = fixture.engine, fixture.open(LAYOUTS["one page"])
    run = opened.command(*opened.both_directions(np.random.default_rng(1))[0]).plan.extents[0]
    mapping, block_layout, store = opened.mapping, opened.block_layout, Direction.STORE
    calls: list[Callable[[], object]] = [
        lambda: engine.attach(fixture.pool.address),
        lambda: engine.map_tensors(block_layout, (), (), ()),
        lambda: engine.allocate_tensors(block_layout),
        lambda: engine.unmap_tensors(mapping),
        lambda: engine.chunk_budget(store, mapping, ChunkRequest(0, 1, False)),
        lambda: engine.submit(store, mapping, run),
        lambda: engine.flush(store, more=False),
        lambda: engine.poll(None),
        lambda: engine.elapsed(None, None, None),
        lambda: engine.copying(mapping),
        lambda: engine.shutdown(),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match="attached"):
            call()


@pytest.mark.parametrize("fixture", [simulated("staged")], indirect=True)
def test_adjacent_chunks_are_one_launch(fixture: ContractFixture) -> None:
    """The first chunk of a store has its own launch, so that the link does not idle meanwhile."""
    engine = fixture.open(MIXED["staged"])
    assert isinstance(fixture.engine, CudaEngine)
    for direction in Direction:
        engine.start(direction, GPULoadStoreSpec(range(16), (16,), (0,)), [*range(16)])
        assert fixture.report(TransferCompleted).outcome is Outcome.DONE
    device = cast(SimulatedDriver, fixture.engine._driver)
    assert device.launches == [(Direction.STORE, 4), (Direction.STORE, 12), (Direction.LOAD, 16)]
    engine.check()


def test_held_memory_stays_after_its_registration(fixture: ContractFixture) -> None:
    """If it is mapped again, it has its bytes, and transfers use it."""
    first = fixture.open(LAYOUTS["layers"], keep=True)
    fixture.unmap(first)
    number, report = fixture.map(LAYOUTS["layers"], reuse=first.number)
    assert report.reused
    second = fixture.opened(number)
    second.rows = first.rows
    second.fill_host()
    second.check()
    rng = np.random.default_rng(1)
    for direction in Direction:
        spec, hosts = transfer(LAYOUTS["layers"], second.block_layout.host_blocks, rng)
        second.start(direction, spec, hosts)
        assert fixture.report(TransferCompleted).error is None
    second.check()
    for descriptor in report.descriptors:
        os.close(descriptor)


def test_held_memory_of_another_size_is_not_used(fixture: ContractFixture) -> None:
    first = fixture.open(LAYOUTS["two groups"], keep=True)
    fixture.unmap(first)
    larger = layout([1 << 16] * 2, [0, 0], [[0, 1]], 1)
    number, report = fixture.map(larger, reuse=first.number)
    assert not report.reused
    for descriptor in report.descriptors:
        os.close(descriptor)
    fixture.unmap(fixture.opened(number))


def test_memory_is_freed_after_its_last_registration_and_release(fixture: ContractFixture) -> None:
    """This includes memory that a second registration uses."""
    fixture.unmap(fixture.open(LAYOUTS["layers"]))  # a driver may open files for the first one
    before = count_descriptors()
    first = fixture.open(LAYOUTS["layers"], keep=True)
    fixture.unmap(first)
    assert count_descriptors() == before + 1
    second, report = fixture.map(LAYOUTS["layers"], keep=True, reuse=first.number)
    for number in (first.number, second):
        fixture.worker.post_command(ReleaseTensors(number))
    fixture.unmap(fixture.opened(second))
    for descriptor in report.descriptors:
        os.close(descriptor)
    assert count_descriptors() == before
    _, report = fixture.map(LAYOUTS["layers"], reuse=second)
    assert not report.reused
    for descriptor in report.descriptors:
        os.close(descriptor)


def test_tensors_can_be_mapped_again_by_descriptor(fixture: ContractFixture) -> None:
    """Their engine registers them with the next daemon after a restart of the daemon."""
    first = fixture.open(LAYOUTS["padded and interleaved"], keep=True)
    (held,) = fixture.worker._mappings._held[first.number]
    fixture.unmap(first)
    _, allocated = fixture.map(LAYOUTS["padded and interleaved"])
    number, _ = fixture.map(
        LAYOUTS["padded and interleaved"], registered=(allocated, (os.dup(held),))
    )
    second = fixture.opened(number)
    second.rows = first.rows
    second.fill_host()
    second.check()
    for descriptor in allocated.descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["pipe", "memfd", "directory", "device"])
def test_descriptors_of_other_files_are_refused(fixture: ContractFixture, kind: str) -> None:
    """Nothing stays mapped or open, and the engine continues."""
    other = fixture.open(LAYOUTS["one page"])
    _, allocated = fixture.map(LAYOUTS["two groups"])
    for descriptor in allocated.descriptors:
        os.close(descriptor)
    before = count_descriptors()
    action = MapTensors(
        99, "s", other.block_layout, allocated.allocations, allocated.locations, None
    )
    fixture.worker.post_command(MapCommand(action, (open_other_file(kind),), None))
    error = fixture.report(TensorsMapped).error
    assert error is not None
    assert error.code in {Code.NOT_SHAREABLE, Code.MAP_FAILED, Code.BAD_LAYOUT}, error
    assert count_descriptors() == before
    other.start(Direction.STORE, GPULoadStoreSpec([1, 2, 3], (3,), (0,)), [4, 5, 6])
    assert fixture.report(TransferCompleted).outcome is Outcome.DONE
    other.check()


def count_descriptors() -> int:
    """The number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def open_other_file(kind: str) -> int:
    """A descriptor of a file that is not memory, or of too little host memory."""
    if kind == "memfd":
        return os.memfd_create("too small")
    if kind == "directory":
        return os.open("/", os.O_RDONLY)
    if kind == "device":
        return os.open("/dev/null", os.O_RDWR)
    reader, writer = os.pipe()
    os.close(writer)
    return reader
