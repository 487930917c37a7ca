"""The HTTP server: a blocked event loop, slow clients, and many clients."""

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
from support.time_limits import PROMPTLY, TIMEOUT

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
async def server(request: pytest.FixtureRequest) -> AsyncIterator[MetricsServer]:
    """A MetricsServer. The parameter has its timeouts."""
    server = MetricsServer(
        "127.0.0.1:0", Metrics(), FakeStatusSource(), 0.1, **getattr(request, "param", {})
    )
    server.start()
    yield server
    await asyncio.to_thread(server.close)


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", timeout=TIMEOUT) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_health_and_metrics_are_served(server: MetricsServer) -> None:
    status, text = await asyncio.to_thread(get, server, "/health")
    assert (status, json.loads(text)["healthy"]) == (200, True)
    assert (json.loads(text)["pool_registered_bytes"], json.loads(text)["pool_bytes"]) == (60, 100)
    status, text = await asyncio.to_thread(get, server, "/metrics")
    assert status == 200
    assert "kvferry_healthy 1.0" in text
    assert 'kvferry_pool_bytes{state="free"} 60.0' in text


@pytest.mark.parametrize("path", ["/health", "/metrics", "/"])
async def test_head_has_the_headers_of_get_and_no_body(server: MetricsServer, path: str) -> None:
    def request(method: str) -> tuple[int, dict[str, str], bytes]:
        """Also returns bytes behind the headers, which http.client ignores for HEAD."""
        with connection_to(server) as connection:
            connection.send(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
            response = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = response.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body

    status, fields, body = await asyncio.to_thread(request, "GET")
    assert int(fields["Content-Length"]) == len(body) > 0
    head_status, head_fields, head_body = await asyncio.to_thread(request, "HEAD")
    assert (head_status, head_body) == (status, b"")
    assert head_fields["Content-Type"] == fields["Content-Type"]
    assert head_fields.keys() == fields.keys()


@pytest.mark.parametrize("server", [{"snapshot_seconds": 0.1}], indirect=True)
async def test_a_blocked_loop_is_unhealthy_and_blocks_no_request(
    server: MetricsServer,
) -> None:
    """The requests run in threads. The test blocks the loop until both have their responses."""
    with ThreadPoolExecutor(2) as threads:
        requests = [threads.submit(get, server, path) for path in ("/health", "/metrics")]
        (status, health), (scraped, text) = [request.result(20) for request in requests]
    assert status == 503
    assert "the event loop has not responded" in health
    assert scraped == 200
    assert "kvferry_healthy 0.0" in text
    assert "kvferry_pool" not in text
    while (await asyncio.to_thread(get, server, "/health"))[0] != 200:
        pass


@contextmanager
def connection_to(server: MetricsServer) -> Iterator[socket.socket]:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
        yield connection


async def test_other_methods_are_refused(server: MetricsServer) -> None:
    def request() -> tuple[int, str | None]:
        connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT)
        connection.request("POST", "/metrics", b"kvferry_healthy 1")
        response = connection.getresponse()
        connection.close()
        return response.status, response.getheader("Allow")

    assert await asyncio.to_thread(request) == (405, "GET, HEAD")


@pytest.mark.parametrize("server", [{"request_seconds": 30.0}], indirect=True)
async def test_connections_that_send_nothing_do_not_block_others(server: MetricsServer) -> None:
    """They fit into the backlog. The thread accepts a connection only after it sent something."""

    def connect_many() -> int:
        with ExitStack() as connections:
            for _ in range(BACKLOG // 2):
                connections.enter_context(connection_to(server))
            return get(server, "/health")[0]

    assert await asyncio.to_thread(connect_many) == 200


@pytest.mark.parametrize("server", [{"request_seconds": 0.5}], indirect=True)
@pytest.mark.parametrize("drips", [True, False])
async def test_an_incomplete_request_is_closed_and_the_next_one_served(
    server: MetricsServer, drips: bool
) -> None:
    """This holds if the client sends byte after byte, and if it stops."""

    def request_slowly() -> int:
        began = time.monotonic()
        with connection_to(server) as slow, suppress(ConnectionError):
            slow.settimeout(0.1)
            slow.send(b"GET /health")
            while time.monotonic() - began < PROMPTLY:
                if drips:
                    slow.send(b"h")
                with suppress(TimeoutError):
                    if not slow.recv(1):
                        break
        assert time.monotonic() - began < PROMPTLY
        return get(server, "/health")[0]

    assert await asyncio.to_thread(request_slowly) == 200


class LargeMetrics(Metrics):
    """More than the kernel buffers of a connection can hold."""

    def __init__(self) -> None:
        super().__init__()
        sizes = Gauge("large", "Large.", ("size",), registry=self.registry)
        for number in range(1000):
            sizes.labels(f"{number:010000}").set(1)


async def test_sending_a_response_that_is_not_read_ends_without_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The response has 10 MB, which exceeds the buffers of the kernel."""
    server = MetricsServer(
        "127.0.0.1:0", LargeMetrics(), FakeStatusSource(), 0.1, request_seconds=0.5
    )
    server.start()

    def request_without_reading() -> int:
        with connection_to(server) as connection:
            connection.send(b"GET /metrics HTTP/1.0\r\n\r\n")
            return get(server, "/health")[0]

    assert await asyncio.to_thread(request_without_reading) == 200
    await asyncio.to_thread(server.close)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("listen", ["9464", "localhost:http", "127.0.0.1:70000", "a..b:0", "*"])
async def test_an_invalid_address_is_refused(listen: str) -> None:
    with pytest.raises(Refused) as refused:
        MetricsServer(listen, Metrics(), FakeStatusSource(), 0.1)
    assert (refused.value.code, refused.value.value) == (Code.BAD_CONFIG, listen)
