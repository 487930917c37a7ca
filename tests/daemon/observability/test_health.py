"""Health with a FakeCore: why a daemon is unhealthy, and reports to the service manager."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from kvferry.daemon.core.actions import Pong
from kvferry.daemon.observability.health import Health, HealthTimeouts, ProbeHistory
from kvferry.proto.errors import Code, ErrorInfo
from support.eventually import eventually
from support.virtual_time import VirtualTimeLoop

from .conftest import FakeCore

pytestmark = pytest.mark.virtual_time

TIMES = HealthTimeouts()


def seconds() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class FakeServiceManager:
    """Records calls, and when keep_alive was called."""

    watchdog_seconds: float | None = None
    ready_count: int = 0
    unhealthy_reports: list[str] = field(default_factory=list)
    keep_alives: list[float] = field(default_factory=list)

    def ready(self) -> None:
        self.ready_count += 1

    def report_unhealthy(self, why: str) -> None:
        self.unhealthy_reports.append(why)

    def keep_alive(self) -> None:
        self.keep_alives.append(seconds())


class HealthFixture:
    """The health of a daemon with a FakeCore. responds: whether its device worker responds."""

    def __init__(
        self, fake_core: FakeCore, timeouts: HealthTimeouts, manager: FakeServiceManager
    ) -> None:
        self.responds = True
        self.health = Health(timeouts, fake_core.probe, self.ping, manager)

    def start(self) -> None:
        self.running = asyncio.create_task(self.health.run())

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.wait({self.running})

    def ping(self, now: float) -> None:
        if self.responds:
            loop = asyncio.get_running_loop()
            loop.call_soon(self.health.handle_pong, Pong(now, None, None))

    def reasons(self) -> str:
        return "; ".join(self.health.status().reasons)


async def test_ready_is_reported_once_after_the_first_successful_probe(
    fake_core: FakeCore,
) -> None:
    manager = FakeServiceManager()
    fake_core.error = ErrorInfo(Code.DRIVER, "no")
    fixture = HealthFixture(fake_core, TIMES, manager)
    fixture.start()
    await asyncio.sleep(100)
    assert "pool is being registered" in fixture.reasons()
    status = fixture.health.status()
    assert (status.healthy, status.starting) == (False, True)
    fixture.health.pool_grew()
    await eventually(lambda: "failed" in fixture.reasons())
    assert not fixture.health.status().starting
    assert manager.ready_count == 0
    assert "no" in manager.unhealthy_reports[0]
    fake_core.error = None
    await eventually(lambda: fixture.health.status().healthy)
    await eventually(lambda: manager.ready_count)
    fake_core.error = ErrorInfo(Code.DRIVER, "no")
    await eventually(lambda: "failed" in fixture.reasons())
    fake_core.error = None
    await eventually(lambda: fixture.health.status().healthy)
    assert manager.ready_count == 1
    assert [bool(why) for why in manager.unhealthy_reports] == [True, False, True, False]
    await fixture.stop()


async def test_a_first_probe_in_progress_is_not_unhealthy_before_its_deadline(
    fake_core: FakeCore,
) -> None:
    """The number of keep-alives before the deadline has no effect."""
    manager = FakeServiceManager(watchdog_seconds=0.03)
    fake_core.silent = True
    fixture = HealthFixture(fake_core, TIMES, manager)
    fixture.start()
    fixture.health.pool_grew()
    await asyncio.sleep(TIMES.deadline - 0.01)
    assert len(manager.keep_alives) > 400
    assert "no probe" in fixture.reasons()
    assert fixture.health.status().starting
    await eventually(lambda: any("running for" in why for why in manager.unhealthy_reports))
    assert not fixture.health.status().starting
    await fixture.stop()


async def test_no_keep_alive_while_the_device_worker_does_not_respond(
    fake_core: FakeCore,
) -> None:
    manager = FakeServiceManager(watchdog_seconds=1.5)
    fixture = HealthFixture(fake_core, TIMES, manager)
    fixture.start()
    fixture.health.pool_grew()
    await asyncio.sleep(60)
    assert max(b - a for a, b in pairwise(manager.keep_alives)) == pytest.approx(0.5)
    fixture.responds = False
    await eventually(lambda: "the device worker has not responded" in fixture.reasons())
    before = len(manager.keep_alives)
    await asyncio.sleep(60)
    assert len(manager.keep_alives) == before
    assert fixture.health.status().worker_lag >= TIMES.worker
    fixture.health.handle_pong(Pong(seconds(), None, None))
    fixture.responds = True
    await eventually(lambda: len(manager.keep_alives) > before)
    await eventually(lambda: fixture.health.status().healthy)
    await fixture.stop()


async def test_a_failing_device_does_not_stop_the_watchdog(fake_core: FakeCore) -> None:
    manager = FakeServiceManager(watchdog_seconds=1.5)
    fake_core.silent = True
    fixture = HealthFixture(fake_core, TIMES, manager)
    fixture.start()
    fixture.health.pool_grew()
    await asyncio.sleep(10 * TIMES.deadline)
    assert not fixture.health.status().healthy
    before = len(manager.keep_alives)
    await asyncio.sleep(5)
    assert len(manager.keep_alives) == before + 10
    await fixture.stop()


async def test_a_late_event_loop_is_reported(fake_core: FakeCore) -> None:
    fixture = HealthFixture(fake_core, TIMES, FakeServiceManager())
    fixture.start()
    fixture.health.pool_grew()
    await eventually(lambda: fixture.health.status().healthy)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.advance(2 * TIMES.every + TIMES.deadline + 1)  # a call that blocks it
    assert "the last probe was 26.0 s ago" in fixture.reasons()
    await eventually(lambda: "the event loop was" in fixture.reasons())
    assert fixture.health.status().loop_lag > TIMES.deadline
    await eventually(lambda: fixture.health.status().healthy)
    await fixture.stop()


async def test_a_requested_check_runs_a_fresh_probe(fake_core: FakeCore) -> None:
    fixture = HealthFixture(fake_core, TIMES, FakeServiceManager())
    fixture.start()
    fixture.health.pool_grew()
    assert (await fixture.health.check_health()).healthy
    before = len(fake_core.requests)
    assert (await fixture.health.check_health()).healthy
    assert len(fake_core.requests) == before  # the last result is used
    await asyncio.sleep(TIMES.fresh + 0.1)
    assert (await fixture.health.check_health()).healthy
    assert len(fake_core.requests) == before + 2
    await asyncio.sleep(TIMES.fresh + 0.1)
    fake_core.silent = True
    assert not (await fixture.health.check_health()).healthy
    await eventually(lambda: "running for" in fixture.reasons())
    await fixture.stop()


async def test_the_deadline_of_a_probe_counts_from_its_request() -> None:
    """The time of its start has no effect."""
    history = ProbeHistory(TIMES)
    history.request_probe()
    await asyncio.sleep(TIMES.deadline + 1)
    history.request_probe()
    assert "running for" in history.reasons(seconds())[0]
