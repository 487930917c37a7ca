"""The dashboard and the alerts use metrics and labels that the daemon exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.daemon.core.actions import TransferCompleted
from kvferry.daemon.observability.metrics import Metrics
from kvferry.proto import status as proto_status
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import Direction

DEPLOY = Path(__file__).parents[2] / "deploy"
TIER = proto_status.TierStatus("disk", "on")
SIBLING = proto_status.SiblingStatus("/run/kvferry/GPU-1", "on")


def daemon_status(
    health: proto_status.HealthStatus,
    engines: tuple[proto_status.EngineStatus, ...],
    errors: dict[str, int],
) -> proto_status.DaemonStatus:
    """The status of a daemon with a tier, a sibling, and a session of each engine."""
    device, pool = proto_status.DeviceInfo("cpu", "cpu", "host"), proto_status.PoolStatus(1, 1, 1)
    sessions, totals = len(engines), proto_status.Totals()
    return proto_status.DaemonStatus(
        *("0", "b", 1, 1.0, device, pool, sessions, engines, totals, errors, None, health),
        tiers=(TIER,),
        siblings=(SIBLING,),
    )


def metrics() -> dict[str, set[str]]:
    """The labels of every sample of a daemon that uses all features."""
    fingerprint = Fingerprint("model", 4096)
    space = proto_status.NamespaceStatus("name", fingerprint, "lru", ("e",), *(1,) * 13)
    engine = proto_status.EngineStatus("e", True, 1, 1, 1)
    health = proto_status.HealthStatus(False, ("why",), 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    status = daemon_status(health, (engine,), {"busy": 1})
    exported = Metrics()
    result = JobResult(1, Direction.STORE, Outcome.DONE, 1, 1.0)
    exported.jobs.count_job("cpu", result, TransferCompleted(1, Outcome.DONE, 1.0))
    exported.update(status, (space,))
    found: dict[str, set[str]] = {}
    for family in exported.registry.collect():
        if not family.name.startswith("kvferry_"):
            continue
        assert family.documentation.endswith(".")
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_series_of_alerts_exist_from_the_start() -> None:
    """A first sample is not an increase, so the first failure would raise no alert."""
    status = daemon_status(proto_status.HealthStatus(True), (), {})
    exported = Metrics()
    exported.update(status, ())
    samples = [s for family in exported.registry.collect() for s in family.samples]
    alerts = (DEPLOY / "alerts.yml").read_text()
    queried = re.findall(r'(kvferry_\w+)\{(\w+)="(\w+)"\}', alerts)
    assert len(queried) >= 4
    for name, label, value in queried:
        assert any((s.name, s.labels.get(label)) == (name, value) for s in samples), (name, value)


def test_errors_that_are_counted_from_the_start_have_an_alert() -> None:
    """Only the alerts need these counters from the start."""
    alerts = (DEPLOY / "alerts.yml").read_text()
    for code in proto_status.ALERTED:
        assert f'kvferry_errors_total{{code="{code}"}}' in alerts


def dashboard() -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return decoded


def expressions() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    alerts = re.findall(r"(?m)^ +expr: (.+)$", (DEPLOY / "alerts.yml").read_text())
    assert len(alerts) == (DEPLOY / "alerts.yml").read_text().count("- alert:")
    return panels + alerts


@pytest.mark.parametrize("expression", expressions())
def test_metrics_in_rules_and_dashboards_exist(expression: str) -> None:
    known = metrics()
    names = re.findall(r"\bkvferry_\w+", expression)
    assert names
    for name in names:
        assert name in known, name
    for name, selector in re.findall(r"\b(kvferry_\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*[=!]", selector)) - {"instance"}
        assert labels <= known[name], name
    for group in re.findall(r"by \(([^)]*)\)", expression):
        wanted = {label.strip() for label in group.split(",")} - {"instance"}
        assert wanted <= set.union(*(known[name] for name in names))


def test_every_metric_is_used() -> None:
    """Only two metrics are neither on the dashboard nor in the alerts."""
    used = set(re.findall(r"\bkvferry_\w+", " ".join(expressions())))
    used |= {re.sub(r"_bucket$", end, name) for name in used for end in ("_count", "_sum")}
    unused = metrics().keys() - used
    assert unused == {"kvferry_uptime_seconds", "kvferry_probe_age_seconds"}


def test_panels_do_not_overlap() -> None:
    used_cells: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not used_cells & cells, panel["title"]
        used_cells |= cells
