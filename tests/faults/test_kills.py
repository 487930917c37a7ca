"""SIGKILL of daemons and engines at random moments under load.

The engines (support.traffic) check that each job has one result in time, and that loaded bytes are
those that were stored. These tests check the daemon's invariants and its memory.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.daemon.memory import fd_closer
from kvferry.testing.engine import until
from support.daemon_invariants import broken_invariants, check_released
from support.process_usage import ProcessUsage, device_bytes
from support.restarting_daemons import RestartingDaemons
from support.time_limits import TIMEOUT
from support.traffic_processes import TrafficProcesses, mixed_engines
from support.traffic_statistics import TrafficOptions, summary

pytestmark = pytest.mark.timeout(1200)

# Slows chunks on the CPU, so that some are in flight when a process is killed.
STALLS = {"reference_stall": 0.002}
MAX_GROWTH = 16 << 20
POOL_BYTES = 32 << 20


@pytest.fixture
def job_timeout(long: bool) -> float:
    """Seconds within which each job must end. The long form runs on a machine that is idle."""
    return 5.0 if long else TIMEOUT


def delay(rng: random.Random) -> float:
    """Seconds until the next fault: often none, at most one."""
    return rng.choice((0.0, 0.02, 0.1, 0.5, 1.0)) * rng.random()


def count_registrations(traffic: TrafficProcesses) -> dict[str, int]:
    return {name: process.report().counts["opened"] for name, process in traffic.processes.items()}


def wait_reconnected(traffic: TrafficProcesses, before: dict[str, int]) -> None:
    until(
        lambda: all(now > before[name] for name, now in count_registrations(traffic).items()),
        TIMEOUT,
    )


@pytest.mark.parametrize("kept", [False, True], ids=["empty", "kept"])
def test_daemons(
    start_traffic: Callable[[Path], TrafficProcesses],
    short_path: Path,
    device: str,
    rng: random.Random,
    long: bool,
    kept: bool,
    job_timeout: float,
) -> None:
    """Daemons are killed and replaced, without or with the pool of the killed one.

    Engines lose their jobs and connect again; the clients of some reconnect by themselves.
    """
    with RestartingDaemons(
        device, short_path, kept=kept, pool_bytes=POOL_BYTES, **STALLS
    ) as daemons:
        traffic = start_traffic(daemons.directory)
        traffic.start(*mixed_engines(device, rng, job_timeout=job_timeout))
        until(lambda: all(count_registrations(traffic).values()))
        for _ in range(200 if long else 15):
            time.sleep(delay(rng))
            before = count_registrations(traffic) if rng.random() < 0.3 else None
            daemons.replace()
            if before is not None:
                wait_reconnected(traffic, before)
        before = count_registrations(traffic)
        daemons.replace()
        wait_reconnected(traffic, before)
        total = traffic.stop()
        print(summary(total))
        assert not total.errors, "\n".join(total.errors)
        assert total.counts["lost"] > 0
        assert total.counts["compared"] > 0
        assert not kept or total.counts["reattached"] > 0
        check_released(daemons.directory)


def test_engines(
    start_daemon: Callable[..., LocalDaemon],
    start_traffic: Callable[[Path], TrafficProcesses],
    device: str,
    rng: random.Random,
    long: bool,
    job_timeout: float,
) -> None:
    """Engines are killed and replaced. The daemon's memory and descriptors do not grow."""
    daemon = start_daemon(**STALLS)
    traffic = start_traffic(daemon.directory)
    engines = mixed_engines(device, rng, job_timeout=job_timeout)
    before = measure_idle(daemon, traffic, engines, rng)
    on_device = device_bytes(device)
    traffic.start(*engines)
    with OffloadClient(daemon.directory, engine="observer") as observer:
        done = 0
        for _ in range(200 if long else 15):
            time.sleep(delay(rng))
            done += kill_one(traffic, rng)
            assert not broken_invariants(observer)
        print(f"{done} jobs done by engines that were killed")
        assert done > 0
    total = traffic.stop()
    print(summary(total))
    assert not total.errors, "\n".join(total.errors)
    assert total.counts["compared"] > 0
    check_released(daemon.directory)
    check_not_grown(daemon, before)
    assert device_bytes(device) <= on_device + MAX_GROWTH


def measure_idle(
    daemon: LocalDaemon,
    traffic: TrafficProcesses,
    engines: list[TrafficOptions],
    rng: random.Random,
) -> ProcessUsage:
    """The usage of a daemon after these engines have run and disconnected."""
    traffic.start(*engines)
    until(lambda: all(count_registrations(traffic).values()))
    until(lambda: traffic.report().counts["done"] > 500)
    kill_one(traffic, rng)
    total = traffic.stop()
    assert not total.errors, "\n".join(total.errors)
    check_released(daemon.directory)
    time.sleep(1.5 * fd_closer.IDLE_SECONDS)
    return ProcessUsage.of(daemon.pid)


def check_not_grown(daemon: LocalDaemon, before: ProcessUsage) -> None:
    """Raise AssertionError if the daemon uses more than before.

    It may still be releasing the last session.
    """
    until(lambda: _has_released(ProcessUsage.of(daemon.pid).since(before)))
    more = ProcessUsage.of(daemon.pid).since(before)
    print(more)
    assert more.mappings <= 30
    assert more.private <= MAX_GROWTH
    assert more.shared <= MAX_GROWTH


def _has_released(more: ProcessUsage) -> bool:
    return more.descriptors <= 0 and more.threads <= 0


def kill_one(traffic: TrafficProcesses, rng: random.Random) -> int:
    """Kill and replace an engine, mostly one at work. Returns how many jobs it had done."""
    name = rng.choice(list(traffic.processes))
    process, done = traffic.processes[name], 0
    if rng.random() < 0.8:
        until(lambda: process.report().counts["done"] > 20)
        done = process.report().counts["done"]
    traffic.kill(name)
    traffic.start(replace(process.options, seed=rng.getrandbits(32)))
    return done
