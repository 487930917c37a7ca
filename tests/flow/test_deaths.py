"""Processes that are killed: the affected jobs end within a second, other jobs continue."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvferry.client import Code, Gone, LocalDaemon, OffloadClient
from kvferry.proto.status import EngineStatus
from kvferry.testing.engine import SmallEngine, StartSmallEngine, WorkerProcess, until
from support.raw_client import RawClient
from support.time_limits import PROMPTLY, TIMEOUT

NEVER = 1 << 40

SCHEDULER = """
import sys, time
from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, OffloadClient
from numpy import array

client = OffloadClient(sys.argv[1], engine=sys.argv[2], client="second_scheduler")
for i in range(8):
    spec = GPULoadStoreSpec(array([i])), CPULoadStoreSpec(array([i]))
    client.transfer_async(1000 + i, spec, wait_for=1 << 40)
print(client.status().sessions, flush=True)
time.sleep(600)
"""


def own_status(engine: SmallEngine) -> EngineStatus:
    named = {status.name: status for status in engine.client.status().engines}
    return named[engine.options.name]


# The daemon


def test_the_daemon_is_killed(start_engine: StartSmallEngine, kvferryd: LocalDaemon) -> None:
    """Jobs in flight end as lost at once. Every later call raises Gone."""
    engine = start_engine(kvferryd)
    engine.finish(engine.store([8, 9], [8, 9]))
    jobs = [engine.store([i], [i], wait_for=NEVER) for i in range(4)]
    jobs.append(engine.load([8], [8], wait_for=NEVER))
    engine.client.status()
    kvferryd.kill()
    began = time.monotonic()
    results = engine.finish(*jobs, timeout=PROMPTLY)
    assert [result.outcome for result in results] == ["lost"] * 5
    assert {result.error.code for result in results if result.error} == {Code.DAEMON_GONE}
    assert [result.transfer_type[0] for result in results] == ["GPU"] * 4 + ["CPU"]
    engine.client.wait(jobs)
    calls: list[Callable[[], object]] = [
        lambda: engine.store([0], [0]),
        lambda: engine.client.status(timeout=0.2),
    ]
    for call in calls:
        with pytest.raises(Gone) as gone:
            call()
        assert gone.value.code == Code.DAEMON_GONE
    engine.client.close()
    assert time.monotonic() - began < PROMPTLY


def test_waits_end_when_the_daemon_is_killed(
    start_engine: StartSmallEngine, kvferryd: LocalDaemon
) -> None:
    engine = start_engine(kvferryd)
    job = engine.store([0], [0], wait_for=NEVER)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {kvferryd.pid}"])
    began = time.monotonic()
    engine.worker.wait([job], timeout=TIMEOUT)
    engine.client.wait([job], timeout=TIMEOUT)
    assert time.monotonic() - began < PROMPTLY
    assert engine.finish(job)[0].outcome == "lost"
    killer.wait()


def test_a_client_that_does_not_reconnect_ends_with_its_daemon(kvferryd: LocalDaemon) -> None:
    with OffloadClient(kvferryd.directory, engine="ending", reconnect=False) as client:
        kvferryd.kill()
        with pytest.raises(Gone) as gone:
            client.status()
        assert gone.value.code == Code.DAEMON_GONE
        assert not client.connecting


def test_a_dropped_connection_ends_its_session(kvferryd: LocalDaemon) -> None:
    """The process continues and has not sent Goodbye."""
    with OffloadClient(kvferryd.directory, engine="observer") as observer:
        raw = RawClient(kvferryd.directory, "dropped")
        raw.register()
        raw.drop()
        until(lambda: observer.status().sessions == 1, PROMPTLY)


# The worker


def test_a_worker_is_killed(start_engine: StartSmallEngine, daemon: LocalDaemon) -> None:
    """Its engine is no longer present, its jobs fail, and its scheduler's next job is refused.

    Other engines continue.
    """
    engine, other = start_engine(daemon), start_engine(daemon)
    engine.finish(engine.store([1], [1]))
    held = [engine.store([0], [0], wait_for=NEVER), engine.load([1], [1], wait_for=NEVER)]
    assert own_status(engine).present
    engine.process.kill()
    until(lambda: not own_status(engine).present, PROMPTLY)
    results = engine.finish(*held, timeout=PROMPTLY)
    assert [result.outcome for result in results] == ["failed"] * 2
    assert {result.error.code for result in results if result.error} == {Code.ENGINE_GONE}
    (next_result,) = engine.finish(engine.store([0], [0]))
    assert next_result.error is not None
    assert next_result.error.code == Code.NOT_REGISTERED
    assert all(r.success for r in other.finish(other.store([0], [0]), other.load([0], [1])))


@pytest.mark.parametrize("daemon_owned", [False, True], ids=["engine-owned", "daemon-owned"])
def test_a_new_worker_loads_what_the_dead_one_stored(
    start_engine: StartSmallEngine,
    daemon: LocalDaemon,
    worker_process: Callable[[], WorkerProcess],
    daemon_owned: bool,
) -> None:
    engine = start_engine(daemon, block_size_factor=2, daemon_owned=daemon_owned)
    assert not engine.region.reattached
    fence = engine.worker.write(range(16), 5)
    engine.finish(engine.store(range(16), range(8), wait_for=fence))
    region, host_blocks = engine.region, own_status(engine).host_blocks
    engine.process.kill()
    until(lambda: not own_status(engine).present, PROMPTLY)
    assert own_status(engine).host_blocks == host_blocks

    engine.start_worker(worker_process())
    assert own_status(engine).present
    assert engine.region.reattached
    assert engine.region.num_blocks == region.num_blocks
    engine.finish(engine.load(range(8), range(16, 32)))
    assert np.array_equal(engine.worker.read(range(16, 32)), engine.expected(range(16), 5))


def test_a_worker_is_killed_while_it_copies(
    start_engine: StartSmallEngine, daemon: LocalDaemon, worker_process: Callable[[], WorkerProcess]
) -> None:
    """All jobs end, with success or not. The next worker can use the region."""
    engine = start_engine(daemon, num_blocks=512)
    jobs = [engine.store(range(256), range(256)) for _ in range(60)]
    engine.process.kill()
    results = engine.finish(*jobs, timeout=PROMPTLY)
    assert {str(result.outcome) for result in results} <= {"done", "failed", "refused"}
    engine.start_worker(worker_process())
    engine.finish(engine.store(range(256), range(256), wait_for=engine.worker.write(range(256), 2)))
    engine.finish(engine.load(range(256), range(256, 512)))
    assert np.array_equal(engine.worker.read(range(256, 512)), engine.expected(range(256), 2))


# The scheduler


@pytest.fixture
def second_scheduler(
    start_engine: StartSmallEngine, daemon: LocalDaemon
) -> Iterator[tuple[SmallEngine, int]]:
    """An engine, and the pid of its second scheduler, which has eight stores behind a fence."""
    engine = start_engine(daemon)
    command = [sys.executable, "-c", SCHEDULER, str(daemon.directory), engine.options.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield engine, process.pid
        process.kill()


def test_a_scheduler_is_killed(second_scheduler: tuple[SmallEngine, int]) -> None:
    """Its jobs end. Jobs behind them, from another scheduler of the engine, complete."""
    engine, pid = second_scheduler
    sessions = engine.client.status().sessions
    behind = engine.store([9], [9], wait_for=engine.worker.write([9], 1))
    assert own_status(engine).jobs == 9
    subprocess.run(["kill", "-9", str(pid)], check=True)
    engine.client.wait(range(1000, 1008), timeout=PROMPTLY)
    assert engine.finish(behind, timeout=PROMPTLY)[0].success
    until(lambda: own_status(engine).jobs == 0, PROMPTLY)
    assert own_status(engine).present
    assert engine.client.status().sessions == sessions - 1
    engine.finish(engine.load([9], [10]))
    assert np.array_equal(engine.worker.read([10]), engine.expected([9], 1))
