"""What Prometheus reads: families of samples, made of one snapshot of the core.

The core counts, cheaply, where things happen; here its counts get names, units and words. Totals
only grow while the daemon lives, as rate() wants them; labels have few values, all of them known
from what is registered or from the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvferry.daemon.core.tally import BOUNDS, Histogram, Movement, Tally
from kvferry.proto.errors import Code
from kvferry.proto.status import DaemonStatus, HealthStatus, NamespaceStatus, PoolStatus

MOVED = ("direction", "mode")
WHOSE = ("namespace", "model")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A daemon at one moment."""

    status: DaemonStatus
    namespaces: tuple[NamespaceStatus, ...]
    tally: Tally


def families(snapshot: Snapshot) -> Iterator[Metric]:
    status = snapshot.status
    yield from _daemon(status)
    if status.health is not None:
        yield from _health(status.health)
    yield from _jobs(snapshot.tally)
    yield from _movements(snapshot.tally)
    yield from _pool(status.pool)
    yield from _namespaces(snapshot.namespaces)


def wedged() -> Iterator[Metric]:
    """What can be said of a daemon whose loop does not answer."""
    yield GaugeMetricFamily("kvferry_healthy", HEALTHY, 0)


HEALTHY = "Whether the daemon does its work: 1, or 0; /health tells why not."


EXPECTED = {str(Code.BUSY): 0, str(Code.CORRUPT_BLOCK): 0}
"""Errors that are counted from the start: rate() sees nothing in the first sample of a series."""


def _daemon(status: DaemonStatus) -> Iterator[Metric]:
    labels = ("version", "device", "device_name")
    about = GaugeMetricFamily("kvferry_build_info", "What runs where.", labels=labels)
    about.add_metric((status.version, status.device.uuid, status.device.name), 1)
    yield about
    yield GaugeMetricFamily(
        "kvferry_uptime_seconds", "Since the daemon was started.", status.uptime_seconds
    )
    yield GaugeMetricFamily("kvferry_sessions", "Connected clients.", status.sessions)
    left = status.verification
    yield GaugeMetricFamily(
        "kvferry_unverified_bytes",
        "Host blocks that an earlier daemon left and that are not verified yet.",
        0 if left is None else left.total_bytes - left.decided_bytes,
    )
    engines = GaugeMetricFamily(
        "kvferry_engine_present",
        "Engines that have host memory of their own: 1 here, 0 away.",
        labels=("engine",),
    )
    jobs = GaugeMetricFamily(
        "kvferry_jobs_under_way", "Jobs accepted and not yet ended.", labels=("engine",)
    )
    for engine in status.engines:
        engines.add_metric((engine.name,), int(engine.present))
        jobs.add_metric((engine.name,), engine.jobs)
    yield engines
    yield jobs
    errors = CounterMetricFamily(
        "kvferry_errors", "Errors that were answered, by their code.", labels=("code",)
    )
    for code, number in (EXPECTED | status.errors).items():
        errors.add_metric((code,), number)
    yield errors


def _health(health: HealthStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvferry_healthy", HEALTHY, int(health.healthy))
    yield GaugeMetricFamily(
        "kvferry_loop_lag_seconds",
        "How late the daemon's loop was, the worst of the last 10 s.",
        health.loop_lag,
    )
    yield GaugeMetricFamily(
        "kvferry_lane_lag_seconds",
        "How long the device's thread took to answer, the worst of the last 10 s.",
        health.lane_lag,
    )
    if health.probe_seconds is not None and health.probe_age is not None:
        yield GaugeMetricFamily(
            "kvferry_probe_seconds",
            "How long 4 KiB took to the device and back, the last time.",
            health.probe_seconds,
        )
        yield GaugeMetricFamily(
            "kvferry_probe_age_seconds", "Since that was tried last.", health.probe_age
        )
    ages = GaugeMetricFamily(
        "kvferry_oldest_job_seconds",
        "Since the oldest job under way was accepted; waiting: for the engine's own timeline.",
        labels=("waiting",),
    )
    for label, age in (("no", health.oldest_job), ("yes", health.held_job)):
        ages.add_metric((label,), age or 0.0)
    yield ages


def _jobs(tally: Tally) -> Iterator[Metric]:
    jobs = CounterMetricFamily("kvferry_jobs", "Jobs that ended.", labels=("direction", "outcome"))
    for (direction, outcome), number in tally.outcomes.items():
        jobs.add_metric((direction, outcome), number)
    yield jobs


def _movements(tally: Tally) -> Iterator[Metric]:
    moved = CounterMetricFamily(
        "kvferry_moved",
        "Bytes copied. direction: store to host memory, load from it; mode: direct, staged, cpu.",
        labels=MOVED,
        unit="bytes",
    )
    for labels, movement in tally.movements.items():
        moved.add_metric(labels, movement.nbytes)
    yield moved
    yield _histogram(
        "kvferry_job_device_seconds",
        "Time on the device of each job that was done.",
        tally,
        lambda movement: movement.device,
    )
    yield _histogram(
        "kvferry_job_queue_seconds",
        "From when a job was accepted until its first piece went to the device; the wait for the "
        "engine's own timeline is part of it.",
        tally,
        lambda movement: movement.queued,
    )


def _histogram(
    name: str, words: str, tally: Tally, which: Callable[[Movement], Histogram]
) -> Metric:
    family = HistogramMetricFamily(name, words, labels=MOVED)
    for labels, movement in tally.movements.items():
        histogram = which(movement)
        family.add_metric(labels, list(_buckets(histogram)), histogram.sum)
    return family


def _buckets(histogram: Histogram) -> Iterator[tuple[str, float]]:
    """(upper bound, how many are no larger)."""
    seen = 0
    for bound, number in zip((*BOUNDS, float("inf")), histogram.counts, strict=True):
        seen += number
        yield "+Inf" if bound == float("inf") else f"{bound:g}", seen


def _pool(pool: PoolStatus) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "kvferry_pool_bytes",
        "The host pool. reserved: of engines and namespaces, here or away.",
        labels=("state",),
    )
    states.add_metric(("reserved",), pool.reserved_bytes)
    states.add_metric(("free",), pool.size_bytes - pool.reserved_bytes)
    yield states
    yield GaugeMetricFamily(
        "kvferry_pool_pinned_bytes",
        "How much of it is registered with the device so far.",
        pool.pinned_bytes,
    )


def _namespaces(namespaces: tuple[NamespaceStatus, ...]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "kvferry_namespace_blocks", "Host blocks, by state.", labels=(*WHOSE, "state")
    )
    pinned = GaugeMetricFamily(
        "kvferry_namespace_pinned_blocks", "Of those ready, held by engines.", labels=WHOSE
    )
    lookups = CounterMetricFamily(
        "kvferry_namespace_lookups", "Keys looked up by engines.", labels=(*WHOSE, "result")
    )
    counts = {
        "stored": "Blocks whose store ended well.",
        "stores_skipped": "Blocks offered and left out: there already, or not offered often yet.",
        "evictions": "Blocks given up for others.",
    }
    counters = {
        field: CounterMetricFamily(f"kvferry_namespace_{field}", words, labels=WHOSE)
        for field, words in counts.items()
    }
    for space in namespaces:
        whose = space.name, space.fingerprint.model
        for state in ("free", "pending", "ready", "unverified", "doomed"):
            blocks.add_metric((*whose, state), getattr(space, state))
        pinned.add_metric(whose, space.pinned)
        lookups.add_metric((*whose, "hit"), space.hits)
        lookups.add_metric((*whose, "miss"), space.misses)
        for field, counter in counters.items():
            counter.add_metric(whose, getattr(space, field))
    yield from (blocks, pinned, lookups, *counters.values())
