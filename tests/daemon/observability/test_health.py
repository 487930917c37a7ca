"""The probe against a core that is told what to answer; the pulse, and what the manager hears."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvferry.daemon.core.actions import Pong
from kvferry.daemon.observability.health import Health, HealthTimeouts, ProbeHistory
from kvferry.daemon.observability.probe import HOST_BYTES, PAGE, Probe
from kvferry.proto.errors import Code, ErrorInfo, KVFerryError
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    ClientMessage,
    DaemonMessage,
    Error,
    Finished,
    JobResult,
    Outcome,
    Submit,
)
from kvferry.proto.specs import CPULoadStoreSpec, Direction

PATIENCE = 10.0


class Ferry:
    """Does at once what a probe asks for, on memory of its own, unless it is told otherwise."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, HOST_BYTES)
        self.anchor = ctypes.c_char.from_buffer(self.memory)
        self.device = [b"", b""]
        self.wrong = False
        self.silent = False
        self.error: ErrorInfo | None = None
        self.probe = Probe(self.say, ctypes.addressof(self.anchor))
        self.said: list[ClientMessage] = []

    def say(self, message: ClientMessage) -> None:
        self.said.append(message)
        if not self.silent:
            self.probe.receive_reply(self.answer(message))

    def answer(self, message: ClientMessage) -> DaemonMessage:
        if isinstance(message, AllocateKVCaches):
            region = HostRegion(2, PAGE, False)
            return Error(0, self.error) if self.error else Allocated(0, region, (), ())
        assert isinstance(message, Submit)
        direction = self.copy(message)
        outcome = Outcome.FAILED if self.error else Outcome.DONE
        return Finished((JobResult(message.job_id, direction, outcome, error=self.error),))

    def copy(self, message: Submit) -> Direction:
        load = isinstance(message.src, CPULoadStoreSpec)
        gpu, host = (message.dst, message.src) if load else (message.src, message.dst)
        assert not isinstance(gpu, type(None))
        block, at = int(gpu.block_ids[0]), int(host.block_ids[0]) * PAGE  # type: ignore[union-attr]
        if load:
            self.device[block] = self.memory[at : at + PAGE]
        elif not self.wrong:
            self.memory[at : at + PAGE] = self.device[block]
        return Direction.LOAD if load else Direction.STORE


@dataclass
class FakeServiceManager:
    """Notes what it is told, and when."""

    watchdog_seconds: float | None = None
    readies: int = 0
    troubles: list[str] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)

    def ready(self) -> None:
        self.readies += 1

    def report_unhealthy(self, why: str) -> None:
        self.troubles.append(why)

    def keep_alive(self) -> None:
        self.beats.append(time.monotonic())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def ferry() -> Ferry:
    return Ferry()


# The probe


async def test_a_round_goes_there_and_back(ferry: Ferry) -> None:
    for _ in range(3):
        assert await ferry.probe.run_round() < PATIENCE
        assert ferry.memory[:PAGE] == ferry.memory[PAGE:]
    assert [type(message) for message in ferry.said] == [AllocateKVCaches, *[Submit] * 6]
    assert ferry.device[0] != ferry.device[1]


async def test_other_bytes_than_went_are_found(ferry: Ferry) -> None:
    await ferry.probe.run_round()
    ferry.wrong = True
    with pytest.raises(KVFerryError, match="other bytes") as caught:
        await ferry.probe.run_round()
    assert caught.value.code == Code.COPY_FAILED


async def test_memory_that_is_not_to_be_had_is_asked_for_again(ferry: Ferry) -> None:
    ferry.error = ErrorInfo(Code.DRIVER, "out of memory")
    for _ in range(2):
        with pytest.raises(KVFerryError, match="out of memory"):
            await ferry.probe.run_round()
    ferry.error = None
    await ferry.probe.run_round()
    assert [type(message) for message in ferry.said[:3]] == [AllocateKVCaches] * 3


async def test_a_copy_that_fails_fails_the_round(ferry: Ferry) -> None:
    await ferry.probe.run_round()
    ferry.error = ErrorInfo(Code.COPY_FAILED, "no")
    with pytest.raises(KVFerryError, match="copy_failed"):
        await ferry.probe.run_round()


# Health


class Patient:
    """A daemon's health over a ferry; its device worker responds as long as it is told to."""

    def __init__(self, ferry: Ferry, patience: HealthTimeouts, manager: FakeServiceManager) -> None:
        self.moving = True
        self.health = Health(patience, ferry.probe, self.ping, manager)

    def ping(self, now: float) -> None:
        if self.moving:
            loop = asyncio.get_running_loop()
            loop.call_soon(self.health.handle_pong, Pong(now, None, None))

    def reasons(self) -> str:
        return "; ".join(self.health.status().reasons)


async def test_the_manager_hears_of_the_first_probe_that_passed(ferry: Ferry) -> None:
    manager = FakeServiceManager()
    ferry.error = ErrorInfo(Code.DRIVER, "no")
    patient = Patient(ferry, HealthTimeouts(every=0.01), manager)
    patient.health.start()
    await asyncio.sleep(0.05)
    assert "no probe" in patient.reasons()
    patient.health.pool_grew()
    await until(lambda: "failed" in patient.reasons())
    assert manager.readies == 0
    assert "no" in manager.troubles[0]
    ferry.error = None
    await until(lambda: patient.health.status().healthy)
    await until(lambda: manager.readies)
    ferry.error = ErrorInfo(Code.DRIVER, "no")
    await until(lambda: "failed" in patient.reasons())
    ferry.error = None
    await until(lambda: patient.health.status().healthy)
    assert manager.readies == 1
    assert [bool(why) for why in manager.troubles] == [True, False, True, False]
    patient.health.stop()


async def test_a_first_probe_under_way_is_no_trouble(ferry: Ferry) -> None:
    """However many pulses it takes, until its deadline."""
    manager = FakeServiceManager(watchdog_seconds=0.03)
    ferry.silent = True
    patient = Patient(ferry, HealthTimeouts(deadline=0.3), manager)
    patient.health.start()
    patient.health.pool_grew()
    await until(lambda: "no probe" in patient.reasons() and len(manager.beats) >= 5)
    await until(lambda: manager.troubles)
    assert "running for" in manager.troubles[0]
    patient.health.stop()


async def test_the_manager_hears_nothing_while_the_device_worker_does_not_respond(
    ferry: Ferry,
) -> None:
    manager = FakeServiceManager(watchdog_seconds=0.15)
    patient = Patient(ferry, HealthTimeouts(worker=0.2), manager)
    patient.health.start()
    patient.health.pool_grew()
    await until(lambda: len(manager.beats) >= 5)
    gaps = [b - a for a, b in zip(manager.beats, manager.beats[1:], strict=False)]
    assert min(gaps) < 0.15
    patient.moving = False
    await until(lambda: "the device worker has not responded" in patient.reasons())
    told = len(manager.beats)
    await asyncio.sleep(0.3)
    assert len(manager.beats) == told
    assert patient.health.status().worker_lag >= 0.2
    patient.health.handle_pong(Pong(time.monotonic(), None, None))
    patient.moving = True
    await until(lambda: len(manager.beats) > told)
    assert patient.health.status().healthy
    patient.health.stop()


async def test_a_failing_device_does_not_stop_the_watchdog(ferry: Ferry) -> None:
    manager = FakeServiceManager(watchdog_seconds=0.03)
    ferry.silent = True
    patient = Patient(ferry, HealthTimeouts(deadline=0.05), manager)
    patient.health.start()
    patient.health.pool_grew()
    await until(lambda: not patient.health.status().healthy)
    told = len(manager.beats)
    await until(lambda: len(manager.beats) > told + 3)
    patient.health.stop()


async def test_a_loop_that_was_late_is_told(ferry: Ferry) -> None:
    patient = Patient(
        ferry, HealthTimeouts(deadline=0.1), FakeServiceManager(watchdog_seconds=0.03)
    )
    patient.health.start()
    patient.health.pool_grew()
    await until(lambda: patient.health.status().healthy)
    time.sleep(0.3)
    await until(lambda: "the event loop was" in patient.reasons())
    assert patient.health.status().loop_lag > 0.1
    await until(lambda: patient.health.status().healthy)
    patient.health.stop()


async def test_who_asks_gets_a_fresh_probe(ferry: Ferry) -> None:
    timeouts = HealthTimeouts(every=60.0, deadline=0.5, fresh=0.0)
    patient = Patient(ferry, timeouts, FakeServiceManager())
    patient.health.start()
    patient.health.pool_grew()
    assert (await patient.health.check_health()).healthy
    before = len(ferry.said)
    assert (await patient.health.check_health()).healthy
    assert len(ferry.said) == before + 2
    ferry.silent = True
    assert not (await patient.health.check_health()).healthy
    await until(lambda: "running for" in patient.reasons())
    patient.health.stop()


async def test_a_probe_is_late_from_when_it_was_asked_for() -> None:
    """Who waits as long for it is told, however much later it began."""
    rounds = ProbeHistory(HealthTimeouts(deadline=0.02))
    rounds.request_probe()
    time.sleep(0.03)
    rounds.request_probe()
    assert "running for" in rounds.reasons(time.monotonic())[0]
