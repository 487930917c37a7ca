"""SIGTERM: running jobs complete, waiting jobs are cancelled, clients are informed, status 0."""

from __future__ import annotations

import shutil
import signal
import threading
import time

import pytest

from kvferry.client import Code, Gone, LocalDaemon, OffloadClient
from kvferry.testing.engine import SmallEngine, StartSmallEngine, until
from kvferry.testing.plugin import StartKvferryd
from support.time_limits import PROMPTLY, TIMEOUT

NEVER = 1 << 40


def wait_exit(daemon: LocalDaemon) -> int:
    """Wait until the daemon has ended, and check its log and sockets. Returns the exit status."""
    status = daemon.process.wait(TIMEOUT)
    assert "Traceback" not in daemon.log(), daemon.log()
    assert not list(daemon.runtime_dir.glob("*/*.sock"))
    return status


def check_disconnected(engine: SmallEngine) -> None:
    """Every method of the scheduler's client reports that the daemon is gone, in time."""
    began = time.monotonic()
    engine.poll()
    with pytest.raises(Gone) as gone:
        engine.store([0], [0])
    assert gone.value.code == Code.DAEMON_GONE
    with pytest.raises(Gone):
        engine.client.status(timeout=0.2)
    engine.client.wait([1, 2, 3])
    engine.client.close()
    assert time.monotonic() - began < PROMPTLY


@pytest.fixture
def slow(start_kvferryd: StartKvferryd) -> LocalDaemon:
    return start_kvferryd(reference_stall=0.5, stop_drain_seconds=TIMEOUT)


def test_running_jobs_are_drained(start_engine: StartSmallEngine, slow: LocalDaemon) -> None:
    engine = start_engine(slow)
    jobs = [engine.store([i], [i]) for i in range(4)]
    engine.client.status()
    slow.process.send_signal(signal.SIGTERM)
    until(lambda: not engine.client.wait(jobs))
    results = engine.finish(*jobs)
    assert [result.success for result in results] == [True] * 4
    assert wait_exit(slow) == 0
    check_disconnected(engine)


def test_no_new_work_while_draining(start_engine: StartSmallEngine, slow: LocalDaemon) -> None:
    engine = start_engine(slow)
    jobs = [engine.store([i], [i]) for i in range(12)]
    engine.client.status()
    slow.process.send_signal(signal.SIGTERM)

    def refused() -> bool:
        (late,) = engine.finish(engine.load([0], [20]))
        return late.error is not None and late.error.code == Code.SHUTTING_DOWN

    until(refused)
    with pytest.raises(Gone) as gone:
        OffloadClient(slow.directory)
    assert gone.value.code == Code.SHUTTING_DOWN
    assert all(result.success for result in engine.finish(*jobs))
    assert wait_exit(slow) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_held_jobs_are_cancelled(
    start_engine: StartSmallEngine, start_kvferryd: StartKvferryd, number: signal.Signals
) -> None:
    daemon = start_kvferryd(stop_drain_seconds=0.2)
    engine = start_engine(daemon)
    jobs = [engine.store([i], [i], wait_for=NEVER) for i in range(4)]
    done = engine.load([9], [9])
    engine.finish(done)
    began = time.monotonic()
    daemon.process.send_signal(number)
    engine.client.wait(jobs)
    results = engine.finish(*jobs)
    assert [result.outcome for result in results] == ["cancelled"] * 4
    assert [result.error.code for result in results if result.error] == [Code.CANCELLED] * 4
    assert wait_exit(daemon) == 0
    assert 0.2 <= time.monotonic() - began < PROMPTLY
    check_disconnected(engine)


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_a_stop_without_the_runtime_directory(
    start_engine: StartSmallEngine, kvferryd: LocalDaemon, instead: str
) -> None:
    """The daemon cannot remove its files, and still stops normally."""
    engine = start_engine(kvferryd)
    shutil.rmtree(kvferryd.directory)
    if instead == "a file":
        kvferryd.directory.write_text("")
    assert kvferryd.stop() == 0
    assert wait_exit(kvferryd) == 0
    check_disconnected(engine)


def test_a_stop_ends_waits_in_all_processes(
    start_engine: StartSmallEngine, start_kvferryd: StartKvferryd
) -> None:
    """Both the scheduler and the worker wait. The worker has not submitted the job."""
    daemon = start_kvferryd(stop_drain_seconds=0.2)
    engine = start_engine(daemon)
    job = engine.store([0], [0], wait_for=NEVER)
    engine.client.status()
    stopping = threading.Timer(0.05, daemon.process.send_signal, [signal.SIGTERM])
    stopping.start()
    engine.worker.wait([job], timeout=TIMEOUT)
    engine.client.wait([job], timeout=TIMEOUT)
    stopping.join()
    assert engine.finish(job)[0].outcome == "cancelled"


def test_an_idle_daemon_stops_at_once(
    start_engine: StartSmallEngine, start_kvferryd: StartKvferryd
) -> None:
    daemon = start_kvferryd(stop_drain_seconds=TIMEOUT)
    engine = start_engine(daemon)
    began = time.monotonic()
    assert daemon.stop(TIMEOUT) == 0
    assert time.monotonic() - began < PROMPTLY
    assert wait_exit(daemon) == 0
    until(lambda: raises_gone(engine))


def raises_gone(engine: SmallEngine) -> bool:
    try:
        engine.client.status(timeout=1)
    except Gone as gone:
        return gone.code == Code.DAEMON_GONE
    return False
