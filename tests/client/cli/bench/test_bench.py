"""`kvferry bench`: measurements, output files and failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from rich.console import Console

from kvferry.client import GPULoadStoreSpec, LocalDaemon, OffloadClient, shared_empty
from kvferry.client.cli.bench import report
from kvferry.client.cli.bench.bandwidth import RoundTrip
from kvferry.client.cli.bench.bench_engine import HOST_BLOCK, Shape, register_engine
from kvferry.client.cli.bench.bench_results import (
    IN_A_ROW,
    About,
    Copies,
    Fragments,
    Rate,
    Results,
    direct_thresholds,
)
from kvferry.proto.errors import Failed
from kvferry.proto.status import CalibrationPoint, CopyStatus
from support.command_line import kvferry

DIRECTIONS = {"store", "load", "both"}
Captured: TypeAlias = pytest.CaptureFixture[str]
TINY = ("--quick", "--gib", "0.01", "--reps", "1")


def test_bench_writes_all_it_measured(tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "bench.json"
    options = ("--device", "cpu", "--sizes", "16KiB,2MiB", *TINY)
    assert kvferry("bench", *options, "--json", data) == 0
    results = json.loads(data.read_text())
    assert set(results["contiguous"]) == DIRECTIONS
    assert [entry["page_bytes"] for entry in results["bandwidth"]] == [16 << 10, 2 << 20]
    for entry in results["bandwidth"]:
        check_copies(entry["copies"], results["about"]["nbytes"])
    assert len(results["latency"]) == 10
    check_latencies(results["latency"])
    assert results["about"]["command"].startswith("kvferry bench --device cpu --sizes")
    captured = capsys.readouterr()
    assert captured.err == ""
    assert all(word in captured.out for word in ("16 KiB", "contiguous", "difference", "GB/s"))


def check_copies(copies: dict[str, Any], nbytes: int) -> None:
    assert set(copies) == DIRECTIONS
    for direction, figures in copies.items():
        for name, rate in figures.items():
            times = (2 if direction == "both" else 1) * (IN_A_ROW if name == "in_a_row" else 1)
            assert rate["nbytes"] == nbytes * times
            assert rate["low"] <= rate["median"] <= rate["high"]
            assert rate["ratio"] > 0
            assert len(rate["seconds"]) == 1


def check_latencies(latencies: list[dict[str, Any]]) -> None:
    for latency in latencies:
        if latency["seconds"]:
            assert latency["p50"] <= latency["p99"] <= latency["high"]


@pytest.mark.parametrize(
    ("direct_from", "line"),
    [
        ((1 << 18, 1 << 19), "copied directly: stores from 256 KiB on, loads from 512 KiB on"),
        ((0, 0), "copied directly: stores from 0 bytes on, loads from 0 bytes on"),
        ((1 << 62, 1 << 62), "copied directly: stores from no size on, loads from no size on"),
    ],
)
def test_bench_prints_the_thresholds_of_direct_copies(
    direct_from: tuple[int, int], line: str, capsys: Captured
) -> None:
    """No table is wider than 80 columns."""
    machine = ("", "", "H200", "GPU-1", "580", "13.0", "2.11", "3.12", "1", "1", "Xeon", 16)
    point = CalibrationPoint(1 << 25, 55e9, 55e9)
    found = CopyStatus("auto", point, (point,), *direct_from)
    about = About(*machine, 1 << 30, 5, direct_thresholds(found))
    results = Results(about, {name: Rate.of(1 << 30, [0.02, 0.021]) for name in DIRECTIONS})
    rate = Rate.of(1 << 30, [0.021, 0.022])
    for page_bytes in (4 << 10, 256 << 10):
        copies = {name: Copies(rate, rate, rate) for name in DIRECTIONS}
        results.bandwidth.append(Fragments(page_bytes, 64, 1, 2 << 20, 16, copies))
    results.set_ratios()
    report.print_results(results, Console(width=80))
    output = capsys.readouterr().out
    assert line in output.replace("\n", " ")
    assert all(word in output for word in ("in a row", "contiguous", "on device"))
    assert "…" not in output


def test_bench_of_a_running_daemon_evicts_nothing_of_others(
    daemon: LocalDaemon, capsys: Captured
) -> None:
    tensor = shared_empty((16, 4096))
    with OffloadClient(daemon.directory, engine="tenant") as client:
        client.register_kv_caches({"layer": tensor}, num_blocks=16, host_bytes=40 << 20)
    assert kvferry("bench", "--directory", daemon.directory, *TINY) == 1
    assert "--gib" in capsys.readouterr().err


def test_bench_reports_the_error_of_a_job(capsys: Captured) -> None:
    with LocalDaemon(pool_bytes=64 << 20, reference_fail_every=5) as daemon:
        assert kvferry("bench", "-d", daemon.directory, "--sizes", "2MiB", *TINY) == 1
    assert "[copy_failed]" in capsys.readouterr().err


def test_wrong_bytes_are_noticed(daemon: LocalDaemon) -> None:
    slab = shared_empty((8 << 20,))
    with register_engine(daemon.directory, Shape(64 << 10, 4, 2), slab) as bench_engine:
        trip = RoundTrip(bench_engine)
        assert trip.run_round().keys() == DIRECTIONS
        for specs in (trip.loads, trip.more_loads):
            kept, (host, gpu) = list(specs), specs[0]
            assert isinstance(gpu, GPULoadStoreSpec)
            specs[0] = (host, GPULoadStoreSpec(gpu.block_ids[::-1]))
            with pytest.raises(Failed, match="other bytes"):
                trip.run_round()
            specs[:] = kept
        trip.run_round()


@pytest.mark.parametrize("page_bytes", [512, 3 << 10, 4 << 10, 64 << 10, 2 << 20, 8 << 20])
def test_a_host_block_has_two_mebibytes_or_one_page(page_bytes: int) -> None:
    shape = Shape.of(page_bytes)
    assert shape.tensors <= 64
    assert np.isclose(shape.host_block_bytes, max(HOST_BLOCK, page_bytes), rtol=0.1)
