"""HTTP endpoints: /metrics for Prometheus, /health for load balancers and supervisors.

One thread serves one request at a time. It requests a snapshot from the event loop and touches no
other state of the daemon. If the loop does not respond in time, the response says so: a hung daemon
is visible and does not block the scraper.
"""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec
from prometheus_client import make_wsgi_app

from kvferry.daemon.observability.metrics import Metrics
from kvferry.daemon.observability.tcp_listener import listen_tcp, parse_address
from kvferry.proto.errors import Code, Refused
from kvferry.proto.status import DaemonStatus, HealthStatus, NamespaceStatus

# Seconds in which the event loop must return a snapshot.
SNAPSHOT_SECONDS = 2.0
# Seconds for reading a request, and for sending its response. No other request is served meanwhile.
REQUEST_SECONDS = 1.0
# Connections that the kernel queues.
BACKLOG = 16

T = TypeVar("T")


class StatusSource(Protocol):
    """Called on the event loop."""

    async def status_snapshot(self) -> tuple[DaemonStatus, Sequence[NamespaceStatus]]: ...

    async def check_health(self) -> HealthStatus:
        """Return within the deadline of a probe."""


class MetricsServer:
    """Listens at `listen` (tcp_listener.py) and serves after `start`. Raises Refused (BAD_CONFIG).

    source: of the event loop that creates the server. check_seconds: the longest time that its
    `check_health` takes. snapshot_seconds, request_seconds: see SNAPSHOT_SECONDS and
    REQUEST_SECONDS.
    """

    def __init__(
        self,
        listen: str,
        metrics: Metrics,
        source: StatusSource,
        check_seconds: float,
        *,
        snapshot_seconds: float = SNAPSHOT_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._metrics, self._source, self._check_seconds = metrics, source, check_seconds
        self._loop = asyncio.get_running_loop()
        self._snapshot_seconds = snapshot_seconds
        self._server = _listening(listen)
        self._server.request_seconds = request_seconds
        self._server.set_app(self._handle_request)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvferry-http", daemon=True
        )

    @property
    def address(self) -> str:
        """Host and port at which it listens; the actual port if port 0 was configured."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def close(self) -> None:
        """Must not be called on the event loop: a request may be waiting for it."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _handle_request(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        pages = {"/metrics": self._show_metrics, "/health": self._show_health}
        if path not in pages:
            return _plain(start, "404 Not Found", "use /metrics or /health", method)
        if method not in ("GET", "HEAD"):
            return _plain(
                start, "405 Method Not Allowed", "use GET or HEAD", method, Allow="GET, HEAD"
            )
        body = b"".join(pages[path]({**environ, "REQUEST_METHOD": "GET"}, start))
        return [] if method == "HEAD" else [body]

    def _show_metrics(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        snapshot = self._run_on_loop(lambda: self._source.status_snapshot(), self._snapshot_seconds)
        registry = self._metrics.unresponsive
        if snapshot is not None:
            self._metrics.update(*snapshot)
            registry = self._metrics.registry
        found: list[tuple[str, list[tuple[str, str]]]] = []
        (body,) = make_wsgi_app(registry)(environ, lambda *response: found.append(response))
        ((status, headers),) = found
        start(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]

    def _show_health(self, _: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        seconds = self._snapshot_seconds + self._check_seconds
        answer = self._run_on_loop(self._check_health, seconds)
        if answer is None:
            reason = f"the event loop has not responded for {seconds:g} s"
            answer = HealthStatus(False, (reason,)), {}
        health, pool = answer
        fields = {name: getattr(health, name) for name in health.__struct_fields__} | pool
        body = msgspec.json.encode(fields) + b"\n"
        status = "200 OK" if health.healthy else "503 Service Unavailable"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start(status, headers)
        return [body]

    async def _check_health(self) -> tuple[HealthStatus, dict[str, int]]:
        """The health, and the progress of registering the host pool."""
        health = await self._source.check_health()
        pool = (await self._source.status_snapshot())[0].pool
        return health, {"pool_bytes": pool.size_bytes, "pool_registered_bytes": pool.pinned_bytes}

    def _run_on_loop(
        self, create: Callable[[], Coroutine[Any, Any, T]], seconds: float
    ) -> T | None:
        """Run a coroutine on the event loop; None if it does not return in time."""
        if self._loop.is_closed():
            return None
        future = asyncio.run_coroutine_threadsafe(create(), self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            return None


def _plain(
    start: StartResponse, status: str, text: str, method: str, **headers: str
) -> Iterable[bytes]:
    body = text.encode() + b"\n"
    all_headers = {"Content-Type": "text/plain", "Content-Length": str(len(body)), **headers}
    start(status, list(all_headers.items()))
    return [] if method == "HEAD" else [body]


class _Connection(io.RawIOBase):
    """A socket with one deadline for all reads and one for each write.

    The timeout of a socket is for a single read; a client that sends byte by byte never exceeds it.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no complete request within {self._seconds} s")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)

    def write(self, data: Any) -> int:
        self._connection.settimeout(self._seconds)
        try:
            self._connection.sendall(data)
        except TimeoutError as error:  # wsgiref would print a traceback
            raise BrokenPipeError(f"response not read within {self._seconds} s") from error
        return len(data)


class _Handler(WSGIRequestHandler):
    server: _Server

    def setup(self) -> None:
        self.connection = self.request
        connection = _Connection(self.connection, self.server.request_seconds)
        self.rfile = io.BufferedReader(connection)
        self.wfile = connection  # type: ignore[assignment]  # only its `write` is used

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""


class _Server(WSGIServer):
    """Serves at a socket that listens already."""

    request_seconds = REQUEST_SECONDS

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        # The kernel does not report a connection until it sends something.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)
        # As in HTTPServer, without the DNS request for the name of this host.
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected or were too slow."""


def _listening(listen: str) -> _Server:
    try:
        host, port = parse_address(listen)
    except ValueError as error:
        message = (
            f'metrics.listen = {listen!r} is not "host:port"; set for instance "127.0.0.1:9464", '
            '":9464" for all addresses, "[::1]:0" or "off"'
        )
        raise Refused(Code.BAD_CONFIG, message, listen) from error
    try:
        return _Server(listen_tcp(host, port, BACKLOG))
    except (OSError, ValueError) as error:  # ValueError: no name of a host
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message = (
            f"cannot listen at metrics.listen = {listen!r} ({reason}); set another port per "
            'daemon, port 0 for any, or "off"'
        )
        raise Refused(Code.BAD_CONFIG, message, listen) from error
