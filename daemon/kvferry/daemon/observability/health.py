"""Health of the daemon: a periodic probe, and how late the device worker and the event loop are.

    probe          a small block copied to the device and back, periodically and on request
    device worker  asked every second to respond; overdue after a time that no driver call explains
                   (mapping an engine's memory takes a while)
    event loop     a timer every second; it is late by as much as everything else on the loop

A job that waits for its engine's timeline does not make the daemon unhealthy. The service manager
gets READY after the first probe that passed, and keep-alives while both threads respond: a failing
device makes the daemon unhealthy, but a restart would not help. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvferry.daemon.core.actions import Pong
from kvferry.daemon.observability.probe import Probe
from kvferry.proto.errors import KVFerryError
from kvferry.proto.status import HealthStatus

PULSE = 1.0
# Number of pulses over which the maximum lag is reported.
LATELY = 10
# Seconds for which a probe counts as fresh.
FRESH = 1.0
# Seconds by which a timer may fire early.
TIMERS = 0.01

log = structlog.get_logger()


class Supervised(Protocol):
    """The service manager."""

    @property
    def watchdog_seconds(self) -> float | None: ...

    def ready(self) -> None: ...

    def alive(self) -> None: ...

    def unwell(self, why: str) -> None:
        """why: empty if the daemon is healthy again."""


@dataclass(frozen=True, slots=True)
class HealthTimeouts:
    """Seconds: interval of probes, deadline of a probe, deadline of the device worker."""

    every: float = 10.0
    deadline: float = 5.0
    worker: float = 30.0


class Health:
    """Call `start` once the server serves. listen: asks the device worker for a Pong.

    lost: why clients cannot find the daemon any more; None if they can.
    """

    def __init__(
        self,
        patience: HealthTimeouts,
        probe: Probe,
        ping: Callable[[float], None],
        supervisor: Supervised,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._patience = patience
        self._probe = probe
        self._ping = ping
        self._supervisor = supervisor
        self._lost = lost
        self._rounds = ProbeHistory(patience)
        # Since when the device worker owes a Pong.
        self._pinged: float | None = None
        self._last_pong = Pong(0.0, None, None)
        self._worker_lags = deque([0.0], LATELY)
        self._loop_lags = deque([0.0], LATELY)
        self._was_well: bool | None = None
        self._ready = False
        watchdog = supervisor.watchdog_seconds
        self._pulse_every = min(PULSE, watchdog / 3) if watchdog else PULSE
        self._pool_ready = asyncio.Event()
        self._wanted = asyncio.Event()
        self._ended = asyncio.Event()

    def start(self) -> None:
        self._probe.settle()
        self._loop = asyncio.get_running_loop()
        self._prober = self._loop.create_task(self._keep_probing())
        self._due = time.monotonic()
        self._pulse()

    def stop(self) -> None:
        self._prober.cancel()
        self._timer.cancel()

    def pool_grew(self) -> None:
        """Host memory was registered with the device: the probe can start."""
        self._pool_ready.set()

    def handle_pong(self, pong: Pong) -> None:
        """The device worker responds."""
        self._pinged = None
        self._last_pong = pong
        self._worker_lags.append(time.monotonic() - pong.posted)

    def status(self) -> HealthStatus:
        """The health as it is now."""
        now, rounds = time.monotonic(), self._rounds
        reasons = (*rounds.reasons(now), *self._late(now))
        return HealthStatus(
            healthy=not reasons,
            reasons=reasons,
            probe_seconds=rounds.seconds,
            probe_age=_age(rounds.ended, now),
            oldest_job=_age(self._last_pong.oldest, now),
            held_job=_age(self._last_pong.held, now),
            loop_lag=max(self._loop_lags),
            lane_lag=max(*self._worker_lags, self._owed(now)),
        )

    async def check(self) -> HealthStatus:
        """The health after a probe, unless the last one is fresh."""
        ended = self._rounds.ended
        if self._pool_ready.is_set() and (ended is None or time.monotonic() - ended > FRESH):
            self._ended.clear()
            self._rounds.want()
            self._wanted.set()
            with suppress(TimeoutError):  # the status says so
                await asyncio.wait_for(self._ended.wait(), self._patience.deadline + TIMERS)
        return self.status()

    async def _keep_probing(self) -> None:
        await self._pool_ready.wait()
        while True:
            self._wanted.clear()
            await self._rounds.run(self._probe)
            self._ended.set()
            self._tell()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), self._patience.every)

    def _pulse(self) -> None:
        now = time.monotonic()
        self._loop_lags.append(max(0.0, now - self._due))
        if self._pinged is None:
            self._pinged = now
            self._ping(now)
        if self._owed(now) <= self._patience.worker:
            self._supervisor.alive()
        self._tell()
        self._due = now + self._pulse_every
        self._timer = self._loop.call_later(self._pulse_every, self._pulse)

    def _tell(self) -> None:
        """Report changes of health to the log and the service manager, once each."""
        status = self.status()
        if status.healthy and not self._ready:
            self._ready = True
            self._supervisor.ready()
        if status.healthy is self._was_well or not (self._ready or self._rounds.tried):
            return
        if status.healthy:
            log.info("healthy", probe_seconds=status.probe_seconds)
            if self._was_well is False:
                self._supervisor.unwell("")
        else:
            log.error("unhealthy", reasons=list(status.reasons))
            self._supervisor.unwell("; ".join(status.reasons))
        self._was_well = status.healthy

    def _late(self, now: float) -> list[str]:
        reasons = []
        if self._owed(now) > self._patience.worker:
            reasons.append(f"the device worker has not responded for {self._owed(now):.1f} s")
        if (lag := max(self._loop_lags)) > self._patience.deadline:
            reasons.append(f"the event loop was {lag:.1f} s late")
        if (lost := self._lost()) is not None:
            reasons.append(lost)
        return reasons

    def _owed(self, now: float) -> float:
        """Seconds that the device worker has owed a Pong for."""
        return 0.0 if self._pinged is None else now - self._pinged


class ProbeHistory:
    """Outcomes of probes. Times are time.monotonic() in seconds."""

    def __init__(self, patience: HealthTimeouts) -> None:
        self._patience = patience
        self._began: float | None = None
        self._trouble: KVFerryError | None = None
        self.seconds: float | None = None
        self.ended: float | None = None

    def want(self) -> None:
        """Request a probe if none is running: its deadline counts from now on."""
        if self._began is None:
            self._began = time.monotonic()

    async def run(self, probe: Probe) -> None:
        self.want()
        try:
            self.seconds = await probe.round()
            self._trouble = None
        except KVFerryError as error:
            self._trouble = error
        self.ended, self._began = time.monotonic(), None

    @property
    def tried(self) -> bool:
        """Whether a probe has ended or is late."""
        late = self._running(time.monotonic()) > self._patience.deadline
        return late or self.ended is not None

    def _running(self, now: float) -> float:
        """Seconds that a probe has been running; 0 if none is."""
        return 0.0 if self._began is None else now - self._began

    def reasons(self, now: float) -> list[str]:
        """Why the probe makes the daemon unhealthy; empty if it does not."""
        if (running := self._running(now)) > self._patience.deadline:
            return [f"the probe has been running for {running:.1f} s"]
        if self.ended is None:  # and if there is one under way, it may yet be in time
            return ["no probe has completed yet"]
        if self._trouble is not None:
            return [f"the last probe failed: {self._trouble}"]
        if self.seconds is not None and self.seconds > self._patience.deadline:
            return [f"the last probe took {self.seconds:.1f} s"]
        if now - self.ended > 2 * self._patience.every + self._patience.deadline:
            return [f"the last probe was {now - self.ended:.1f} s ago"]
        return []


def _age(since: float | None, now: float) -> float | None:
    return None if since is None else max(0.0, now - since)
