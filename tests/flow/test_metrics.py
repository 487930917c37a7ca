"""Metrics and health of a real daemon over HTTP."""

from __future__ import annotations

import os
import re
import socket
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from kvferry.client import LocalDaemon
from kvferry.testing.engine import SmallEngine, StartSmallEngine, until
from kvferry.testing.plugin import StartKvferryd
from support.time_limits import TIMEOUT


@pytest.fixture
def daemon(start_kvferryd: StartKvferryd) -> LocalDaemon:
    return start_kvferryd(metrics_listen="127.0.0.1:0", reference_fail_every=4)


def url_of(daemon: LocalDaemon, path: str) -> str:
    """The address in the daemon's log, with a path."""
    found: list[str] = []

    def listening() -> bool:
        found[:] = re.findall(r"metrics=(\S+)", daemon.log())
        return bool(found)

    until(listening)
    return f"http://{found[0]}{path}"


def get(daemon: LocalDaemon, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url_of(daemon, path), timeout=TIMEOUT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(daemon: LocalDaemon) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    status, text = get(daemon, "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def labels(**values: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(values.items()))


@pytest.fixture
def engine(start_engine: StartSmallEngine, daemon: LocalDaemon) -> SmallEngine:
    return start_engine(daemon, name="llama")


def test_samples_match_the_jobs(daemon: LocalDaemon, engine: SmallEngine) -> None:
    until(lambda: samples(daemon)["kvferry_healthy", ()] == 1)
    results = engine.finish(*[engine.store([i], [i]) for i in range(4)])
    results += engine.finish(engine.load([0], [1]))  # submitted last: the fourth copy fails
    assert [result.success for result in results] == [True, True, True, False, True]
    moved = sum(r.transfer_size for r in results if r.transfer_type == ("GPU", "CPU"))
    seconds = sum(r.transfer_time for r in results if r.transfer_type == ("GPU", "CPU"))
    values = samples(daemon)
    store = labels(direction="store", mode="cpu")
    assert values["kvferry_moved_bytes_total", store] == moved
    assert values["kvferry_job_device_seconds_count", store] == 3
    assert values["kvferry_job_device_seconds_sum", store] == pytest.approx(seconds)
    assert values["kvferry_job_queue_seconds_count", store] == 3
    assert 0 < values["kvferry_job_queue_seconds_sum", store] < TIMEOUT
    assert values["kvferry_job_queue_seconds_bucket", labels(**dict(store), le="+Inf")] == 3
    for direction, outcome, number in (
        ("store", "done", 3),
        ("store", "failed", 1),
        ("load", "done", 1),
    ):
        assert values["kvferry_jobs_total", labels(direction=direction, outcome=outcome)] == number
    assert values["kvferry_errors_total", labels(code="copy_failed")] == 1
    assert values["kvferry_pool_bytes", labels(state="reserved")] == 1 << 20
    assert values["kvferry_pool_bytes", labels(state="free")] == 15 << 20
    assert values["kvferry_engine_present", labels(engine="llama")] == 1
    assert values["kvferry_jobs_in_flight", labels(engine="llama")] == 0
    assert values["kvferry_sessions", ()] == 2
    assert values["process_resident_memory_bytes", ()] > 1 << 20


def tcp_sockets(daemon: LocalDaemon) -> set[str]:
    """The inodes of the daemon's TCP sockets."""
    process, inodes = Path(f"/proc/{daemon.pid}"), set[str]()
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed since the listing
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    tables = [(process / "net" / name).read_text() for name in ("tcp", "tcp6")]
    return inodes & {line.split()[9] for table in tables for line in table.splitlines()[1:]}


def test_metrics_are_off_by_default(daemon: LocalDaemon, kvferryd: LocalDaemon) -> None:
    until(lambda: "metrics=off" in kvferryd.log())
    assert not tcp_sockets(kvferryd)
    assert len(tcp_sockets(daemon)) == 1


def test_the_daemon_stops_beside_a_silent_http_connection(daemon: LocalDaemon) -> None:
    host, port = url_of(daemon, "").removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))):
        assert daemon.stop(timeout=TIMEOUT) == 0
