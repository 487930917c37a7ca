"""The command line against a real daemon: what it says, what it writes, how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvferry.client import GPULoadStoreSpec, LocalDaemon, OffloadClient, shared_empty
from kvferry.client.cli import main, units
from kvferry.client.cli.bench.bandwidth import Trip
from kvferry.client.cli.bench.engine import HOST_BLOCK, Shape, engine
from kvferry.proto.errors import Failed

WAYS = {"store", "load", "both"}
Captured: TypeAlias = pytest.CaptureFixture[str]
TINY = ("--quick", "--gib", "0.01", "--reps", "1")


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(pool_bytes=64 << 20) as daemon:
        yield daemon


def kvferry(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("command", "says"),
    [((), ["status", "bench", "--directory"]), (("status",), ["--json"]), (("bench",), ["--plot"])],
)
def test_help(command: tuple[str, ...], says: list[str], capsys: Captured) -> None:
    assert kvferry(*command, "--help") == 0
    output = capsys.readouterr().out
    assert all(word in output for word in says)


def test_status_shows_pool_engines_and_totals(daemon: LocalDaemon, capsys: Captured) -> None:
    tensor = shared_empty((16, 4096))
    with OffloadClient(daemon.directory, engine="[red]llama") as client:
        client.register_kv_caches({"layer": tensor}, num_blocks=16, host_bytes=16 << 20)
        assert kvferry("status", "--directory", daemon.directory) == 0
    output = capsys.readouterr().out
    assert f"pid {daemon.pid}" in output
    assert "64 MiB: 16 MiB reserved" in output
    assert "[red]llama" in output
    assert "here" in output
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


def test_status_needs_no_torch(daemon: LocalDaemon) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvferry.client.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "status", "-d", str(daemon.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["status", "bench"])
def test_no_daemon(command: str, tmp_path: Path, capsys: Captured) -> None:
    assert kvferry(command, "--directory", tmp_path) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvferry: ")
    assert error.count("\n") == 1
    assert str(tmp_path) in error


def test_no_daemon_anywhere(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "one", tmp_path / "two"]
    monkeypatch.setattr("kvferry.client.endpoint.runtime_directories", lambda: places)
    assert kvferry("status") == 1
    error = capsys.readouterr().err
    assert all(str(place) in error for place in places)


@pytest.mark.parametrize(
    ("package", "command", "says"),
    [
        ("typer", ["status"], "pip install 'kvferry[cli]'"),
        ("rich", ["status"], "pip install 'kvferry[cli]'"),
        ("torch", ["bench"], "pip install 'kvferry[tensors]'"),
        ("matplotlib", ["bench", "--plot", "x.png"], "pip install matplotlib"),
    ],
)
def test_what_is_missing_is_named(
    package: str,
    command: list[str],
    says: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = [name for name in sys.modules if name.startswith("kvferry.client.cli.")]
    for name in [*loaded, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert kvferry(*command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


@pytest.mark.parametrize(
    "options",
    [
        ("--sizes", "4KiB,many"),
        ("--json", "/proc/nowhere/file.json"),
        ("--directory", "/tmp", "--device", "cpu"),
    ],
)
def test_wrong_usage_is_said_before_anything_runs(options: tuple[str, ...]) -> None:
    assert kvferry("bench", *options) == 2


def test_bench_writes_all_it_measured(tmp_path: Path, capsys: Captured) -> None:
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    options = ("--device", "cpu", "--sizes", "16KiB,2MiB", *TINY)
    assert kvferry("bench", *options, "--json", data, "--plot", picture) == 0
    results = json.loads(data.read_text())
    assert set(results["contiguous"]) == WAYS
    assert [entry["page_bytes"] for entry in results["bandwidth"]] == [16 << 10, 2 << 20]
    for entry in results["bandwidth"]:
        check_copies(entry["copies"], results["about"]["nbytes"])
    assert len(results["latency"]) == 9
    assert all(latency["p50"] <= latency["p99"] for latency in results["latency"][:5])
    assert results["about"]["command"].startswith("kvferry bench --device cpu --sizes")
    assert picture.read_bytes()[16:24] == (1200).to_bytes(4, "big") + (700).to_bytes(4, "big")
    captured = capsys.readouterr()
    assert captured.err == ""
    assert all(word in captured.out for word in ("16 KiB", "contiguous", "difference", "GB/s"))


def check_copies(copies: dict[str, Any], nbytes: int) -> None:
    assert set(copies) == WAYS
    for way, figures in copies.items():
        for rate in figures.values():
            assert rate["nbytes"] == nbytes * (2 if way == "both" else 1)
            assert rate["low"] <= rate["median"] <= rate["high"]
            assert rate["ratio"] > 0
            assert len(rate["seconds"]) == 1


def test_bench_of_a_running_daemon_takes_no_room_from_others(
    daemon: LocalDaemon, capsys: Captured
) -> None:
    tensor = shared_empty((16, 4096))
    with OffloadClient(daemon.directory, engine="tenant") as client:
        client.register_kv_caches({"layer": tensor}, num_blocks=16, host_bytes=40 << 20)
    assert kvferry("bench", "--directory", daemon.directory, *TINY) == 1
    assert "--gib" in capsys.readouterr().err


def test_bench_says_what_a_job_failed_with(capsys: Captured) -> None:
    with LocalDaemon(pool_bytes=64 << 20, reference_fail_every=5) as daemon:
        assert kvferry("bench", "-d", daemon.directory, "--sizes", "2MiB", *TINY) == 1
    assert "[copy_failed]" in capsys.readouterr().err


def test_wrong_bytes_are_noticed(daemon: LocalDaemon) -> None:
    slab = shared_empty((8 << 20,))
    with engine(daemon.directory, Shape(64 << 10, 4, 2), slab) as bench_engine:
        trip = Trip(bench_engine)
        assert trip.round().keys() == WAYS
        for specs in (trip.loads, trip.loads_too):
            kept, (host, gpu) = list(specs), specs[0]
            specs[0] = (host, GPULoadStoreSpec(gpu.block_ids[::-1]))
            with pytest.raises(Failed, match="other bytes"):
                trip.round()
            specs[:] = kept
        trip.round()


@pytest.mark.parametrize("page_bytes", [512, 3 << 10, 4 << 10, 64 << 10, 2 << 20, 8 << 20])
def test_a_host_block_has_two_mebibytes_or_one_page(page_bytes: int) -> None:
    shape = Shape.of(page_bytes)
    assert shape.tensors <= 64
    assert np.isclose(shape.host_block_bytes, max(HOST_BLOCK, page_bytes), rtol=0.1)


def test_units() -> None:
    assert [units.parse_size(text) for text in ("4KiB", "2 M", "17", "1gb")] == [
        4096,
        2 << 20,
        17,
        1 << 30,
    ]
    with pytest.raises(ValueError, match="no size"):
        units.parse_size("4 apples")
    assert [units.size(n) for n in (0, 4096, 1536, 5 << 40)] == [
        "0 B",
        "4 KiB",
        "1.50 KiB",
        "5 TiB",
    ]
    assert [units.span(s) for s in (3.2, 61, 11520)] == ["3 s", "1 min 1 s", "3 h 12 min"]
