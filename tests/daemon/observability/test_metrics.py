"""Metrics: each job is counted once, and series follow the status.

That each number of the status is exported: tests/test_status_numbers.py.
"""

from __future__ import annotations

import msgspec
import pytest

from kvferry.daemon.core.actions import TransferCompleted
from kvferry.daemon.observability.metrics import BUCKETS, Metrics
from kvferry.proto import status as proto_status
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import Direction

STATES = "on", "off", "probing", "starting"
READ_ONLY = proto_status.TierStatus("disk", "on", read_only="no space")
DEVICE, POOL = proto_status.DeviceInfo("cpu", "cpu", "host"), proto_status.PoolStatus(100, 60, 40)


def status(*engines: proto_status.EngineStatus) -> proto_status.DaemonStatus:
    health = proto_status.HealthStatus(True)
    return proto_status.DaemonStatus(
        "0", "b", 1, 1.0, DEVICE, POOL, 0, engines, proto_status.Totals(), {}, None, health
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


def test_series_of_removed_engines_are_dropped() -> None:
    metrics, engine = Metrics(), proto_status.EngineStatus("e", True, 1, 1, 1)
    metrics.update(status(engine), [])
    value = metrics.registry.get_sample_value
    assert value("kvferry_engine_present", {"engine": "e"}) == 1
    metrics.update(status(), [])
    assert value("kvferry_engine_present", {"engine": "e"}) is None


def test_promotions_are_counted_and_a_tier_without_any_shows_zero() -> None:
    metrics, labels = Metrics(), {"tier": "disk"}
    tiers = (proto_status.TierStatus("disk", "on"),)
    value = metrics.registry.get_sample_value
    metrics.update(msgspec.structs.replace(status(), tiers=tiers), [])
    assert value("kvferry_tier_promotion_seconds_count", labels) == 0
    metrics.jobs.observe_promotion("disk", 0.003)
    assert value("kvferry_tier_promotion_seconds_count", labels) == 1
    assert value("kvferry_tier_promotion_seconds_bucket", labels | {"le": "0.0025"}) == 0
    assert value("kvferry_tier_promotion_seconds_bucket", labels | {"le": "0.005"}) == 1


def test_values_that_follow_from_other_fields_are_exported() -> None:
    metrics = Metrics()
    full = msgspec.structs.replace(
        status(),
        verification=proto_status.VerificationStatus(7, 3),
        tiers=tuple(proto_status.TierStatus(name, name) for name in STATES),
    )
    metrics.update(full, [])
    value = metrics.registry.get_sample_value
    build = {"version": "0", "device": "cpu", "device_name": "host"}
    assert value("kvferry_build_info", build) == 1
    assert value("kvferry_pool_bytes", {"state": "free"}) == 60
    assert value("kvferry_unverified_bytes") == 4
    assert [value("kvferry_tier_on", {"tier": state}) for state in STATES] == [1, 0, 0, 0]
    metrics.update(msgspec.structs.replace(full, verification=None, tiers=(READ_ONLY,)), [])
    assert value("kvferry_unverified_bytes") == 0
    assert value("kvferry_tier_read_only", {"tier": "disk"}) == 1


def test_values_before_the_first_probe_and_without_jobs() -> None:
    metrics = Metrics()
    metrics.update(status(), [])
    value = metrics.registry.get_sample_value
    assert str(value("kvferry_probe_seconds")) == "nan"
    assert value("kvferry_oldest_job_seconds", {"waiting": "no"}) == 0
    # An error that has an alert is a series from the start.
    assert value("kvferry_errors_total", {"code": "corrupt_block"}) == 0
