"""HTTP while the event loop does not respond, and beside clients that are slow or many."""

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

from kvferry.daemon.observability.http import BACKLOG, MetricsServer
from kvferry.daemon.observability.metrics import Metrics
from kvferry.proto import status as wire
from kvferry.proto.errors import Code, Refused

DEVICE = wire.DeviceInfo("cpu", "cpu", "host memory")
STATUS = wire.DaemonStatus(
    "0.1",
    "boot",
    1,
    1.0,
    DEVICE,
    wire.PoolStatus(100, 60, 40),
    1,
    (),
    wire.Totals(),
    {},
    health=wire.HealthStatus(True),
)


class FakeStatusSource:
    async def status_snapshot(self) -> tuple[wire.DaemonStatus, tuple[wire.NamespaceStatus, ...]]:
        return STATUS, ()

    async def check_health(self) -> wire.HealthStatus:
        return wire.HealthStatus(True)


@pytest.fixture
async def serving(request: pytest.FixtureRequest) -> AsyncIterator[MetricsServer]:
    """Its parameter, if any, has timeouts of the server."""
    serving = MetricsServer("127.0.0.1:0", Metrics(), 0.1, **getattr(request, "param", {}))
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
        with connection_to(serving) as connection:
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


@pytest.mark.parametrize("serving", [{"snapshot_seconds": 0.1}], indirect=True)
async def test_a_loop_that_stands_still_is_unhealthy_and_blocks_no_request(
    serving: MetricsServer,
) -> None:
    """The requests are in threads; this, the loop, stands still until both have their response."""
    with ThreadPoolExecutor(2) as threads:
        requests = [threads.submit(get, serving, path) for path in ("/health", "/metrics")]
        (status, health), (scraped, text) = [request.result(20) for request in requests]
    assert status == 503
    assert "the event loop has not responded" in health
    assert scraped == 200
    assert "kvferry_healthy 0.0" in text
    assert "kvferry_pool" not in text
    while (await asyncio.to_thread(get, serving, "/health"))[0] != 200:
        pass


@contextmanager
def connection_to(server: MetricsServer) -> Iterator[socket.socket]:
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


@pytest.mark.parametrize("serving", [{"request_seconds": 30.0}], indirect=True)
async def test_connections_that_send_nothing_do_not_block_others(serving: MetricsServer) -> None:
    """Fewer than wait in the kernel: the thread accepts none of them before it sends something."""

    def connect_many() -> int:
        with ExitStack() as connections:
            for _ in range(BACKLOG // 2):
                connections.enter_context(connection_to(serving))
            return get(serving, "/health")[0]

    assert await asyncio.to_thread(connect_many) == 200


@pytest.mark.parametrize("serving", [{"request_seconds": 0.5}], indirect=True)
@pytest.mark.parametrize("drips", [True, False])
async def test_an_incomplete_request_is_closed_and_the_next_one_served(
    serving: MetricsServer, drips: bool
) -> None:
    """Whether it sends byte after byte or stops."""

    def request_slowly() -> int:
        began = time.monotonic()
        with connection_to(serving) as slow, suppress(ConnectionError):
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

    assert await asyncio.to_thread(request_slowly) == 200


class LargeMetrics(Metrics):
    """More than the kernel buffers of a connection that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        sizes = Gauge("large", "Much.", ("size",), registry=self.registry)
        for number in range(1000):
            sizes.labels(f"{number:010000}").set(1)


async def test_a_response_that_is_not_read_is_given_up_without_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """10 MB do not fit into the kernel's buffers."""
    serving = MetricsServer("127.0.0.1:0", LargeMetrics(), 0.1, request_seconds=0.5)
    serving.start(FakeStatusSource())

    def request_without_reading() -> int:
        with connection_to(serving) as connection:
            connection.send(b"GET /metrics HTTP/1.0\r\n\r\n")
            return get(serving, "/health")[0]

    assert await asyncio.to_thread(request_without_reading) == 200
    await asyncio.to_thread(serving.close)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("listen", ["9464", "localhost:http", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(Refused) as refused:
        MetricsServer(listen, Metrics(), 0.1)
    assert (refused.value.code, refused.value.value) == (Code.BAD_CONFIG, listen)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(Refused, match="another port per daemon"):
            MetricsServer(listen, Metrics(), 0.1)
