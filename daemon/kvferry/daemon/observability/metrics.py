"""Prometheus metrics, in a registry of their own.

Jobs are counted when they end, on the event loop (6 us per job). `update` copies all other values
from a status snapshot, on the metrics thread, before each response. Labels have few values: names
of engines and namespaces, and constants.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from kvferry.daemon.observability.followed_counter import FollowedCounter
from kvferry.daemon.observability.tier_metrics import TierMetrics
from kvferry.proto.errors import Code
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import Direction
from kvferry.proto.status import DaemonStatus, EngineStatus, HealthStatus, NamespaceStatus

# Seconds: 10 us to 50 s.
BUCKETS = tuple(scale * 10**power for power in range(-5, 2) for scale in (1, 2.5, 5))
# Errors that are shown as 0 from the start: rate() ignores the first sample of a series.
EXPECTED = str(Code.BUSY), str(Code.CORRUPT_BLOCK)
JOB_LABELS = "direction", "mode"
NAMESPACE_LABELS = "namespace", "model"
HEALTHY = "kvferry_healthy", "Whether the daemon is healthy: 1 or 0; /health has the reasons."


@dataclass(frozen=True, slots=True)
class _ModeMetrics:
    """Metrics of the jobs of one direction and copy mode."""

    done: Counter
    nbytes: Counter
    device: Histogram
    queue: Histogram


class JobMetrics:
    """Counts ended jobs. Refused jobs are counted as errors only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._jobs = Counter(
            "kvferry_jobs", "Jobs that ended.", ("direction", "outcome"), registry=registry
        )
        self._moved = Counter(
            "kvferry_moved_bytes",
            "Bytes copied. direction: store (GPU to host) or load; mode: direct, staged or cpu.",
            JOB_LABELS,
            registry=registry,
        )
        self._device = Histogram(
            "kvferry_job_device_seconds",
            "Time on the device of each completed job.",
            JOB_LABELS,
            buckets=BUCKETS,
            registry=registry,
        )
        self._queue = Histogram(
            "kvferry_job_queue_seconds",
            "Time from acceptance of a job until its first chunk was submitted to the device, "
            "including the wait for the engine's timeline.",
            JOB_LABELS,
            buckets=BUCKETS,
            registry=registry,
        )
        # By mode: a lookup by labels takes longer than counting.
        self._stores: dict[str, _ModeMetrics] = {}
        self._loads: dict[str, _ModeMetrics] = {}
        for direction in Direction:
            for outcome in (Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED):
                self._jobs.labels(direction, outcome)

    def count_job(self, mode: str, result: JobResult, report: TransferCompleted) -> None:
        """Count a job that has ended. Called by the core, on the event loop."""
        if result.outcome is not Outcome.DONE:
            self._jobs.labels(result.direction, result.outcome).inc()
            return
        modes = self._stores if result.direction is Direction.STORE else self._loads
        metrics = modes.get(mode)
        if metrics is None:
            metrics = modes[mode] = self._metrics_of(result.direction, mode)
        metrics.done.inc()
        metrics.nbytes.inc(result.nbytes)
        metrics.device.observe(report.seconds)
        metrics.queue.observe(report.queued)

    def _metrics_of(self, direction: Direction, mode: str) -> _ModeMetrics:
        return _ModeMetrics(
            self._jobs.labels(direction, Outcome.DONE),
            self._moved.labels(direction, mode),
            self._device.labels(direction, mode),
            self._queue.labels(direction, mode),
        )


class Metrics:
    """All metrics (`registry`), and those of a daemon whose loop does not respond
    (`unresponsive`)."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry, self.unresponsive = CollectorRegistry(), CollectorRegistry()
        Gauge(*HEALTHY, registry=self.unresponsive).set(0)
        for registry in (self.registry, self.unresponsive):
            ProcessCollector(registry=registry)
        self.jobs = JobMetrics(self.registry)
        self._daemon = DaemonMetrics(self.registry)
        self._health = HealthMetrics(self.registry)
        self._namespaces = NamespaceMetrics(self.registry)
        self.tiers = TierMetrics(self.registry)

    def update(self, status: DaemonStatus, namespaces: Sequence[NamespaceStatus]) -> None:
        """Set all values from one snapshot. Called only by the metrics thread."""
        self._daemon.update(status)
        if status.health is not None:
            self._health.update(status.health)
        self._namespaces.update(namespaces)
        self.tiers.update(status.tiers)


class DaemonMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, description: str, *labels: str) -> Gauge:
            return Gauge(f"kvferry_{name}", description, labels, registry=registry)

        self._build = gauge(
            "build_info",
            "Version of the daemon, and its device.",
            "version",
            "device",
            "device_name",
        )
        self._uptime = gauge("uptime_seconds", "Time since the start of the daemon.")
        self._sessions = gauge("sessions", "Connected clients.")
        self._unverified = gauge(
            "unverified_bytes",
            "Bytes of host blocks of an earlier daemon that are not verified yet.",
        )
        self._present = gauge(
            "engine_present",
            "Engines with a region of the pool: 1 registered, 0 disconnected.",
            "engine",
        )
        self._jobs = gauge("jobs_in_flight", "Jobs in flight.", "engine")
        self._pool = gauge(
            "pool_bytes",
            "Bytes of the host pool. reserved: regions of engines and namespaces.",
            "state",
        )
        self._pinned = gauge(
            "pool_pinned_bytes", "Bytes of the host pool that are registered with the device."
        )
        self._errors = FollowedCounter(
            "kvferry_errors", "Error replies, by code.", ("code",), registry
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
        def gauge(name: str, description: str, *labels: str) -> Gauge:
            return Gauge(f"kvferry_{name}", description, labels, registry=registry)

        self._healthy = Gauge(*HEALTHY, registry=registry)
        self._loop_lag = gauge(
            "loop_lag_seconds", "Largest delay of the event loop in the last 10 s."
        )
        self._worker_lag = gauge(
            "worker_lag_seconds",
            "Longest response time of the device worker in the last 10 s.",
        )
        self._probe = gauge(
            "probe_seconds",
            "Duration of the last probe (4 KiB to the device and back); NaN before the first one.",
        )
        self._probe_age = gauge(
            "probe_age_seconds", "Time since the end of the last probe; NaN before the first one."
        )
        self._oldest = gauge(
            "oldest_job_seconds",
            "Time since the oldest job in flight was accepted. waiting: whether it waits for the "
            "engine's timeline.",
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
            (*NAMESPACE_LABELS, "state"),
            registry=registry,
        )
        self._pinned = Gauge(
            "kvferry_namespace_pinned_blocks",
            "Ready host blocks that are pinned by engines or loads.",
            NAMESPACE_LABELS,
            registry=registry,
        )
        self._lookups = FollowedCounter(
            "kvferry_namespace_lookups",
            "Keys that engines have looked up.",
            (*NAMESPACE_LABELS, "result"),
            registry,
        )
        descriptions = {
            "stored": "Blocks that were stored.",
            "stores_skipped": "Blocks that were offered and not stored: they were present, or "
            "store_threshold was not reached.",
            "evictions": "Blocks that were evicted.",
        }
        self._counters = {
            name: FollowedCounter(f"kvferry_namespace_{name}", text, NAMESPACE_LABELS, registry)
            for name, text in descriptions.items()
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
