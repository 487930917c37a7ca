"""The health of the daemon: a periodic probe, and the lags of the device worker and the event loop.

    probe          copies a small block to the device and back, periodically and on request
    device worker  gets a Ping every second. Its Pong has a deadline that is longer than any driver
                   call takes, such as mapping an engine's memory
    event loop     a timer fires every second; its delay is the lag of the loop

A job that waits for its engine's timeline does not make the daemon unhealthy. The service manager
gets READY after the first successful probe. It gets keep-alives while both threads respond, also if
the probe fails: a restart does not repair a device. Event loop only.
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

# Seconds between two pulses: a Ping, a measurement of the loop, a keep-alive.
PULSE = 1.0
# Number of pulses over which the maximum lag is reported.
LAG_PULSES = 10
# Why a daemon is not healthy yet, until the first chunk of its pool is registered.
REGISTERING = "the host pool is being registered; the first probe follows"
# Seconds by which a timer may fire early.
TIMER_TOLERANCE = 0.01

log = structlog.get_logger()


class Supervised(Protocol):
    """The service manager."""

    @property
    def watchdog_seconds(self) -> float | None: ...

    def ready(self) -> None: ...

    def keep_alive(self) -> None: ...

    def report_unhealthy(self, why: str) -> None:
        """why: empty if the daemon is healthy again."""


@dataclass(frozen=True, slots=True)
class HealthTimeouts:
    """Seconds: interval of probes, deadline of a probe, deadline of the device worker.

    fresh: for which the result of a probe is used again.
    """

    every: float = 10.0
    deadline: float = 5.0
    worker: float = 30.0
    fresh: float = 1.0


class Health:
    """Checks the health while `run` runs.

    ping: posts a Ping to the device worker; its argument is time.monotonic(). problem: returns why
    clients cannot find the daemon; None if they can.
    """

    def __init__(
        self,
        timeouts: HealthTimeouts,
        probe: Probe,
        ping: Callable[[float], None],
        supervisor: Supervised,
        problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._timeouts = timeouts
        self._probe = probe
        self._ping = ping
        self._supervisor = supervisor
        self._endpoint_problem = problem
        self._history = ProbeHistory(timeouts)
        # Time of the Ping that has no Pong yet.
        self._pinged: float | None = None
        self._last_pong = Pong(0.0, None, None)
        self._worker_lags = deque([0.0], LAG_PULSES)
        self._loop_lags = deque([0.0], LAG_PULSES)
        self._was_healthy: bool | None = None
        self._ready = False
        watchdog = supervisor.watchdog_seconds
        self._pulse_every = min(PULSE, watchdog / 3) if watchdog else PULSE
        self._pool_ready = asyncio.Event()
        self._wanted = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Send pulses, and probe once the first chunk of the pool is registered, until
        cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_probing())
            due = time.monotonic()
            while True:
                now = time.monotonic()
                self._pulse(now, now - due)
                due = now + self._pulse_every
                await asyncio.sleep(self._pulse_every)

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
        return self._status(time.monotonic())

    def _status(self, now: float) -> HealthStatus:
        history = self._history
        probe = history.reasons(now) if self._pool_ready.is_set() else [REGISTERING]
        late = self._late_reasons(now)
        reasons = (*probe, *late)
        return HealthStatus(
            healthy=not reasons,
            starting=not (history.tried(now) or late),
            reasons=reasons,
            probe_seconds=history.seconds,
            probe_age=_age(history.ended, now),
            oldest_job=_age(self._last_pong.oldest, now),
            held_job=_age(self._last_pong.held, now),
            loop_lag=max(self._loop_lags),
            worker_lag=max(*self._worker_lags, self._pong_overdue(now)),
        )

    async def check_health(self) -> HealthStatus:
        """The health after a new probe, or after the last one if it is fresh (HealthTimeouts).

        Waits until the deadline of a probe at most.
        """
        ended = self._history.ended
        if self._pool_ready.is_set() and (
            ended is None or time.monotonic() - ended > self._timeouts.fresh
        ):
            self._ended.clear()
            self._history.request_probe()
            self._wanted.set()
            with suppress(TimeoutError):  # the status contains the reason
                await asyncio.wait_for(
                    self._ended.wait(), self._timeouts.deadline + TIMER_TOLERANCE
                )
        return self.status()

    async def _keep_probing(self) -> None:
        await self._pool_ready.wait()
        while True:
            self._wanted.clear()
            await self._history.run_probe(self._probe)
            self._ended.set()
            self._report_changes()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), self._timeouts.every)

    def _pulse(self, now: float, loop_lag: float) -> None:
        self._loop_lags.append(max(0.0, loop_lag))
        if self._pinged is None:
            self._pinged = now
            self._ping(now)
        if self._pong_overdue(now) <= self._timeouts.worker:
            self._supervisor.keep_alive()
        self._report_changes()

    def _report_changes(self) -> None:
        """Report changes of health to the log and the service manager, once each."""
        now = time.monotonic()
        status = self._status(now)
        if status.healthy and not self._ready:
            self._ready = True
            self._supervisor.ready()
        if status.healthy is self._was_healthy or not (self._ready or self._history.tried(now)):
            return
        if status.healthy:
            log.info("healthy", probe_seconds=status.probe_seconds)
            if self._was_healthy is False:
                self._supervisor.report_unhealthy("")
        else:
            log.error("unhealthy", reasons=list(status.reasons))
            self._supervisor.report_unhealthy("; ".join(status.reasons))
        self._was_healthy = status.healthy

    def _late_reasons(self, now: float) -> list[str]:
        reasons = []
        if self._pong_overdue(now) > self._timeouts.worker:
            reasons.append(
                f"the device worker has not responded for {self._pong_overdue(now):.1f} s"
            )
        if (lag := max(self._loop_lags)) > self._timeouts.deadline:
            reasons.append(f"the event loop was {lag:.1f} s late")
        if (problem := self._endpoint_problem()) is not None:
            reasons.append(problem)
        return reasons

    def _pong_overdue(self, now: float) -> float:
        """Seconds since the Ping that has no Pong yet; 0 if there is none."""
        return 0.0 if self._pinged is None else now - self._pinged


class ProbeHistory:
    """The outcome of the last probe, and the time of a running one. Times: time.monotonic()."""

    def __init__(self, timeouts: HealthTimeouts) -> None:
        self._timeouts = timeouts
        self._began: float | None = None
        self._error: KVFerryError | None = None
        self.seconds: float | None = None
        self.ended: float | None = None

    def request_probe(self) -> None:
        """Start the deadline of the next probe, unless one is running."""
        if self._began is None:
            self._began = time.monotonic()

    async def run_probe(self, probe: Probe) -> None:
        """Run a probe and store its outcome."""
        self.request_probe()
        try:
            self.seconds = await probe.run_round()
            self._error = None
        except KVFerryError as error:
            self._error = error
        self.ended, self._began = time.monotonic(), None

    def tried(self, now: float) -> bool:
        """Whether a probe has ended or is late."""
        late = self._running(now) > self._timeouts.deadline
        return late or self.ended is not None

    def _running(self, now: float) -> float:
        """Seconds that a probe has been running; 0 if none is."""
        return 0.0 if self._began is None else now - self._began

    def reasons(self, now: float) -> list[str]:
        """Why the probe makes the daemon unhealthy; empty if it does not."""
        if (running := self._running(now)) > self._timeouts.deadline:
            return [f"the probe has been running for {running:.1f} s"]
        if self.ended is None:
            return ["no probe has completed yet"]
        if self._error is not None:
            return [f"the last probe failed: {self._error}"]
        if self.seconds is not None and self.seconds > self._timeouts.deadline:
            return [f"the last probe took {self.seconds:.1f} s"]
        if now - self.ended > 2 * self._timeouts.every + self._timeouts.deadline:
            return [f"the last probe was {now - self.ended:.1f} s ago"]
        return []


def _age(since: float | None, now: float) -> float | None:
    return None if since is None else max(0.0, now - since)
