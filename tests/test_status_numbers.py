"""A number that a part of the status declares is printed and exported, without any other change."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from prometheus_client import generate_latest
from rich.console import Console

from kvferry.client.cli.panels import render_screen
from kvferry.client.cli.status import as_json, print_status
from kvferry.client.cli.watcher import DaemonHistory, StatusSample
from kvferry.daemon.observability.metrics import Metrics
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import Part
from kvferry.proto.status import (
    DaemonStatus,
    DeviceInfo,
    EngineStatus,
    HealthStatus,
    NamespaceStatus,
    PoolStatus,
    TierStatus,
    Totals,
)
from kvferry.proto.status_numbers import counter, gauge

NAMESPACE = NamespaceStatus("n", Fingerprint("llama", 4096), "lru", (), 8, 4096, 8, *(0,) * 10)
STATUS = DaemonStatus(
    "0.1",
    "boot",
    1,
    1.0,
    DeviceInfo("cpu", "cpu", "host"),
    PoolStatus(1, 1, 1),
    1,
    (EngineStatus("e", True, 1, 1, 0),),
    Totals(),
    {},
    health=HealthStatus(True),
    tiers=(TierStatus("disk", "on"),),
)
# Each part that has rows of its own, and the prefix and labels of its metrics.
PARTS = [
    (STATUS, "", ""),
    (STATUS.pool, "pool_", ""),
    (STATUS.totals, "", ""),
    (STATUS.health, "", ""),
    (STATUS.engines[0], "", '{engine="e"}'),
    (STATUS.tiers[0], "tier_", '{tier="disk"}'),
    (NAMESPACE, "namespace_", '{model="llama",namespace="n"}'),
]


def extend(part: Part, hint: Any, value: Any) -> Any:
    """The same part with one more field, `late_bytes`."""
    fields = [("late_bytes", hint, 0)]
    extended = msgspec.defstruct("Extended", fields, bases=(type(part),))
    return extended(*msgspec.structs.astuple(part), value)


def put(value: Any, part: Part, extended: Part) -> Any:
    """Replace `part` in the status."""
    if value is part:
        return extended
    match value:
        case tuple():
            return tuple(put(each, part, extended) for each in value)
        case Part():
            fields = [put(getattr(value, f), part, extended) for f in value.__struct_fields__]
            return type(value)(*fields)
    return value


def printed(sample: StatusSample) -> tuple[str, str]:
    """The output of `kvferry status` and `kvferry top`."""
    console = Console(width=200, record=True, highlight=False, file=StringIO())
    print_status(sample.status, sample.namespaces, console)
    text = console.export_text()
    history = DaemonHistory(Path("/run/kvferry/cpu"))
    history.add_sample(sample, now=100.0)
    console.print(render_screen([history], 101.0, 200))
    return text, console.export_text()


def exported(status: DaemonStatus, namespaces: tuple[NamespaceStatus, ...] = ()) -> str:
    metrics = Metrics()
    metrics.update(status, namespaces)
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(
    ("part", "prefix", "labels"), PARTS, ids=[type(each[0]).__name__ for each in PARTS]
)
def test_a_declared_number_appears_everywhere(part: Part, prefix: str, labels: str) -> None:
    number = counter("Bytes that were late.", failure=True)
    extended = extend(part, Annotated[int, number], 3 << 20)
    status, namespaces = put((STATUS, (NAMESPACE,)), part, extended)
    as_text = json.dumps(as_json((status, namespaces)))
    assert as_text.count('"late_bytes": 3145728') == 1
    text, top = printed(StatusSample(status, namespaces))
    assert text.count("3 MiB late bytes") == 1
    assert "late bytes" in top
    assert top.count("3 MiB") == 1
    page, name = exported(status, namespaces), f"kvferry_{prefix}late_bytes_total"
    assert f"# HELP {name} Bytes that were late.\n# TYPE {name} counter\n" in page
    assert f"\n{name}{labels} 3.145728e+06\n" in page


def test_a_declaration_chooses_the_metric_and_the_text() -> None:
    tier = STATUS.tiers[0]
    number = gauge("Delay of the tier.", "delay_seconds", text="late by {}", cause="lock")
    extended = put(STATUS, tier, extend(tier, Annotated[int, number], 5))
    text, top = printed(StatusSample(extended, ()))
    assert "late by 5.0 s" in text
    assert "late by" not in top
    assert 'kvferry_tier_delay_seconds{cause="lock",tier="disk"} 5.0' in exported(extended)


def test_a_metric_of_several_fields_explains_each() -> None:
    tier = STATUS.tiers[0]
    number = counter("Keys that were late.", "lookups", text="", result="late")
    extended = put(STATUS, tier, extend(tier, Annotated[int, number], 5))
    sentences = r"hit: Keys found\. miss: Keys not found\. .* late: Keys that were late\."
    assert re.search(rf"# HELP kvferry_tier_lookups_total {sentences}\n", exported(extended))
    assert "late" not in "".join(printed(StatusSample(extended, ())))
