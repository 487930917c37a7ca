"""HTTP over a loop that stands still, and beside visitors that are slow or many."""

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
from prometheus_client import Gauge

from kvferry.daemon.observability import http as observability_http
from kvferry.daemon.observability.http import MetricsServer
from kvferry.daemon.observability.metrics import Metrics
from kvferry.proto import status as told

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


class FakeStatusSource:
    async def status_snapshot(self) -> tuple[told.DaemonStatus, tuple[told.NamespaceStatus, ...]]:
        return STATUS, ()

    async def check_health(self) -> told.HealthStatus:
        return told.HealthStatus(True)


@pytest.fixture
async def serving() -> AsyncIterator[MetricsServer]:
    serving = MetricsServer("127.0.0.1:0", Metrics(), 0.1)
    serving.start(FakeStatusSource())
    yield serving
    await asyncio.to_thread(serving.close)


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_a_loop_that_answers(serving: MetricsServer) -> None:
    status, text = await asyncio.to_thread(get, serving, "/health")
    assert (status, json.loads(text)["healthy"]) == (200, True)
    status, text = await asyncio.to_thread(get, serving, "/metrics")
    assert status == 200
    assert "kvferry_healthy 1.0" in text
    assert 'kvferry_pool_bytes{state="free"} 60.0' in text


@pytest.mark.parametrize("path", ["/health", "/metrics", "/"])
async def test_head_is_answered_as_get_but_for_the_body(serving: MetricsServer, path: str) -> None:
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
    serving: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The visitors are in threads; this, the loop, stands still until both have their answer."""
    monkeypatch.setattr(observability_http, "SNAPSHOT_SECONDS", 0.1)
    with ThreadPoolExecutor(2) as visitors:
        visits = [visitors.submit(get, serving, path) for path in ("/health", "/metrics")]
        (status, health), (scraped, text) = [visit.result(20) for visit in visits]
    assert status == 503
    assert "the event loop has not responded" in health
    assert scraped == 200
    assert "kvferry_healthy 0.0" in text
    assert "kvferry_pool" not in text
    monkeypatch.undo()
    assert (await asyncio.to_thread(get, serving, "/health"))[0] == 200


@contextmanager
def visitor(server: MetricsServer) -> Iterator[socket.socket]:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        yield connection


async def test_other_methods_are_refused(serving: MetricsServer) -> None:
    def asked() -> tuple[int, str | None]:
        connection = http.client.HTTPConnection(serving.address, timeout=20)
        connection.request("POST", "/metrics", b"kvferry_healthy 1")
        answer = connection.getresponse()
        connection.close()
        return answer.status, answer.getheader("Allow")

    assert await asyncio.to_thread(asked) == (405, "GET, HEAD")


async def test_a_crowd_that_sends_nothing_keeps_nobody_out(
    serving: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer than wait in the kernel: the thread accepts none of them before it sends something."""
    monkeypatch.setattr(observability_http, "REQUEST_SECONDS", 30.0)

    def visits() -> int:
        with ExitStack() as inside:
            for _ in range(observability_http.BACKLOG // 2):
                inside.enter_context(visitor(serving))
            return get(serving, "/health")[0]

    assert await asyncio.to_thread(visits) == 200


@pytest.mark.parametrize("drips", [True, False])
async def test_a_request_that_does_not_end_is_cut_off(
    serving: MetricsServer, monkeypatch: pytest.MonkeyPatch, drips: bool
) -> None:
    """Whether it sends byte after byte or stops: then the next one is served."""
    monkeypatch.setattr(observability_http, "REQUEST_SECONDS", 0.5)

    def visit() -> int:
        began = time.monotonic()
        with visitor(serving) as slow, suppress(ConnectionError):
            slow.settimeout(0.1)
            slow.send(b"GET /health")
            while time.monotonic() - began < 20:
                if drips:
                    slow.send(b"h")
                with suppress(TimeoutError):
                    if not slow.recv(1):
                        break
        assert time.monotonic() - began < 20
        return get(serving, "/health")[0]

    assert await asyncio.to_thread(visit) == 200


class Vast(Metrics):
    """With more to show than a connection takes that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        sizes = Gauge("vast", "Much.", ("size",), registry=self.registry)
        for number in range(1000):
            sizes.labels(f"{number:010000}").set(1)


async def test_a_visitor_that_does_not_read_is_left_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """10 MB do not fit into the kernel's buffers; the daemon's log has no traceback of it."""
    monkeypatch.setattr(observability_http, "REQUEST_SECONDS", 0.5)
    serving = MetricsServer("127.0.0.1:0", Vast(), 0.1)
    serving.start(FakeStatusSource())

    def visit() -> int:
        with visitor(serving) as deaf:
            deaf.send(b"GET /metrics HTTP/1.0\r\n\r\n")
            return get(serving, "/health")[0]

    assert await asyncio.to_thread(visit) == 200
    await asyncio.to_thread(serving.close)
    assert capfd.readouterr().err == ""
