"""What an operator's tools read over HTTP, of a real daemon: samples that add up, and health."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from kvferry.client import LocalDaemon
from kvferry.testing.engine import SmallEngine, StartSmallEngine, until
from kvferry.testing.plugin import StartKvferryd


@pytest.fixture
def daemon(start_kvferryd: StartKvferryd) -> LocalDaemon:
    return start_kvferryd(metrics_listen="127.0.0.1:0", reference_fail_every=4)


def url(daemon: LocalDaemon, path: str) -> str:
    """Where the daemon says that it listens."""
    found: list[str] = []

    def listening() -> bool:
        found[:] = re.findall(r"metrics=(\S+)", daemon.log())
        return bool(found)

    until(listening)
    return f"http://{found[0]}{path}"


def get(daemon: LocalDaemon, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url(daemon, path), timeout=20) as answer:
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


def labels(**of: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(of.items()))


@pytest.fixture
def engine(start_engine: StartSmallEngine, daemon: LocalDaemon) -> SmallEngine:
    return start_engine(daemon, name="llama")


def test_samples_say_what_was_done(daemon: LocalDaemon, engine: SmallEngine) -> None:
    until(lambda: samples(daemon)["kvferry_healthy", ()] == 1)
    results = engine.finish(*[engine.store([i], [i]) for i in range(4)])
    results += engine.finish(engine.load([0], [1]))  # or it might be the fourth, which fails
    assert [result.success for result in results] == [True, True, True, False, True]
    moved = sum(r.transfer_size for r in results if r.transfer_type == ("GPU", "CPU"))
    seconds = sum(r.transfer_time for r in results if r.transfer_type == ("GPU", "CPU"))
    told = samples(daemon)
    store = labels(direction="store", mode="cpu")
    assert told["kvferry_moved_bytes_total", store] == moved
    assert told["kvferry_job_device_seconds_count", store] == 3
    assert told["kvferry_job_device_seconds_sum", store] == pytest.approx(seconds)
    assert told["kvferry_job_queue_seconds_count", store] == 3
    assert 0 < told["kvferry_job_queue_seconds_sum", store] < 10
    assert told["kvferry_job_queue_seconds_bucket", labels(**dict(store), le="+Inf")] == 3
    for direction, outcome, number in (
        ("store", "done", 3),
        ("store", "failed", 1),
        ("load", "done", 1),
    ):
        assert told["kvferry_jobs_total", labels(direction=direction, outcome=outcome)] == number
    assert told["kvferry_errors_total", labels(code="copy_failed")] == 1
    assert told["kvferry_pool_bytes", labels(state="reserved")] == 1 << 20
    assert told["kvferry_pool_bytes", labels(state="free")] == 15 << 20
    assert told["kvferry_engine_present", labels(engine="llama")] == 1
    assert told["kvferry_jobs_in_flight", labels(engine="llama")] == 0
    assert told["kvferry_sessions", ()] == 2
    assert told["process_resident_memory_bytes", ()] > 1 << 20


def test_the_wait_for_the_engine_is_part_of_the_queue_time(
    daemon: LocalDaemon, engine: SmallEngine
) -> None:
    job = engine.store([0], [0], wait_for=engine.worker.signal() + 1)
    until(lambda: samples(daemon)["kvferry_oldest_job_seconds", labels(waiting="yes")] > 0)
    time.sleep(0.2)
    engine.worker.signal()
    engine.finish(job)
    told = samples(daemon)
    store = labels(direction="store", mode="cpu")
    assert told["kvferry_job_queue_seconds_sum", store] >= 0.2
    assert told["kvferry_job_device_seconds_sum", store] < 0.2


def test_health_is_200_or_503_with_reasons(daemon: LocalDaemon) -> None:
    """Of every two rounds of the probe the second fails: their fourth copy does."""
    seen: dict[int, dict[str, object]] = {}

    def both() -> bool:
        status, text = get(daemon, "/health")
        seen[status] = json.loads(text)
        return seen.keys() == {200, 503} and "no probe" not in str(seen[503]["reasons"])

    until(both, 20)
    assert (seen[200]["healthy"], seen[200]["reasons"]) == (True, [])
    assert seen[503]["healthy"] is False
    assert "copy_failed" in str(seen[503]["reasons"])


def test_elsewhere_there_is_nothing(daemon: LocalDaemon) -> None:
    assert get(daemon, "/")[0] == 404


def test_many_at_once(daemon: LocalDaemon) -> None:
    statuses: list[int] = []
    visitors = [
        threading.Thread(target=lambda: statuses.append(get(daemon, "/metrics")[0]))
        for _ in range(8)
    ]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    assert statuses == [200] * 8


def test_a_port_that_is_taken_and_what_is_no_address(start_kvferryd: StartKvferryd) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Exception, match=r"bad_config.*another port per daemon"):
            start_kvferryd(metrics_listen=f"127.0.0.1:{port}")
    for listen in ("9464", "localhost:http", "127.0.0.1:70000"):
        with pytest.raises(Exception, match="bad_config"):
            start_kvferryd(metrics_listen=listen)


def tcp_sockets(daemon: LocalDaemon) -> set[str]:
    """The inodes of those that it has."""
    process, held = Path(f"/proc/{daemon.pid}"), set[str]()
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # others come and go
            held.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    tables = [(process / "net" / name).read_text() for name in ("tcp", "tcp6")]
    return held & {line.split()[9] for table in tables for line in table.splitlines()[1:]}


def test_it_is_off_unless_asked_for(daemon: LocalDaemon, kvferryd: LocalDaemon) -> None:
    until(lambda: "metrics=off" in kvferryd.log())
    assert not tcp_sockets(kvferryd)
    assert len(tcp_sockets(daemon)) == 1


def test_it_stops_with_a_visitor_that_says_nothing(daemon: LocalDaemon) -> None:
    host, port = url(daemon, "").removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))):
        assert daemon.stop(timeout=20) == 0
