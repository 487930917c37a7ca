"""Faults that make a daemon unhealthy, others that do not, and how the status reports them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.proto.status import HealthStatus
from kvferry.testing.engine import StartSmallEngine, until
from kvferry.testing.plugin import StartKvferryd
from support.command_line import kvferry
from support.service_manager import ServiceManager, kvferryd_command


def health_of(client: OffloadClient) -> HealthStatus:
    status = client.status().health
    assert status is not None
    return status


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


def test_a_device_that_hangs(
    start_kvferryd: StartKvferryd,
    start_engine: StartSmallEngine,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    assert kvferry("status", "--check", "-d", daemon.directory) == 1
    assert "probe" in capsys.readouterr().out
    engine.finish(job)
    assert daemon.log().count("unhealthy") == 1


def test_a_job_that_waits_for_its_engine_is_no_fault(
    start_engine: StartSmallEngine, kvferryd: LocalDaemon
) -> None:
    engine = start_engine(kvferryd)
    until(lambda: health_of(engine.client).healthy)
    engine.store([0], [0], wait_for=1 << 40)
    until(lambda: health_of(engine.client).held_job is not None)
    status = health_of(engine.client)
    assert status.healthy
    assert status.oldest_job is None


def test_a_removed_socket_makes_the_daemon_unhealthy(
    kvferryd: LocalDaemon, kvferry_client: OffloadClient
) -> None:
    until(lambda: health_of(kvferry_client).healthy)
    (kvferryd.directory / "fds.sock").unlink()
    until(lambda: any("was removed" in why for why in health_of(kvferry_client).reasons))


def test_the_watchdog_kills_a_daemon_that_hangs(tmp_path: Path) -> None:
    command, log = kvferryd_command(tmp_path / "run"), tmp_path / "log"
    with ServiceManager(command, tmp_path / "notify", watchdog=6.0, log=log) as manager:
        manager.start()
        until(lambda: len(manager.values("WATCHDOG")) >= 3)
        assert manager.watchdog_kills == 0
        os.kill(manager.process.pid, signal.SIGSTOP)
        until(lambda: manager.watchdog_kills == 1)
