"""Metrics: each job is counted once, and counters follow the totals of the core."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kvferry.daemon.core.actions import TransferCompleted
from kvferry.daemon.observability.followed_counter import FollowedCounter
from kvferry.daemon.observability.metrics import BUCKETS, Metrics
from kvferry.proto import status as proto_status
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import Direction

DEVICE, POOL = proto_status.DeviceInfo("cpu", "cpu", "host"), proto_status.PoolStatus(100, 60, 40)


def status(*engines: proto_status.EngineStatus, **errors: int) -> proto_status.DaemonStatus:
    health = proto_status.HealthStatus(True)
    return proto_status.DaemonStatus(
        "0", "b", 1, 1.0, DEVICE, POOL, 0, engines, proto_status.Totals(), errors, None, health
    )


def namespace_status(name: str, stored: int) -> proto_status.NamespaceStatus:
    counts = [*[1] * 10, stored, 1, 1]
    return proto_status.NamespaceStatus(
        name, proto_status.Fingerprint("model", 4096), "lru", (), *counts
    )


def test_a_histogram_counts_each_value_once_in_all_buckets_above_it() -> None:
    metrics, values = Metrics(), (0.0, BUCKETS[0], 3e-5, 0.2, 1e6)
    for number, seconds in enumerate(values):
        result = JobResult(number, Direction.LOAD, Outcome.DONE, 100, seconds)
        metrics.jobs.count_job("staged", result, TransferCompleted(number, Outcome.DONE, seconds))
    labels = {"direction": "load", "mode": "staged"}

    def sample(name: str, **more: str) -> float | None:
        return metrics.registry.get_sample_value(name, {**labels, **more})

    for bound in (*BUCKETS, float("inf")):
        le = "+Inf" if bound == float("inf") else str(float(bound))
        found = sample("kvferry_job_device_seconds_bucket", le=le)
        assert found == sum(value <= bound for value in values), bound
    assert sample("kvferry_job_device_seconds_sum") == pytest.approx(sum(values))
    assert sample("kvferry_moved_bytes_total") == 500


def test_a_job_that_was_not_done_counts_no_bytes() -> None:
    metrics = Metrics()
    result = JobResult(1, Direction.STORE, Outcome.CANCELLED, 0, 0.0)
    metrics.jobs.count_job("cpu", result, TransferCompleted(1, Outcome.CANCELLED))
    value = metrics.registry.get_sample_value
    assert value("kvferry_jobs_total", {"direction": "store", "outcome": "cancelled"}) == 1
    assert value("kvferry_jobs_total", {"direction": "store", "outcome": "done"}) == 0
    assert value("kvferry_moved_bytes_total", {"direction": "store", "mode": "cpu"}) is None


def test_counters_follow_totals_of_the_core() -> None:
    """If a total decreases, the counter restarts. If it disappears, its series is removed."""
    registry = CollectorRegistry()
    counter = FollowedCounter("events", "Events.", ("name",), registry)

    def samples() -> tuple[float | None, float | None]:
        a, b = (registry.get_sample_value("events_total", {"name": name}) for name in "ab")
        return a, b

    counter.set_totals({("a",): 5, ("b",): 0})
    assert samples() == (5, 0)
    counter.set_totals({("a",): 7, ("b",): 2})
    assert samples() == (7, 2)
    counter.set_totals({("a",): 3})
    assert samples() == (3, None)
    counter.set_totals({("a",): 3, ("b",): 1})
    assert samples() == (3, 1)


def test_series_of_removed_engines_are_dropped() -> None:
    metrics = Metrics()
    metrics.update(
        status(proto_status.EngineStatus("e", True, 1, 1, 1), busy=2), [namespace_status("n", 4)]
    )
    value = metrics.registry.get_sample_value
    labels = {"namespace": "n", "model": "model"}
    assert value("kvferry_engine_present", {"engine": "e"}) == 1
    assert value("kvferry_namespace_stored_total", labels) == 4
    assert value("kvferry_errors_total", {"code": "busy"}) == 2
    metrics.update(status(busy=3), [])
    assert value("kvferry_engine_present", {"engine": "e"}) is None
    assert value("kvferry_namespace_stored_total", labels) is None
    assert value("kvferry_errors_total", {"code": "busy"}) == 3


def test_a_tier_has_metrics_and_its_promotions_are_counted() -> None:
    metrics = Metrics()
    tier = proto_status.TierStatus("disk", "on", used_bytes=7, hits=3, read_bytes=5, deaths=2)
    metrics.update(msgspec.structs.replace(status(), tiers=(tier,)), [])
    metrics.tiers.observe_promotion("disk", 0.003)
    expected: dict[str, tuple[dict[str, str], float]] = {
        "on": ({}, 1),
        "used_bytes": ({}, 7),
        "lookups_total": ({"result": "hit"}, 3),
        "moved_bytes_total": ({"direction": "read"}, 5),
        "failures_total": ({"kind": "death"}, 2),
        "promotion_seconds_bucket": ({"le": "0.005"}, 1),
        "promotion_seconds_count": ({}, 1),
    }
    for name, (labels, value) in expected.items():
        sample = metrics.registry.get_sample_value(
            f"kvferry_tier_{name}", {"tier": "disk", **labels}
        )
        assert sample == value, name
    for state in ("off", "probing", "starting"):
        off = msgspec.structs.replace(tier, state=state)
        metrics.update(msgspec.structs.replace(status(), tiers=(off,)), [])
        assert metrics.registry.get_sample_value("kvferry_tier_on", {"tier": "disk"}) == 0
