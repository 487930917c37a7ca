"""Prometheus metrics, in a registry of their own.

Jobs are counted when they end, on the event loop (6 us per job). All other values are copied from a
status snapshot by `update`, on the metrics thread, before each scrape. Labels have few values, all
known from registrations or from the code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from kvferry.daemon.core.actions import TransferCompleted
from kvferry.proto.errors import Code
from kvferry.proto.messages import JobResult, Outcome
from kvferry.proto.specs import Direction
from kvferry.proto.status import DaemonStatus, EngineStatus, HealthStatus, NamespaceStatus

# Seconds: 10 us to 50 s.
BUCKETS = tuple(scale * 10**power for power in range(-5, 2) for scale in (1, 2.5, 5))
# Errors that are counted from the start: rate() sees nothing in the first sample of a series.
EXPECTED = str(Code.BUSY), str(Code.CORRUPT_BLOCK)
MOVED = "direction", "mode"
SPACE = "namespace", "model"
HEALTHY = "kvferry_healthy", "Whether the daemon does its work: 1, or 0; /health tells why not."


@dataclass(frozen=True, slots=True)
class _Moved:
    """The jobs of one direction that were copied in one way."""

    done: Counter
    nbytes: Counter
    device: Histogram
    queue: Histogram


class JobMetrics:
    """What became of jobs. Those that were refused never ran, and are not counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._jobs = Counter(
            "kvferry_jobs", "Jobs that ended.", ("direction", "outcome"), registry=registry
        )
        self._moved = Counter(
            "kvferry_moved_bytes",
            "Bytes copied. direction: store to host memory, load from it; mode: direct, staged, "
            "cpu.",
            MOVED,
            registry=registry,
        )
        self._device = Histogram(
            "kvferry_job_device_seconds",
            "Time on the device of each job that was done.",
            MOVED,
            buckets=BUCKETS,
            registry=registry,
        )
        self._queue = Histogram(
            "kvferry_job_queue_seconds",
            "From when a job was accepted until its first chunk was submitted to the device; the "
            "wait for the engine's own timeline is part of it.",
            MOVED,
            buckets=BUCKETS,
            registry=registry,
        )
        # By mode: a look-up by labels takes longer than to count, and hashes an enumeration.
        self._stores: dict[str, _Moved] = {}
        self._loads: dict[str, _Moved] = {}
        for direction in Direction:
            for outcome in (Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED):
                self._jobs.labels(direction, outcome)

    def count_job(self, mode: str, result: JobResult, report: TransferCompleted) -> None:
        """Count a job. Called by the core."""
        if result.outcome is not Outcome.DONE:
            self._jobs.labels(result.direction, result.outcome).inc()
            return
        modes = self._stores if result.direction is Direction.STORE else self._loads
        moved = modes.get(mode)
        if moved is None:
            moved = modes[mode] = self._metrics_of(result.direction, mode)
        moved.done.inc()
        moved.nbytes.inc(result.nbytes)
        moved.device.observe(report.seconds)
        moved.queue.observe(report.queued)

    def _metrics_of(self, direction: Direction, mode: str) -> _Moved:
        return _Moved(
            self._jobs.labels(direction, Outcome.DONE),
            self._moved.labels(direction, mode),
            self._device.labels(direction, mode),
            self._queue.labels(direction, mode),
        )


class FollowedCounter:
    """A Counter of what is counted elsewhere: it grows by as much as a total there has grown."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._counter = Counter(name, documentation, labels, registry=registry)
        self._seen: dict[tuple[str, ...], int] = {}

    def set_totals(self, totals: Mapping[tuple[str, ...], int]) -> None:
        """Take over all totals, by label values. One that went is shown no longer, and one that is
        less than before is another's: it is counted anew."""
        for labels, before in self._seen.items():
            if totals.get(labels, -1) < before:
                self._counter.remove(*labels)
        for labels, total in totals.items():
            before = self._seen.get(labels, 0)
            self._counter.labels(*labels).inc(total - before if total >= before else total)
        self._seen = dict(totals)


class Metrics:
    """All of a daemon, and what is left to say of one whose loop does not answer (`wedged`)."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry, self.wedged = CollectorRegistry(), CollectorRegistry()
        Gauge(*HEALTHY, registry=self.wedged).set(0)
        for registry in (self.registry, self.wedged):
            ProcessCollector(registry=registry)
        self.jobs = JobMetrics(self.registry)
        self._daemon = DaemonMetrics(self.registry)
        self._health = HealthMetrics(self.registry)
        self._namespaces = NamespaceMetrics(self.registry)

    def update(self, status: DaemonStatus, namespaces: Sequence[NamespaceStatus]) -> None:
        """Show a daemon as it was at one moment. Called by the metrics thread alone."""
        self._daemon.update(status)
        if status.health is not None:
            self._health.update(status.health)
        self._namespaces.update(namespaces)


class DaemonMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, words: str, *labels: str) -> Gauge:
            return Gauge(f"kvferry_{name}", words, labels, registry=registry)

        self._build = gauge("build_info", "What runs where.", "version", "device", "device_name")
        self._uptime = gauge("uptime_seconds", "Since the daemon was started.")
        self._sessions = gauge("sessions", "Connected clients.")
        self._unverified = gauge(
            "unverified_bytes",
            "Host blocks that an earlier daemon left and that are not verified yet.",
        )
        self._present = gauge(
            "engine_present",
            "Engines that have host memory of their own: 1 here, 0 away.",
            "engine",
        )
        self._jobs = gauge("jobs_under_way", "Jobs accepted and not yet ended.", "engine")
        self._pool = gauge(
            "pool_bytes",
            "The host pool. reserved: of engines and namespaces, here or away.",
            "state",
        )
        self._pinned = gauge(
            "pool_pinned_bytes", "How much of it is registered with the device so far."
        )
        self._errors = FollowedCounter(
            "kvferry_errors", "Errors that were answered, by their code.", ("code",), registry
        )

    def update(self, status: DaemonStatus) -> None:
        device, pool = status.device, status.pool
        self._build.labels(status.version, device.uuid, device.name).set(1)
        self._uptime.set(status.uptime_seconds)
        self._sessions.set(status.sessions)
        left = status.verification
        self._unverified.set(0 if left is None else left.total_bytes - left.decided_bytes)
        self._engines(status.engines)
        self._pool.labels("reserved").set(pool.reserved_bytes)
        self._pool.labels("free").set(pool.size_bytes - pool.reserved_bytes)
        self._pinned.set(pool.pinned_bytes)
        errors = dict.fromkeys(EXPECTED, 0) | status.errors
        self._errors.set_totals({(code,): number for code, number in errors.items()})

    def _engines(self, engines: Sequence[EngineStatus]) -> None:
        for gauge in (self._present, self._jobs):
            gauge.clear()
        for engine in engines:
            self._present.labels(engine.name).set(engine.present)
            self._jobs.labels(engine.name).set(engine.jobs)


class HealthMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, words: str, *labels: str) -> Gauge:
            return Gauge(f"kvferry_{name}", words, labels, registry=registry)

        self._healthy = Gauge(*HEALTHY, registry=registry)
        self._loop_lag = gauge(
            "loop_lag_seconds", "How late the daemon's loop was, the worst of the last 10 s."
        )
        self._worker_lag = gauge(
            "worker_lag_seconds",
            "How long the device worker took to respond, the worst of the last 10 s.",
        )
        self._probe = gauge(
            "probe_seconds",
            "How long 4 KiB took to the device and back, the last time; NaN before the first.",
        )
        self._probe_age = gauge(
            "probe_age_seconds", "Since that was tried last; NaN before the first."
        )
        self._oldest = gauge(
            "oldest_job_seconds",
            "Since the oldest job under way was accepted; waiting: for the engine's own timeline.",
            "waiting",
        )

    def update(self, health: HealthStatus) -> None:
        self._healthy.set(health.healthy)
        self._loop_lag.set(health.loop_lag)
        self._worker_lag.set(health.worker_lag)
        self._probe.set(_or_nan(health.probe_seconds))
        self._probe_age.set(_or_nan(health.probe_age))
        self._oldest.labels("no").set(health.oldest_job or 0)
        self._oldest.labels("yes").set(health.held_job or 0)


class NamespaceMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._blocks = Gauge(
            "kvferry_namespace_blocks",
            "Host blocks, by state.",
            (*SPACE, "state"),
            registry=registry,
        )
        self._pinned = Gauge(
            "kvferry_namespace_pinned_blocks",
            "Of those ready, held by engines.",
            SPACE,
            registry=registry,
        )
        self._lookups = FollowedCounter(
            "kvferry_namespace_lookups",
            "Keys looked up by engines.",
            (*SPACE, "result"),
            registry,
        )
        words = {
            "stored": "Blocks whose store ended well.",
            "stores_skipped": "Blocks offered and left out: there already, or not offered often "
            "yet.",
            "evictions": "Blocks given up for others.",
        }
        self._counters = {
            name: FollowedCounter(f"kvferry_namespace_{name}", text, SPACE, registry)
            for name, text in words.items()
        }

    def update(self, namespaces: Sequence[NamespaceStatus]) -> None:
        self._blocks.clear()
        self._pinned.clear()
        by_labels = {(space.name, space.fingerprint.model): space for space in namespaces}
        lookups: dict[tuple[str, ...], int] = {}
        for labels, space in by_labels.items():
            for state in ("free", "pending", "ready", "unverified", "orphaned"):
                self._blocks.labels(*labels, state).set(getattr(space, state))
            self._pinned.labels(*labels).set(space.pinned)
            lookups[*labels, "hit"] = space.hits
            lookups[*labels, "miss"] = space.misses
        self._lookups.set_totals(lookups)
        for name, counter in self._counters.items():
            counter.set_totals(
                {labels: getattr(space, name) for labels, space in by_labels.items()}
            )


def _or_nan(seconds: float | None) -> float:
    return float("nan") if seconds is None else seconds
