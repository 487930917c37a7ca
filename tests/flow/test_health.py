"""Faults that make a daemon unhealthy, others that do not, and how the status reports them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.proto.status import HealthStatus
from kvferry.testing.engine import StartSmallEngine, until
from kvferry.testing.plugin import StartKvferryd
from support.service_manager import ServiceManager, kvferryd_command
from support.time_limits import PROMPTLY, TIMEOUT

NEVER = 1 << 40


def health_of(client: OffloadClient) -> HealthStatus:
    status = client.status().health
    assert status is not None
    return status


def run_kvferry(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry.client.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)


def test_a_daemon_is_healthy_and_its_probe_is_not_counted(
    kvferryd: LocalDaemon, kvferry_client: OffloadClient
) -> None:
    until(lambda: health_of(kvferry_client).healthy)
    status = kvferry_client.status()
    assert status.health is not None
    assert status.health.reasons == ()
    assert status.health.probe_seconds is not None
    assert (status.health.oldest_job, status.health.held_job) == (None, None)
    assert (status.sessions, status.engines, status.errors) == (1, (), {})
    assert (status.totals.stores, status.totals.loads) == (0, 0)
    assert (status.pool.size_bytes, status.pool.reserved_bytes) == (16 << 20, 0)
    until(lambda: kvferry_client.status().pool.pinned_bytes == 16 << 20)
    assert kvferryd.log().count("healthy") == 1


def test_engines_can_reserve_the_whole_pool(
    start_engine: StartSmallEngine, kvferryd: LocalDaemon
) -> None:
    engine = start_engine(kvferryd, host_bytes=16 << 20)
    assert engine.region.num_blocks * engine.region.block_bytes > (16 << 20) - (1 << 14)


def test_a_device_that_hangs(start_kvferryd: StartKvferryd, start_engine: StartSmallEngine) -> None:
    """The daemon is unhealthy while a probe takes too long.

    The job behind the probe is reported as old, and not as held by its engine.
    """
    daemon = start_kvferryd(
        reference_stall=1.5, health_deadline_seconds=0.3, health_every_seconds=0.1
    )
    engine = start_engine(daemon)
    until(lambda: "running for" in " ".join(health_of(engine.client).reasons))
    assert not health_of(engine.client).healthy
    job = engine.store([0], [0])
    until(lambda: health_of(engine.client).oldest_job is not None)
    assert health_of(engine.client).held_job is None
    done = run_kvferry("status", "--check", "-d", daemon.directory)
    assert (done.returncode, done.stderr) == (1, "")
    assert "probe" in done.stdout
    engine.finish(job)
    assert daemon.log().count("unhealthy") == 1


def test_a_device_that_fails(start_kvferryd: StartKvferryd) -> None:
    daemon = start_kvferryd(reference_fail_every=1, health_every_seconds=0.05)
    with OffloadClient(daemon.directory) as client:
        until(lambda: "copy_failed" in " ".join(health_of(client).reasons))
        assert not health_of(client).healthy
        time.sleep(0.3)
        status = client.status()
        assert (status.errors, status.totals.failed) == ({}, 0)
    assert daemon.log().count("unhealthy") == 1


def test_a_job_that_waits_for_its_engine_is_no_fault(
    start_engine: StartSmallEngine, kvferryd: LocalDaemon
) -> None:
    engine = start_engine(kvferryd)
    until(lambda: health_of(engine.client).healthy)
    held = engine.store([0], [0], wait_for=NEVER)
    behind = engine.load([0], [1])
    until(lambda: health_of(engine.client).held_job is not None)
    status = health_of(engine.client)
    assert status.healthy
    assert status.oldest_job is None
    engine.client.cancel([held])
    engine.finish(held, behind)
    until(lambda: health_of(engine.client).held_job is None)


def test_status_of_a_stopped_daemon_ends_with_a_message(kvferryd: LocalDaemon) -> None:
    os.kill(kvferryd.pid, signal.SIGSTOP)
    try:
        for flags in ((), ("--check",)):
            began = time.monotonic()
            done = run_kvferry("status", "--timeout", 1, "-d", kvferryd.directory, *flags)
            assert done.returncode == 1
            assert "timeout" in done.stderr
            assert str(kvferryd.pid) in done.stderr
            assert done.stderr.count("\n") == 1
            assert time.monotonic() - began < PROMPTLY
    finally:
        os.kill(kvferryd.pid, signal.SIGCONT)


def test_check_of_a_healthy_daemon(kvferryd: LocalDaemon, kvferry_client: OffloadClient) -> None:
    until(lambda: health_of(kvferry_client).healthy)
    done = run_kvferry("status", "--check", "-d", kvferryd.directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert "healthy" in done.stdout
    assert "health" in run_kvferry("status", "-d", kvferryd.directory).stdout


# Messages to the service manager


@pytest.fixture
def manage(tmp_path: Path) -> Iterator[Callable[..., ServiceManager]]:
    """manage(watchdog=None, **options) -> a manager that has started a daemon."""
    with ExitStack() as running:

        def start(watchdog: float | None = None, **options: object) -> ServiceManager:
            manager = running.enter_context(
                ServiceManager(
                    kvferryd_command(tmp_path / "run", **options),  # type: ignore[arg-type]
                    tmp_path / "notify",
                    watchdog=watchdog,
                    log=tmp_path / "log",
                )
            )
            manager.start(ready=False)
            return manager

        yield start


def count_messages(manager: ServiceManager, name: str) -> int:
    return sum(name in message for message in tuple(manager.messages))


def test_the_watchdog_kills_a_daemon_that_hangs(
    manage: Callable[..., ServiceManager],
) -> None:
    manager = manage(watchdog=6.0)
    manager.wait_for("READY")
    until(lambda: count_messages(manager, "WATCHDOG") >= 3)
    assert manager.watchdog_kills == 0
    os.kill(manager.process.pid, signal.SIGSTOP)
    until(lambda: manager.watchdog_kills == 1)
