"""HTTP over a loop that stands still, and histograms as Prometheus counts them."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kvferry.daemon.core.actions import Ended
from kvferry.daemon.core.tally import BOUNDS, Tally
from kvferry.daemon.server import exporter
from kvferry.daemon.server.exporter import Exporter
from kvferry.daemon.server.metrics import Snapshot, families
from kvferry.proto import status as told
from kvferry.proto.messages import JobResult, Outcome
from kvferry.proto.specs import Direction
from kvferry.testing.engine import until

DEVICE = told.DeviceInfo("cpu", "cpu", "host memory")
STATUS = told.DaemonStatus(
    "0.1",
    "boot",
    1,
    1.0,
    DEVICE,
    told.PoolStatus(100, 60, 40),
    1,
    (),
    told.Totals(),
    {},
    health=told.HealthStatus(True),
)


def tally(*seconds: float) -> Tally:
    counts = Tally()
    for number, value in enumerate(seconds):
        result = JobResult(number, Direction.LOAD, Outcome.DONE, 100, value)
        counts.add("staged", result, Ended(number, Outcome.DONE, value, None, 2 * value))
    return counts


class Daemon:
    async def snapshot(self) -> Snapshot:
        return Snapshot(STATUS, (), tally())

    async def check(self) -> told.HealthStatus:
        return told.HealthStatus(True)


@pytest.fixture
async def serving() -> AsyncIterator[Exporter]:
    serving = Exporter("127.0.0.1:0", 0.1)
    serving.start(Daemon())
    yield serving
    await asyncio.to_thread(serving.close)


def get(exporter: Exporter, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{exporter.address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_a_loop_that_answers(serving: Exporter) -> None:
    status, text = await asyncio.to_thread(get, serving, "/health")
    assert (status, json.loads(text)["healthy"]) == (200, True)
    status, text = await asyncio.to_thread(get, serving, "/metrics")
    assert status == 200
    assert "kvferry_healthy 1.0" in text
    assert 'kvferry_pool_bytes{state="free"} 60.0' in text


@pytest.mark.parametrize("path", ["/health", "/metrics", "/"])
async def test_head_is_answered_as_get_but_for_the_body(serving: Exporter, path: str) -> None:
    def asked(method: str) -> tuple[int, dict[str, str], bytes]:
        """With what came behind the head, if anything did: http.client would not look."""
        with visitor(serving) as connection:
            connection.send(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body

    status, fields, body = await asyncio.to_thread(asked, "GET")
    assert int(fields["Content-Length"]) == len(body) > 0
    again, heads, nothing = await asyncio.to_thread(asked, "HEAD")
    assert (again, heads["Content-Type"], nothing) == (status, fields["Content-Type"], b"")
    assert heads.keys() == fields.keys()


async def test_a_loop_that_stands_still_is_unhealthy_and_hangs_nobody(
    serving: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The visitors are in threads; this, the loop, stands still until both have their answer."""
    monkeypatch.setattr(exporter, "ANSWER_SECONDS", 0.1)
    with ThreadPoolExecutor(2) as visitors:
        visits = [visitors.submit(get, serving, path) for path in ("/health", "/metrics")]
        (status, health), (scraped, text) = [visit.result(20) for visit in visits]
    assert status == 503
    assert "the loop has not answered" in health
    assert scraped == 200
    assert "kvferry_healthy 0.0" in text
    assert "kvferry_pool" not in text
    monkeypatch.undo()
    assert (await asyncio.to_thread(get, serving, "/health"))[0] == 200


@contextmanager
def visitor(exporter: Exporter) -> Iterator[socket.socket]:
    host, _, port = exporter.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        yield connection


def hung_up(connection: socket.socket) -> bool:
    """Whether the daemon closed it, now or within the time that a test takes."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_so_many_visitors_and_no_more(
    serving: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are in say nothing; when they go, there is room again."""

    def visits() -> None:
        with ExitStack() as inside:
            for _ in range(exporter.MOST_VISITORS):
                inside.enter_context(visitor(serving))
            for _ in range(3):
                with visitor(serving) as late:
                    late.settimeout(5)
                    assert hung_up(late)
        until(lambda: reached(serving))
        monkeypatch.setattr(exporter, "crowded", lambda: True)
        with visitor(serving) as late:
            late.settimeout(5)
            assert hung_up(late)

    await asyncio.to_thread(visits)


def reached(serving: Exporter) -> bool:
    try:
        return get(serving, "/health")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


async def test_a_visitor_that_drips_is_hung_up_on(
    serving: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "REQUEST_SECONDS", 0.5)

    def drip() -> float:
        began = time.monotonic()
        with visitor(serving) as slow, suppress(ConnectionError):
            while time.monotonic() - began < 5:
                slow.send(b"G")
                time.sleep(0.1)
        return time.monotonic() - began

    assert 0.4 < await asyncio.to_thread(drip) < 4


def test_a_histogram_counts_each_value_once_in_all_buckets_above_it() -> None:
    values = (0.0, BOUNDS[0], 3e-5, 0.2, 1e6)
    counts = tally(*values)
    (family,) = [
        f for f in families(Snapshot(STATUS, (), counts)) if f.name == "kvferry_job_device_seconds"
    ]
    found = {s.labels.get("le", s.name): s.value for s in family.samples}
    for bound in (*BOUNDS, float("inf")):
        name = "+Inf" if bound == float("inf") else f"{bound:g}"
        assert found[name] == sum(value <= bound for value in values), name
    assert found["kvferry_job_device_seconds_sum"] == pytest.approx(sum(values))


def test_a_copy_stays_as_it_is() -> None:
    counts = tally(0.1)
    copy = counts.copy()
    result = JobResult(2, Direction.LOAD, Outcome.DONE, 100, 1.0)
    counts.add("staged", result, Ended(2, Outcome.DONE, 1.0))
    assert sum(copy.outcomes.values()) == 1
    assert copy.movements["load", "staged"].nbytes == 100
