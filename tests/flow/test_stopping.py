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


def test_running_jobs_are_drained_without_new_work(
    start_engine: StartSmallEngine, start_kvferryd: StartKvferryd
) -> None:
    daemon = start_kvferryd(reference_stall=0.5, stop_drain_seconds=TIMEOUT)
    engine = start_engine(daemon)
    jobs = [engine.store([i], [i]) for i in range(8)]
    engine.client.status()
    daemon.process.send_signal(signal.SIGTERM)

    def refused() -> bool:
        (late,) = engine.finish(engine.load([0], [20]))
        return late.error is not None and late.error.code == Code.SHUTTING_DOWN

    until(refused)
    with pytest.raises(Gone) as gone:
        OffloadClient(daemon.directory)
    assert gone.value.code == Code.SHUTTING_DOWN
    assert all(result.success for result in engine.finish(*jobs))
    assert wait_exit(daemon) == 0
    check_disconnected(engine)


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
    stopping = threading.Timer(0.05, daemon.process.send_signal, [number])
    stopping.start()
    engine.worker.wait(jobs, timeout=TIMEOUT)  # jobs that another process has submitted
    engine.client.wait(jobs)
    stopping.join()
    results = engine.finish(*jobs)
    assert [result.outcome for result in results] == ["cancelled"] * 4
    assert [result.error.code for result in results if result.error] == [Code.CANCELLED] * 4
    assert wait_exit(daemon) == 0
    assert 0.2 <= time.monotonic() - began < PROMPTLY
    check_disconnected(engine)


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_a_stop_without_the_runtime_directory(kvferryd: LocalDaemon, instead: str) -> None:
    """The daemon cannot remove its files, and still stops normally."""
    shutil.rmtree(kvferryd.directory)
    if instead == "a file":
        kvferryd.directory.write_text("")
    assert kvferryd.stop() == 0
    assert wait_exit(kvferryd) == 0
