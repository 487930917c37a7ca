"""The command line against a real daemon: what it says, what it writes, how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
from rich.console import Console

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    LocalDaemon,
    OffloadClient,
    shared_empty,
)
from kvferry.client.cli import main, units
from kvferry.client.cli.bench import plotting, report
from kvferry.client.cli.bench.bandwidth import Trip
from kvferry.client.cli.bench.beside import Windows
from kvferry.client.cli.bench.engine import HOST_BLOCK, Shape, engine
from kvferry.client.cli.bench.movers import Mover, Transfers
from kvferry.client.cli.bench.mps import mps
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.results import (
    IN_A_ROW,
    About,
    Beside,
    Copies,
    Fragments,
    Latency,
    Queued,
    Rate,
    Results,
    Spread,
    Start,
    _direct_from,
)
from kvferry.client.cli.bench.rig import own_daemon
from kvferry.client.cli.status import as_json, ask, show
from kvferry.proto.errors import Code, Failed, Refused
from kvferry.proto.status import CalibrationPoint, CopyStatus, NamespaceStatus

WAYS = {"store", "load", "both"}
Captured: TypeAlias = pytest.CaptureFixture[str]
PICTURE = (1400).to_bytes(4, "big") + (600).to_bytes(4, "big")
TINY = ("--quick", "--gib", "0.01", "--reps", "1")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell wraps, however large its neighbours' numbers are on a busy machine."""
    monkeypatch.setenv("COLUMNS", "160")


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
    assert status["namespaces"] == []


WHOSE = Fingerprint("[red]meta-llama/Llama-3.1-70B", 2 << 20, extra=(("pages", "16"),))
BUSY = NamespaceStatus(
    WHOSE.name,
    WHOSE,
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
    report, namespaces = ask(daemon.directory)
    assert namespaces == ()
    replace = msgspec.structs.replace
    ranked = replace(WHOSE, rank=1, world_size=8)
    away = replace(BUSY, fingerprint=ranked, policy="arc", engines=(), hits=0, misses=0)
    show(report, (BUSY, away), Console(width=80, highlight=False))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[1:] for line in lines if "262,144" in line]
    counts = ["262,144", "2", "MiB", "261,140", "12", "1,000", "93%", "38,861"]
    assert rows == [counts, [*counts[:-2], "-", "38,861"]]
    names = " ".join(line[:17].strip() for line in lines)
    assert names.replace(" ", "").count(WHOSE.model) == 2
    assert names.count(WHOSE.name) == 2
    words = ("lru llama-0, llama-1", "arc, rank 1 of 8", "nobody here")
    assert all(word in names for word in words)


def test_namespaces_as_json_name_every_field() -> None:
    (read,) = json.loads(msgspec.json.encode(as_json((BUSY,))))
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
        ("typer", ["status"], "pip install '.[cli]' in a checkout"),
        ("rich", ["status"], "pip install '.[cli]' in a checkout"),
        ("torch", ["bench"], "pip install '.[tensors]' in a checkout"),
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
        ("--what", "latency,much"),
        ("--what", "all", "--directory", "/tmp"),
        ("--json", "/proc/nowhere/file.json"),
        ("--json", "/proc/file.json"),
        ("--plot", "/tmp"),
        ("--plot", "/tmp/picture.foo"),
        ("--plot", "/tmp/picture.png", "--what", "queued,latency"),
        ("--plot", "/tmp/picture.png", "--what", "queued,beside", "--device", "cpu"),
        ("--mps",),
        ("--directory", "/tmp", "--device", "cpu"),
        ("--directory", "/tmp", "--staging", "512MiB"),
        ("--staging", "64MiB,128MiB"),
        ("--staging", "much"),
        ("--staging", "0"),
    ],
)
def test_wrong_usage_is_said_before_anything_runs(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = import_module("kvferry.client.cli.bench")
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("it ran"))
    assert kvferry("bench", *options) == 2


def test_where_figures_go_is_left_as_it_is(tmp_path: Path) -> None:
    """It is tried before anything is measured; what is there stays there until something is."""
    data, new = tmp_path / "bench.json", tmp_path / "new.json"
    data.write_text("{}")
    for path in (data, new):
        assert kvferry("bench", "--json", path, "--mps") == 2
    assert data.read_text() == "{}"
    assert not new.exists()


def test_bench_writes_all_it_measured(tmp_path: Path, capsys: Captured) -> None:
    data, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    options = ("--device", "cpu", "--sizes", "16KiB,2MiB", *TINY)
    assert kvferry("bench", *options, "--json", data, "--plot", picture) == 0
    results = json.loads(data.read_text())
    assert set(results["contiguous"]) == WAYS
    assert [entry["page_bytes"] for entry in results["bandwidth"]] == [16 << 10, 2 << 20]
    for entry in results["bandwidth"]:
        check_copies(entry["copies"], results["about"]["nbytes"])
    assert len(results["latency"]) == 18
    check_latencies(results["latency"])
    assert results["about"]["command"].startswith("kvferry bench --device cpu --sizes")
    assert picture.read_bytes()[16:24] == PICTURE
    captured = capsys.readouterr()
    assert captured.err == ""
    assert all(word in captured.out for word in ("16 KiB", "contiguous", "difference", "GB/s"))


def check_copies(copies: dict[str, Any], nbytes: int) -> None:
    assert set(copies) == WAYS
    for way, figures in copies.items():
        for name, rate in figures.items():
            times = (2 if way == "both" else 1) * (IN_A_ROW if name == "in_a_row" else 1)
            assert rate["nbytes"] == nbytes * times
            assert rate["low"] <= rate["median"] <= rate["high"]
            assert rate["ratio"] > 0
            assert len(rate["seconds"]) == 1


def check_latencies(latencies: list[dict[str, Any]]) -> None:
    for latency in latencies:
        if latency["seconds"]:
            assert latency["p50"] <= latency["p99"] <= latency["high"]


@pytest.mark.parametrize(
    ("direct_from", "said"),
    [
        ((1 << 18, 1 << 19), "copied directly: stores from 256 KiB on, loads from 512 KiB on"),
        ((0, 0), "copied directly: stores from 0 bytes on, loads from 0 bytes on"),
        ((1 << 62, 1 << 62), "copied directly: stores from no size on, loads from no size on"),
    ],
)
def test_bench_says_what_is_copied_directly(
    direct_from: tuple[int, int], said: str, capsys: Captured
) -> None:
    machine = ("", "", "H200", "GPU-1", "580", "13.0", "2.11", "3.12", "1", "1", "Xeon", 16)
    point = CalibrationPoint(1 << 25, 55e9, 55e9)
    found = CopyStatus("auto", point, (point,), *direct_from)
    about = About(*machine, 1 << 30, 5, _direct_from(found))
    report.show(Results(about), Console(width=80))
    assert said in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("options", [(), ("--staging", "512MiB")])
def test_bench_starts_its_daemons_with_as_much_staging_as_is_said(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    plans = list[Plan]()

    def noted(plan: Plan, *_: object) -> None:
        plans.append(plan)
        raise Failed(Code.COPY_FAILED, "noted")

    monkeypatch.setattr(import_module("kvferry.client.cli.bench"), "run", noted)
    assert kvferry("bench", "--device", "cpu", *options) == 1
    said = capsys.readouterr().err
    assert "noted" in said
    assert ("--staging has no effect" in said) == bool(options)
    with own_daemon(plans[0], pool_bytes=16 << 20) as daemon:
        assert ("--copy-staging" in daemon.command) == bool(options)
        assert (str(512 << 20) in daemon.command) == bool(options)


def test_bench_of_a_start_and_of_queued_stores(tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "bench.json"
    options = ("--device", "cpu", "--what", "queued,start", "--pool-gib", "0.125", *TINY)
    assert kvferry("bench", *options, "--json", data) == 0
    results = json.loads(data.read_text())
    start = results["start"]
    assert start["pool_bytes"] == 128 << 20
    moments = [start[name]["median"] for name in ("socket", "greeted", "first_store")]
    assert sorted([0, *moments, start["registered"]]) == [0, *moments, start["registered"]]
    assert start["pinned_seconds"] > 0
    for queued in results["queued"]:
        behind = [each for each in (queued["behind"], queued["after_submit"]) if each]
        check_latencies([queued["idle"], *behind])
        assert queued["queued_bytes"] == 8 * (16 << 20)
        trips = sum(len(each["seconds"]) for each in behind)
        assert trips == len(queued["idle"]["seconds"])
    output = capsys.readouterr().out
    assert all(word in output for word in ("first store", "pages of 32 KiB", "128 MiB queued"))


@pytest.mark.parametrize("cpu", ["cpu", "CPU"])
def test_beside_an_engine_needs_a_gpu(cpu: str, capsys: Captured) -> None:
    assert kvferry("bench", "--device", cpu, "--what", "beside") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "needs a GPU" in error


class FakeBusy:
    """An engine whose steps take 10 ms, and 20 while a window that `begin` started is open."""

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self, loop: str, seconds: float) -> None:
        self._until = time.perf_counter() + seconds

    def ended(self) -> bool:
        return time.perf_counter() > self._until

    def end(self) -> float:
        return 20.0

    def step_ms(self, loop: str, seconds: float) -> float:
        return 10.0


def test_engine_time_lost_is_what_the_windows_say(daemon: LocalDaemon) -> None:
    slab = shared_empty((32 << 20,))
    busy: Any = FakeBusy()
    with engine(daemon.directory, Shape.of(256 << 10), slab) as bench_engine:
        bench_engine.fill()
        movers: dict[str, Mover] = {"load": Transfers(bench_engine, "load", 2)}
        rows = list(Windows(busy, 2, lambda _: None).rows("kvferry", 256 << 10, movers))
        assert bench_engine.client.status().engines[0].jobs == 0
    assert [row.loop for row in rows] == ["matmul", "decode"]
    for row in rows:
        assert row.alone > 0
        assert (row.alone_ms.median, row.with_ms.median) == (10, 20)
        gib_per_second = row.rate.samples[0] * 1e9 / (1 << 30)
        assert row.lost_ms_per_gib.samples[0] == pytest.approx(500 / gib_per_second)


def test_a_picture_can_be_drawn_again_from_the_file(tmp_path: Path) -> None:
    data, picture = tmp_path / "bench.json", tmp_path / "again.png"
    data.write_bytes(msgspec.json.encode(synthetic()))
    command = [sys.executable, "-W", "error", "-m", plotting.__name__, str(data), str(picture)]
    assert subprocess.run(command, timeout=60).returncode == 0
    assert picture.read_bytes()[16:24] == PICTURE


def test_a_picture_has_the_panels_that_were_measured(tmp_path: Path) -> None:
    results, picture = synthetic(), tmp_path / "bench.png"
    results.bandwidth = []
    plotting.draw(results, picture)
    assert picture.read_bytes()[16:24] == PICTURE
    results.beside = []
    with pytest.raises(Refused, match="nothing to plot"):
        plotting.draw(results, picture)


def test_mps_is_there_for_what_starts_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="not installed"), mps():
        pass
    control, said = tmp_path / "nvidia-cuda-mps-control", tmp_path / "said"
    control.write_text(f"#!/bin/sh\necho $* >> {said}\nread line && echo $line >> {said}\nexit 0")
    control.chmod(0o755)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/before")
    with mps():
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/before"
    assert "CUDA_MPS_LOG_DIRECTORY" not in os.environ
    assert said.read_text().split("\n")[0] == "-d"
    assert "quit" in said.read_text()


def test_every_table_is_80_columns_wide(capsys: Captured) -> None:
    results = synthetic()
    report.show(results, Console(width=80))
    output = capsys.readouterr().out
    words = ("cudaHostAlloc", "pinned kernel", "beyond a bare context", "8 GiB queued", "a note")
    assert all(word in output for word in (*words, "behind a submit"))
    assert "…" not in output


def synthetic() -> Results:
    """As if everything had been measured on a GPU."""
    fields = dict.fromkeys(About.__struct_fields__, "1") | {"direct_from": {"store": 1 << 18}}
    about = msgspec.convert(fields, About, strict=False)
    results = Results(about, {way: Rate.of(1 << 30, [0.02, 0.021]) for way in WAYS})
    rate, lost = Rate.of(1 << 30, [0.021, 0.022]), Spread.of([19.5, 20.25, 21])
    trip = Latency.of("trip", [1e-4, 2e-4])
    for page_bytes in (4 << 10, 256 << 10):
        copies = {way: Copies(rate, rate, rate) for way in WAYS}
        results.bandwidth.append(Fragments(page_bytes, 64, 1, 2 << 20, 16, copies))
        results.queued.append(Queued(page_bytes, 8 << 30, trip, trip, trip))
    for how, way, loop in product(
        ("contiguous", "kvferry", "batched DMA", "pinned kernel", "kvferry, MPS"),
        ("store", "load"),
        ("matmul", "decode"),
    ):
        for page_bytes in (0,) if how == "contiguous" else (4 << 10, 256 << 10):
            row = Beside(how, way, loop, page_bytes, 53.2, lost, 0.0, lost, lost, lost)
            results.beside.append(row)
    some = Spread.of([1.0])
    results.start = Start(64 << 30, some, some, some, 20.0, 42.0, 800 << 20, 256 << 20, 500 << 20)
    results.notes.append("a note")
    results.finish()
    return results


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
            assert isinstance(gpu, GPULoadStoreSpec)
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
    assert [units.size(n) for n in (0, 4096, 1536, 5 << 40)] == [
        "0 B",
        "4 KiB",
        "1.50 KiB",
        "5 TiB",
    ]
    assert [units.span(s) for s in (3.2, 61, 11520)] == ["3 s", "1 min 1 s", "3 h 12 min"]
