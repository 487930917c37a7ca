"""HTTP for operators: /metrics for Prometheus, /health for whoever routes or restarts.

It has threads of its own and touches nothing of the daemon's: it asks the loop for a snapshot, and
where the loop does not answer in time, that is the answer. So a wedged daemon is seen to be one,
and hangs no scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, TypeVar

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from kvferry.daemon.server.door import crowded
from kvferry.daemon.server.metrics import Snapshot, families, wedged
from kvferry.proto.errors import Code, Refused
from kvferry.proto.status import HealthStatus

ANSWER_SECONDS = 2.0
"""How long the loop may take for a snapshot."""
REQUEST_SECONDS = 10.0
"""How long a visitor may take to say what it wants."""
MOST_VISITORS = 16
"""At a time. Others are turned away: each takes a thread, and a descriptor that clients need."""

T = TypeVar("T")


class View(Protocol):
    """What is asked of the daemon, in its loop."""

    async def snapshot(self) -> Snapshot: ...

    async def check(self) -> HealthStatus:
        """Within the probe's deadline."""


class Exporter:
    """Listens at `listen`, "host:port", from when it is made. Raises Refused (BAD_CONFIG).

    check_seconds: how long `View.check` may take.
    """

    def __init__(self, listen: str, check_seconds: float) -> None:
        self._check_seconds = check_seconds
        self._server = _Server(*_parsed(listen), self._answer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._view: View
        self._process = ProcessCollector(registry=None)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvferry-http", daemon=True
        )

    @property
    def address(self) -> str:
        """Where it listens: the port too, where any was asked for."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def start(self, view: View) -> None:
        """Answer from now on. Called in the loop."""
        self._view, self._loop = view, asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        match path.partition("?")[0]:
            case "/metrics":
                encode, kind = choose_encoder(accept)
                return HTTPStatus.OK, kind, encode(_Collected(self._metrics()))
            case "/health":
                return self._health()
        return HTTPStatus.NOT_FOUND, "text/plain", b"here are /metrics and /health\n"

    def _metrics(self) -> Iterable[Metric]:
        snapshot = self._ask(lambda: self._view.snapshot(), ANSWER_SECONDS)
        yield from wedged() if snapshot is None else families(snapshot)
        yield from self._process.collect()

    def _health(self) -> tuple[int, str, bytes]:
        patience = ANSWER_SECONDS + self._check_seconds
        health = self._ask(lambda: self._view.check(), patience)
        if health is None:
            reason = f"the loop has not answered for {patience:g} s"
            health = HealthStatus(False, (reason,))
        told = {name: getattr(health, name) for name in health.__struct_fields__}
        status = HTTPStatus.OK if health.healthy else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", msgspec.json.encode(told) + b"\n"

    def _ask(self, what: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T | None:
        """Have the loop do something; None where it does not, in time."""
        assert self._loop is not None
        if self._loop.is_closed():
            return None
        future = asyncio.run_coroutine_threadsafe(what(), self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            return None


class _Collected:
    """A registry, as far as an encoder cares."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, host: str, port: int, answer: Callable[[str, str], tuple[int, str, bytes]]
    ) -> None:
        self.answer = answer
        self._room = threading.Semaphore(MOST_VISITORS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise Refused(
                Code.BAD_CONFIG,
                f"metrics.listen cannot be had ({error.strerror}): give each daemon a port of its "
                'own, port 0 for any, or "off"',
                f"{host}:{port}",
            ) from error

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether a visitor is let in; where not, it is hung up on."""
        return not crowded() and self._room.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread for it
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A visitor that went away is nobody's trouble."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    server: _Server

    def setup(self) -> None:
        super().setup()
        self._patience = threading.Timer(REQUEST_SECONDS, self._hang_up)  # `timeout` is one read's
        self._patience.daemon = True
        self._patience.start()

    def finish(self) -> None:
        self._patience.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self.wfile.write(self._head())

    def do_HEAD(self) -> None:
        """What uptime probes and load balancers ask."""
        self._head()

    def _head(self) -> bytes:
        """Send the answer but for its body, which is returned."""
        self._patience.cancel()
        status, kind, body = self.server.answer(self.path, self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return body

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""


def _parsed(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        message = 'metrics.listen is "host:port", "127.0.0.1:9464" or "[::1]:0", or "off"'
        raise Refused(Code.BAD_CONFIG, message, listen)
    return host.strip("[]") or "0.0.0.0", int(port)
