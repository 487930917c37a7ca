"""What every engine promises, run over all of them.

The reference engine; the CUDA engine on a GPU, copying directly, staged, and as calibrated; and the
CUDA engine on a simulated driver, which does things in any order that streams and events allow.
Each test drives a real device worker over a real pool, and compares every byte of the tensors and
of the pool with a plain model: loops over blocks and pages, as the semantics state it.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
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
from kvferry.daemon.device.mappings import MapCommand
from kvferry.daemon.device.worker import DeviceWorker
from kvferry.daemon.engine.base import ChunkRequest
from kvferry.daemon.engine.cuda.dma import FEW
from kvferry.daemon.engine.cuda.engine import CudaEngine
from kvferry.daemon.engine.reference import Faults, ReferenceEngine
from kvferry.daemon.memory import fd_closer
from kvferry.daemon.memory.pool import HostPool
from kvferry.proto.errors import Code, KVFerryError
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction, GPULoadStoreSpec

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
    simulated,
    transfer,
)
from .simulated_driver import SimulatedDriver


@pytest.fixture(autouse=True)
def closing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread closes, so that what is open now is a fact."""
    monkeypatch.setattr(fd_closer.Closer, "close_later", lambda _, close: close())


@pytest.fixture(params=ENGINES)
def fixture(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ContractFixture]:
    if request.node.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("no CUDA device on this machine")
    make: Make = request.param
    engine, pool = make(monkeypatch), HostPool(POOL, CHUNK)
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    troubles: list[KVFerryError] = []

    def take(some: list[Report]) -> None:
        for report in some:
            reports.put(report)

    worker = DeviceWorker(engine, pool, take, troubles.append)
    worker.start()
    pool.start_filling(engine, lambda nbytes: None, troubles.append)
    yield ContractFixture(engine, pool, worker, reports)
    worker.close()
    pool.close(engine)
    assert not troubles


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_is_where_the_model_says(fixture: ContractFixture, name: str) -> None:
    engine = fixture.open(LAYOUTS[name])
    rng = np.random.default_rng(len(name))
    for _ in range(6):
        for direction in (Direction.STORE, Direction.LOAD):
            spec, hosts = transfer(LAYOUTS[name], engine.geometry.host_blocks, rng)
            serial = engine.start(direction, spec, hosts)
            ended = fixture.report(TransferCompleted)
            assert (ended.serial, ended.outcome, ended.error) == (serial, Outcome.DONE, None)
            assert ended.seconds >= 0
        engine.check()


def test_transfers_of_one_direction_are_done_in_order(fixture: ContractFixture) -> None:
    engine = fixture.open(LAYOUTS["two groups"])
    rng = np.random.default_rng(3)
    serials = []
    for _ in range(40):
        spec, hosts = transfer(LAYOUTS["two groups"], 12, rng)
        serials.append(engine.start(Direction.STORE, spec, hosts))
    assert [fixture.report(TransferCompleted).serial for _ in serials] == serials
    engine.check()


def test_memory_is_freed_with_its_registration(fixture: ContractFixture) -> None:
    first, second = fixture.open(LAYOUTS["layers"]), fixture.open(LAYOUTS["layers"])
    fixture.unmap(first)
    second.start(Direction.STORE, GPULoadStoreSpec([1, 2, 3], (3,), (0,)), [4])
    assert fixture.report(TransferCompleted).outcome is Outcome.DONE
    second.check()


@pytest.mark.parametrize("name", MIXED)
def test_many_jobs_both_ways_at_once(fixture: ContractFixture, name: str) -> None:
    engine = fixture.open(MIXED[name])
    rng = np.random.default_rng(5)
    started = [engine.start(*job) for _ in range(JOBS) for job in engine.both_ways(rng)]
    ended = [fixture.report(TransferCompleted) for _ in started]
    assert sorted(one.serial for one in ended) == started
    assert {one.outcome for one in ended} == {Outcome.DONE}
    engine.check()


@pytest.mark.parametrize("name", MIXED)
def test_many_jobs_of_one_direction(fixture: ContractFixture, name: str) -> None:
    engine = fixture.open(MIXED[name])
    rng = np.random.default_rng(12)
    for direction in (*Direction, *Direction):
        jobs = [transfer(MIXED[name], engine.geometry.host_blocks, rng) for _ in range(JOBS // 2)]
        started = [engine.start(direction, *job) for job in jobs]
        ended = [fixture.report(TransferCompleted) for _ in started]
        assert [(one.serial, one.outcome) for one in ended] == [(s, Outcome.DONE) for s in started]
        assert all(one.seconds >= 0 for one in ended)
        engine.check()


def test_jobs_that_are_cancelled_on_their_way_harm_no_other(fixture: ContractFixture) -> None:
    engine = fixture.open(MIXED["staged"])
    rng = np.random.default_rng(6)
    if isinstance(fixture.engine, ReferenceEngine):  # it would be done before anybody gives up
        fixture.engine.faults = Faults(stall=1e-3)
    rows = [before.copy() for before in engine.rows]
    started = []
    for _ in range(JOBS // 4):
        orders = [engine.order(*job) for _ in range(2) for job in engine.both_ways(rng)]
        started += [order.plan.serial for order in orders]
        given_up = CancelTransfers(engine.number, (int(rng.choice(started[-len(orders) :])),))
        for order in orders:  # all at once, or they would be done before they are given up
            fixture.worker.post_command(order)
        fixture.worker.post_command(given_up)
    ended = [fixture.report(TransferCompleted) for _ in started]
    assert {one.outcome for one in ended} == {Outcome.DONE, Outcome.CANCELLED}
    half = rows[0].size // 2
    for index, before in enumerate(rows):  # stores have only read, loads kept to their half
        assert np.array_equal(engine.read(index)[:half], before[:half])
        engine.rows[index] = engine.read(index)
    engine.host = engine.pool.copy()
    again = [engine.start(*job) for _ in range(JOBS // 4) for job in engine.both_ways(rng)]
    assert {fixture.report(TransferCompleted).outcome for _ in again} == {Outcome.DONE}
    engine.check()


# Jobs here are small. With few_copies=0 their copies are enqueued like many.
@pytest.mark.parametrize(
    ("fixture", "call"),
    [
        (simulated(mode, few_copies=few), call)
        for mode in ("staged", "auto")
        for call, few in (("launch", FEW), ("cuMemcpyAsync", FEW), ("cuMemcpyBatchAsync", 0))
    ],
    indirect=["fixture"],
)
def test_driver_errors_fail_their_job_alone(fixture: ContractFixture, call: str) -> None:
    engine, rng = fixture.open(MIXED["staged and direct"]), np.random.default_rng(8)
    assert isinstance(fixture.engine, CudaEngine)
    device = cast(SimulatedDriver, fixture.engine._driver)
    device.refuse = lambda name: name == call and bool(rng.random() < 0.1)
    sure = np.random.default_rng(9)
    started = [
        engine.start(*job, model=False) for _ in range(JOBS // 4) for job in engine.both_ways(sure)
    ]
    ended = [fixture.report(TransferCompleted) for _ in started]
    assert {one.outcome for one in ended} == {Outcome.DONE, Outcome.FAILED}
    device.refuse = lambda name: False
    engine.rows = [engine.read(index) for index in range(len(engine.rows))]
    engine.host = engine.pool.copy()
    again = [engine.start(*job) for _ in range(JOBS // 4) for job in engine.both_ways(sure)]
    assert {fixture.report(TransferCompleted).outcome for _ in again} == {Outcome.DONE}
    engine.check()


@pytest.mark.parametrize(
    "fixture",
    [
        simulated(mode, seed, few_copies=few)
        for mode in ("staged", "auto")
        for seed in range(1, 5)
        for few in (0, FEW)
    ],
    indirect=True,
)
def test_in_whatever_order_the_device_does_things(fixture: ContractFixture) -> None:
    for name, rounds in (("staged and direct", JOBS // 4), ("odd blocks", JOBS // 4)):
        engine, rng = fixture.open(MIXED[name]), np.random.default_rng(11)
        started = [engine.start(*job) for _ in range(rounds) for job in engine.both_ways(rng)]
        assert {fixture.report(TransferCompleted).outcome for _ in started} == {Outcome.DONE}
        engine.check()


@pytest.mark.parametrize(
    "fixture",
    [simulated(mode, seed, write_back_bytes=1) for mode in ("staged", "auto") for seed in (1, 2)],
    indirect=True,
)
def test_stores_that_are_written_back_one_by_one(fixture: ContractFixture) -> None:
    for name in ("staged and direct", "odd blocks"):
        engine, rng = fixture.open(MIXED[name]), np.random.default_rng(12)
        started = [engine.start(*job) for _ in range(JOBS // 4) for job in engine.both_ways(rng)]
        assert {fixture.report(TransferCompleted).outcome for _ in started} == {Outcome.DONE}
        engine.check()


def test_only_the_worker_s_thread_calls_an_engine(fixture: ContractFixture) -> None:
    """But `pin` and `unpin`: the pool calls those in threads of its own."""
    engine, opened = fixture.engine, fixture.open(LAYOUTS["one page"])
    run = opened.order(*opened.both_ways(np.random.default_rng(1))[0]).plan.extents[0]
    mapping, geometry, store = opened.mapping, opened.geometry, Direction.STORE
    calls: list[Callable[[], object]] = [
        lambda: engine.attach(fixture.pool.address),
        lambda: engine.map_tensors(geometry, (), (), ()),
        lambda: engine.allocate_tensors(geometry),
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
def test_jobs_that_share_a_turn_have_times_of_their_own(fixture: ContractFixture) -> None:
    engine = fixture.open(MIXED["staged"])
    for direction in Direction:
        specs = [GPULoadStoreSpec([n, n + 20], (2,), (0,)) for n in range(20)]
        for n, spec in enumerate(specs):
            engine.start(direction, spec, [2 * n, 2 * n + 1])
        assert all(fixture.report(TransferCompleted).seconds > 0 for _ in specs)


@pytest.mark.parametrize("fixture", [simulated("staged")], indirect=True)
def test_chunks_that_lie_one_behind_the_other_are_one_launch(fixture: ContractFixture) -> None:
    """But for the first of a store: the link has something to do while others are made ready."""
    engine = fixture.open(MIXED["staged"])
    assert isinstance(fixture.engine, CudaEngine)
    for direction in Direction:
        engine.start(direction, GPULoadStoreSpec(range(16), (16,), (0,)), [*range(16)])
        assert fixture.report(TransferCompleted).outcome is Outcome.DONE
    device = cast(SimulatedDriver, fixture.engine._driver)
    assert device.launches == [(Direction.STORE, 4), (Direction.STORE, 12), (Direction.LOAD, 16)]
    engine.check()


def test_memory_that_is_held_outlasts_its_registration(fixture: ContractFixture) -> None:
    """TensorsMapped again it has its bytes, and takes part in transfers."""
    first = fixture.open(LAYOUTS["layers"], keep=True)
    fixture.unmap(first)
    number, report = fixture.map(LAYOUTS["layers"], reuse=first.number)
    assert report.reused
    again = fixture.opened(number)
    again.rows = first.rows
    again.fill_host()
    again.check()
    rng = np.random.default_rng(1)
    for direction in Direction:
        spec, hosts = transfer(LAYOUTS["layers"], again.geometry.host_blocks, rng)
        again.start(direction, spec, hosts)
        assert fixture.report(TransferCompleted).error is None
    again.check()
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


def test_memory_is_freed_when_nothing_holds_it(fixture: ContractFixture) -> None:
    """Also that of which a second registration was made."""
    fixture.unmap(fixture.open(LAYOUTS["layers"]))  # whatever a driver opens for the first of all
    before = descriptors()
    first = fixture.open(LAYOUTS["layers"], keep=True)
    fixture.unmap(first)
    assert descriptors() == before + 1
    second, report = fixture.map(LAYOUTS["layers"], keep=True, reuse=first.number)
    for number in (first.number, second):
        fixture.worker.post_command(ReleaseTensors(number))
    fixture.unmap(fixture.opened(second))
    for descriptor in report.descriptors:
        os.close(descriptor)
    assert descriptors() == before
    _, report = fixture.map(LAYOUTS["layers"], reuse=second)
    assert not report.reused
    for descriptor in report.descriptors:
        os.close(descriptor)


def test_tensors_may_be_mapped_again_by_descriptor(fixture: ContractFixture) -> None:
    """Their engine outlived the daemon that made them, and registers them with the next one."""
    first = fixture.open(LAYOUTS["padded and interleaved"], keep=True)
    (held,) = fixture.worker._mappings._held[first.number]
    fixture.unmap(first)
    _, made = fixture.map(LAYOUTS["padded and interleaved"])
    number, _ = fixture.map(LAYOUTS["padded and interleaved"], own=(made, (os.dup(held),)))
    again = fixture.opened(number)
    again.rows = first.rows
    again.fill_host()
    again.check()
    for descriptor in made.descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("what", ["pipe", "memfd", "directory", "device"])
def test_descriptors_of_something_else_are_refused(fixture: ContractFixture, what: str) -> None:
    """Nothing stays mapped or open, and the engine goes on."""
    other = fixture.open(LAYOUTS["one page"])
    _, made = fixture.map(LAYOUTS["two groups"])
    for descriptor in made.descriptors:
        os.close(descriptor)
    before = descriptors()
    order = MapTensors(99, "s", other.geometry, made.allocations, made.locations, None)
    fixture.worker.post_command(MapCommand(order, (something_else(what),), None))
    error = fixture.report(TensorsMapped).error
    assert error is not None
    assert error.code in {Code.NOT_SHAREABLE, Code.MAP_FAILED, Code.BAD_LAYOUT}, error
    assert descriptors() == before
    other.start(Direction.STORE, GPULoadStoreSpec([1, 2, 3], (3,), (0,)), [4, 5, 6])
    assert fixture.report(TransferCompleted).outcome is Outcome.DONE
    other.check()


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def something_else(what: str) -> int:
    """A descriptor that is no memory, or host memory of fewer bytes than said."""
    if what == "memfd":
        return os.memfd_create("something else")
    if what == "directory":
        return os.open("/", os.O_RDONLY)
    if what == "device":
        return os.open("/dev/null", os.O_RDWR)
    reader, writer = os.pipe()
    os.close(writer)
    return reader
