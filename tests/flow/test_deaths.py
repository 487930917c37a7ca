"""Processes that are killed: the affected jobs end within a second, other jobs continue."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.client import Code, Gone, LocalDaemon, OffloadClient
from kvferry.proto.status import EngineStatus
from kvferry.testing.engine import SmallEngine, StartSmallEngine, WorkerProcess, until
from support.time_limits import PROMPTLY, TIMEOUT

NEVER = 1 << 40


def own_status(engine: SmallEngine) -> EngineStatus:
    named = {status.name: status for status in engine.client.status().engines}
    return named[engine.options.name]


# The daemon


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
    (lost,) = engine.finish(job)
    assert lost.error is not None
    assert (lost.outcome, lost.error.code) == ("lost", Code.DAEMON_GONE)
    killer.wait()


def test_a_client_that_does_not_reconnect_ends_with_its_daemon(kvferryd: LocalDaemon) -> None:
    with OffloadClient(kvferryd.directory, engine="ending", reconnect=False) as client:
        kvferryd.kill()
        with pytest.raises(Gone) as gone:
            client.status()
        assert gone.value.code == Code.DAEMON_GONE
        assert not client.connecting


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


def test_a_new_worker_loads_what_the_dead_one_stored(
    start_engine: StartSmallEngine, daemon: LocalDaemon, worker_process: Callable[[], WorkerProcess]
) -> None:
    engine = start_engine(daemon, block_size_factor=2)
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
