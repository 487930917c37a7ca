"""`kvferry status`, against a real daemon and with synthetic reports."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TypeAlias

import msgspec
import pytest
from rich.console import Console

from kvferry.client import Fingerprint, LocalDaemon, OffloadClient, shared_empty
from kvferry.client.cli.status import as_json, fetch_status, print_status
from kvferry.proto.status import NamespaceStatus
from support.command_line import kvferry

Captured: TypeAlias = pytest.CaptureFixture[str]


def test_status_shows_pool_engines_and_totals(daemon: LocalDaemon, capsys: Captured) -> None:
    tensor = shared_empty((16, 4096))
    with OffloadClient(daemon.directory, engine="[red]llama") as client:
        client.register_kv_caches({"layer": tensor}, num_blocks=16, host_bytes=16 << 20)
        assert kvferry("status", "--directory", daemon.directory) == 0
    output = capsys.readouterr().out
    assert f"pid {daemon.pid}" in output
    assert "64 MiB: 16 MiB reserved" in output
    assert "[red]llama" in output
    assert "connected" in output
    assert "stored 0 B in 0 jobs" in output


def test_status_json_names_every_field(daemon: LocalDaemon, capsys: Captured) -> None:
    assert kvferry("status", "-d", daemon.runtime_dir, "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert status["device"] == {
        "kind": "cpu",
        "uuid": "cpu",
        "name": "host memory",
        "staging_bytes": 0,
    }
    assert status["pool"]["size_bytes"] == 64 << 20
    assert status["totals"].keys() >= {"stored_bytes", "loaded_bytes", "failed"}
    assert status.keys() >= {"version", "boot_id", "uptime_seconds", "engines", "errors"}
    assert status["namespaces"] == []


FINGERPRINT = Fingerprint("[red]meta-llama/Llama-3.1-70B", 2 << 20, extra=(("pages", "16"),))
NAMESPACE = NamespaceStatus(
    FINGERPRINT.name,
    FINGERPRINT,
    "lru",
    ("llama-0", "llama-1"),
    blocks=262144,
    block_bytes=2 << 20,
    free=1000,
    pending=4,
    ready=261140,
    unverified=0,
    orphaned=0,
    pinned=12,
    hits=93,
    misses=7,
    stored=300001,
    stores_skipped=2,
    evictions=38861,
)


def test_status_shows_namespaces(daemon: LocalDaemon, capsys: Captured) -> None:
    report, namespaces = fetch_status(daemon.directory)
    assert namespaces == ()
    replace = msgspec.structs.replace
    ranked = replace(FINGERPRINT, rank=1, world_size=8)
    without_engine = replace(
        NAMESPACE, fingerprint=ranked, policy="arc", engines=(), hits=0, misses=0
    )
    print_status(report, (NAMESPACE, without_engine), Console(width=80, highlight=False))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[1:] for line in lines if "262,144" in line]
    counts = ["262,144", "2", "MiB", "261,140", "12", "1,000", "93%", "38,861"]
    assert rows == [counts, [*counts[:-2], "-", "38,861"]]
    names = " ".join(line[:17].strip() for line in lines)
    assert names.replace(" ", "").count(FINGERPRINT.model) == 2
    assert names.count(FINGERPRINT.name) == 2
    words = ("lru llama-0, llama-1", "arc, rank 1 of 8", "no engine")
    assert all(word in names for word in words)


def test_namespaces_as_json_name_every_field() -> None:
    (read,) = json.loads(msgspec.json.encode(as_json((NAMESPACE,))))
    assert list(read) == list(NamespaceStatus.__struct_fields__)
    assert read["fingerprint"]["host_block_bytes"] == 2 << 20
    assert read["fingerprint"]["extra"] == [["pages", "16"]]


def test_status_needs_no_torch(daemon: LocalDaemon) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvferry.client.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "status", "-d", str(daemon.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
