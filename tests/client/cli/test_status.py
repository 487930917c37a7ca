"""`kvferry status`, against a real daemon and with synthetic reports."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TypeAlias

import msgspec
import pytest
from rich.console import Console

from kvferry.client import LocalDaemon, OffloadClient, shared_empty
from kvferry.client.cli.status import print_status, summarize_health
from kvferry.proto.status import (
    DeviceInfo,
    EngineStatus,
    HealthStatus,
    PoolStatus,
    TierStatus,
    Totals,
)
from support.command_line import kvferry
from support.status_reports import FINGERPRINT, NAMESPACE, STATUS
from support.time_limits import TIMEOUT

Captured: TypeAlias = pytest.CaptureFixture[str]


def test_the_status_of_a_daemon(daemon: LocalDaemon, capsys: Captured) -> None:
    tensor = shared_empty((16, 4096))
    with OffloadClient(daemon.directory, engine="[red]llama") as client:
        client.register_kv_caches({"layer": tensor}, num_blocks=16, host_bytes=16 << 20)
        assert kvferry("status", "--directory", daemon.directory) == 0
        output = capsys.readouterr().out
        assert kvferry("status", "-d", daemon.runtime_dir, "--json") == 0
        status = json.loads(capsys.readouterr().out)
    for words in (
        f"pid {daemon.pid}",
        "64 MiB: 16 MiB reserved",
        "[red]llama",
        "connected",
        "stored 0 B in 0 jobs",
    ):
        assert words in output
    device = {"kind": "cpu", "uuid": "cpu", "name": "host memory", "staging_bytes": 0}
    assert (status["device"], status["pool"]["size_bytes"]) == (device, 64 << 20)
    assert status["totals"].keys() >= {"stored_bytes", "loaded_bytes", "failed"}
    assert status.keys() >= {"version", "boot_id", "uptime_seconds", "engines", "errors"}
    assert status["namespaces"] == []


def test_status_shows_the_hits_of_other_sizes(capsys: Captured) -> None:
    known = msgspec.structs.replace(
        NAMESPACE,
        saved_tokens=4096,
        saved_seconds=90.0,
        hit_rate_half=0.29,
        hit_rate=0.41,
        hit_rate_double=0.52,
        hit_rate_quadruple=0.58,
    )
    print_status(STATUS, (NAMESPACE, known), Console(width=300, highlight=False))
    shown = capsys.readouterr().out
    assert "4,096 tokens loaded, 1 min 30 s of computing saved" in shown
    rates = (
        "41% of prompts found with these blocks, 29% with half, 52% with twice, 58% with four "
        "times as many"
    )
    assert shown.count("of prompts found") == shown.count(rates) == 1


def test_status_shows_namespaces(capsys: Captured) -> None:
    replace = msgspec.structs.replace
    ranked = replace(FINGERPRINT, rank=1, world_size=8)
    without_engine = replace(
        NAMESPACE, fingerprint=ranked, policy="arc", engines=(), hits=0, misses=0, shortfall="why"
    )
    print_status(STATUS, (NAMESPACE, without_engine), Console(width=80, highlight=False))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first, second = (lines[at:] for at, line in enumerate(lines) if line.startswith("model "))
    counts = (
        "1,000 free, 4 pending, 261,140 ready, 12 pinned, 300,001 stored, 2 stores skipped, "
        "38,861 evicted"
    )
    blocks = "512 GiB: 262,144 blocks of 2 MiB"
    assert " ".join(first).partition(" model ")[0].strip() == (
        f"model    {FINGERPRINT.model} namespace {NAMESPACE.name}, lru, llama-0, llama-1 "
        f"{blocks}, 93% hits, {counts}"
    )
    assert " ".join(second) == (
        f"model    {FINGERPRINT.model}, rank 1 of 8 namespace {NAMESPACE.name}, arc, no engine "
        f"{blocks}, {counts} less than asked for: why"
    )


@pytest.mark.parametrize("width", [80, 60, 40])
def test_status_keeps_lines_within_the_width_and_names_whole(width: int, capsys: Captured) -> None:
    full = msgspec.structs.replace(
        STATUS,
        device=DeviceInfo("cuda", f"GPU-{'0123abcd-' * 4}", "NVIDIA H100 80GB HBM3"),
        pool=PoolStatus(100 << 30, 1023 << 20, 1023 << 20),
        engines=(EngineStatus("meta-llama-0", True, 262144, 2 << 20, 64, kept_bytes=1 << 40),),
        totals=Totals(10**6, 10**6, 10**15, 10**15, 10**4, 10**4),
        errors={"cache_full": 1000, "key_absent": 1000, "deadline": 1000},
        tiers=(TierStatus("disk", "off", 1 << 40, 1 << 38, 10**6, 10**4, 5, errors=5, deaths=5),),
    )
    print_status(full, (NAMESPACE,), Console(width=width, highlight=False))
    lines = capsys.readouterr().out.splitlines()
    for name in (full.device.uuid, full.boot_id, FINGERPRINT.model, NAMESPACE.name):
        assert sum(name in line for line in lines) == 1
    # A line that is longer has only a label and one part, which stays whole.
    for line in lines[1:]:
        assert len(line) <= width or ", " not in line.rstrip(",")


DISK = TierStatus("disk", "off", failure="/x is in use; give each daemon a path of its own")


@pytest.mark.parametrize(
    ("health", "tiers", "row", "line"),
    [
        (HealthStatus(True), (), "healthy", "healthy"),
        (
            HealthStatus(False, ("the host pool is being registered",), starting=True),
            (DISK,),
            "starting: the host pool is being registered (25% of 8 MiB are registered)",
            "starting: the host pool is being registered (25% of 8 MiB are registered)",
        ),
        (HealthStatus(False, ("late",)), (), "unhealthy: late", "late"),
        (
            HealthStatus(True),
            (DISK,),
            f"unhealthy: tier disk: {DISK.failure}",
            f"tier disk: {DISK.failure}",
        ),
        (None, (DISK,), "", f"tier disk: {DISK.failure}"),
        (None, (), "", "it replies, without a health report"),
    ],
)
def test_health_in_one_line(
    health: HealthStatus | None,
    tiers: tuple[TierStatus, ...],
    row: str,
    line: str,
    capsys: Captured,
) -> None:
    pool = PoolStatus(8 << 20, 2 << 20, 0)
    report = msgspec.structs.replace(STATUS, health=health, tiers=tiers, pool=pool)
    is_healthy = line.startswith(("healthy", "it replies"))
    assert summarize_health(report) == (is_healthy, line)
    print_status(report, (), Console(width=120, highlight=False))
    lines = capsys.readouterr().out.splitlines()
    assert [each for each in lines if each.startswith("health ")] == (
        [f"health   {row}"] * bool(row)
    )
    (reserved,) = [each for each in lines if "reserved" in each]
    assert reserved.endswith(", 2 MiB pinned, being registered: 25%")


def test_status_needs_no_torch(daemon: LocalDaemon) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvferry.client.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "status", "-d", str(daemon.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (0, "")
