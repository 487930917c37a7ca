"""Whether the daemon does its work: found out by doing some, and by counting what is late.

    probe    a small block to the device and back, now and then and when somebody asks (probe.py)
    worker   the device worker gets a Ping every second and answers with a Pong; overdue if that
             takes so long that no driver call explains it (to map an engine's memory takes a while)
    loop     a timer every second; how much later it went off is what everything else waited, too

A job that waits for its engine's timeline is the engine's affair, and makes nobody unhealthy. The
service manager hears that the daemon is ready after the first probe that passed, and that it is
alive for as long as loop and device worker advance: a device that fails makes the daemon unhealthy,
which operators see, but a restart does not mend it.
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
# Pulses over which the worst lag is told.
LATELY = 10
# A probe that is no older is new enough for who asks.
FRESH = 1.0
# Seconds by which a timer may go off early.
TIMERS = 0.01

log = structlog.get_logger()


class Supervised(Protocol):
    """What the service manager is told."""

    @property
    def watchdog_seconds(self) -> float | None: ...

    def ready(self) -> None: ...

    def alive(self) -> None: ...

    def unwell(self, why: str) -> None:
        """Empty: it is well again."""


@dataclass(frozen=True, slots=True)
class HealthTimeouts:
    """Seconds: how often to probe, how long a probe may take, how long a Pong may take."""

    every: float = 10.0
    deadline: float = 5.0
    lane: float = 30.0


class Health:
    """`start` once the server serves. ping: sends the device worker a Ping, posted at this time.

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
        """There is host memory now that the device can reach."""
        self._pool_ready.set()

    def handle_pong(self, pong: Pong) -> None:
        """The device worker responds."""
        self._pinged = None
        self._last_pong = pong
        self._worker_lags.append(time.monotonic() - pong.posted)

    def status(self) -> HealthStatus:
        """As it is now."""
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
        """As it is now, after a probe where the last one is not fresh."""
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
        if self._owed(now) <= self._patience.lane:
            self._supervisor.alive()
        self._tell()
        self._due = now + self._pulse_every
        self._timer = self._loop.call_later(self._pulse_every, self._pulse)

    def _tell(self) -> None:
        """Say once what changed."""
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
        if self._owed(now) > self._patience.lane:
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
    """What became of the probes. Times are those of time.monotonic."""

    def __init__(self, patience: HealthTimeouts) -> None:
        self._patience = patience
        self._began: float | None = None
        self._trouble: KVFerryError | None = None
        self.seconds: float | None = None
        self.ended: float | None = None

    def want(self) -> None:
        """One is to begin now, if none is under way: from now on it may be late."""
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
        """Whether one has ended, or is late: the first may take as long as any other."""
        late = self._running(time.monotonic()) > self._patience.deadline
        return late or self.ended is not None

    def _running(self, now: float) -> float:
        """How long one has been under way."""
        return 0.0 if self._began is None else now - self._began

    def reasons(self, now: float) -> list[str]:
        """What is wrong, in words."""
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
