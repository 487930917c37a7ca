"""Prometheus metrics, in a registry of their own.

Jobs and promotions are counted when they end, on the event loop (14 us per job). All other values
are the declared numbers of a status snapshot, which the metrics thread sets before each response.
Labels have few values: names of engines, namespaces and tiers, and constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.registry import Collector

from kvferry.daemon.core.actions import TransferCompleted
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import Direction, Part
from kvferry.proto.status import DaemonStatus, HealthStatus, NamespaceStatus
from kvferry.proto.status_numbers import Number, declared_labels, declared_numbers

# Seconds: 10 us to 50 s; of promotions 1 ms to 5 s.
BUCKETS = tuple(scale * 10**power for power in range(-5, 2) for scale in (1, 2.5, 5))
PROMOTION_BUCKETS = tuple(scale * 10**power for power in range(-3, 1) for scale in (1, 2.5, 5))
JOB_LABELS = "direction", "mode"


class JobMetrics:
    """Counts ended jobs and promotions. Refused jobs are counted as errors only."""

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
        self.promotions = Histogram(
            "kvferry_tier_promotion_seconds",
            "Time from the start of a promotion until its blocks were in the host pool.",
            ("tier",),
            buckets=PROMOTION_BUCKETS,
            registry=registry,
        )
        for direction in Direction:
            for outcome in (Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED):
                self._jobs.labels(direction, outcome)

    def count_job(self, mode: str, result: JobResult, report: TransferCompleted) -> None:
        """Count a job that has ended. Called by the core, on the event loop."""
        direction = result.direction
        self._jobs.labels(direction, result.outcome).inc()
        if result.outcome is Outcome.DONE:
            self._moved.labels(direction, mode).inc(result.nbytes)
            self._device.labels(direction, mode).observe(report.seconds)
            self._queue.labels(direction, mode).observe(report.queued)

    def observe_promotion(self, tier: str, seconds: float) -> None:
        """Count a promotion that has ended. Called on the event loop."""
        self.promotions.labels(tier).observe(seconds)


class StatusMetrics(Collector):
    """Exports the numbers that the latest status declares (proto/status_numbers.py)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.parts: Sequence[Part] = ()
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for part in chain.from_iterable(map(_all_parts, self.parts)):
            numbers, labels = declared_numbers(type(part)), declared_labels(type(part))
            of_part = {label: str(getattr(part, field)) for label, field in labels.items()}
            for field, number in numbers.items():
                if number.metric not in families:
                    sentence = _help(number, numbers)
                    families[number.metric] = Metric(number.metric, sentence, number.kind)
                ending = "_total" if number.kind == "counter" else ""
                for of_value, value in _values(number, getattr(part, field)):
                    each = of_part | dict(number.labels) | of_value
                    families[number.metric].add_sample(number.metric + ending, each, value)
        return families.values()


def _all_parts(value: object) -> Iterator[Part]:
    """A part of the status, and the parts in its fields."""
    match value:
        case Part():
            yield value
            for field in value.__struct_fields__:
                yield from _all_parts(getattr(value, field))
        case tuple():
            for item in value:
                yield from _all_parts(item)


def _help(number: Number, numbers: Mapping[str, Number]) -> str:
    """The sentence of a metric; if several fields have it, the sentences of all of them."""
    same = [each for each in numbers.values() if each.metric == number.metric]
    if len(same) == 1:
        return number.help
    return " ".join(f"{value}: {each.help}" for each in same for _, value in each.labels)


def _values(number: Number, value: Any) -> Iterator[tuple[dict[str, str], float]]:
    """The labels and value of each sample of a number."""
    if isinstance(value, dict):
        for key, each in (dict.fromkeys(number.from_start, 0) | value).items():
            parts = key if isinstance(key, tuple) else (key,)
            yield dict(zip(number.keys, parts, strict=True)), float(each)
    else:
        yield {}, number.if_none if value is None else float(value)


class Metrics:
    """All metrics (`registry`), and those of a daemon whose loop does not respond
    (`unresponsive`)."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry, self.unresponsive = CollectorRegistry(), CollectorRegistry()
        healthy = declared_numbers(HealthStatus)["healthy"]
        Gauge(healthy.metric, healthy.help, registry=self.unresponsive).set(0)
        for registry in (self.registry, self.unresponsive):
            ProcessCollector(registry=registry)
        self.jobs = JobMetrics(self.registry)
        self._status = StatusMetrics(self.registry)

    def update(self, status: DaemonStatus, namespaces: Sequence[NamespaceStatus]) -> None:
        """Set all values from one snapshot. Called only by the metrics thread."""
        self._status.parts = (status, *namespaces)
        for tier in status.tiers:
            self.jobs.promotions.labels(tier.name)  # exported before the first promotion
