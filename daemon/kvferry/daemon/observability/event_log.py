"""The log events of clients, engines and failures, with a rate limit for failures.

Of each kind of failure at most one line per ten seconds is logged, with the number of suppressed
lines, so that a client that retries every millisecond does not flood the log. Event loop only.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import structlog

from kvferry.daemon.core.actions import CloseSession, MapTensors, TensorsMapped
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.messages import DaemonMessage, Done, Opened

# Seconds between two lines of one kind.
INTERVAL = 10.0
# Maximum of tracked kinds: there are few codes, but there may be many client names.
MAX_KINDS = 256

log = structlog.get_logger()


class RateLimiter:
    """Passes one event per kind and `seconds`, and counts the others."""

    def __init__(self, seconds: float = INTERVAL) -> None:
        self._seconds = seconds
        self._kinds: dict[tuple[str, ...], tuple[float, int]] = {}

    def passes(self, kind: tuple[str, ...], now: float) -> int | None:
        """Whether to log an event of this kind now.

        None: suppress it. Else log it, with the returned number of suppressed events.
        now: seconds, monotonic.
        """
        last, suppressed = self._kinds.get(kind, (float("-inf"), 0))
        if now - last < self._seconds:
            self._kinds[kind] = last, suppressed + 1
            return None
        self._kinds.pop(kind, None)
        if len(self._kinds) >= MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = now, 0
        return suppressed


class LoggedClient(Protocol):
    """A client as it is logged: its name, its engine, its user and process, the namespace that it
    has opened, why it disconnected."""

    client: str
    engine: str
    uid: int
    pid: int
    namespace: str
    close_reason: str


class EventLog:
    """Writes the log events. client: None if the client is unknown."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._rate_limiter = RateLimiter()
        self._mappings: dict[int, tuple[LoggedClient, MapTensors, float]] = {}

    def client_connected(self, client: LoggedClient) -> None:
        """A client has sent its first message that is no question about the status."""
        log.info("client connected", **_who(client))

    def replied(self, client: LoggedClient, message: DaemonMessage) -> None:
        """A client gets this reply: who has opened a namespace, and who has emptied it."""
        match message:
            case Opened() if message.name != client.namespace:
                client.namespace = message.name
                log.info("namespace opened", namespace=message.name, **_who(client))
            case Done():
                kind = "namespace reset", client.namespace
                suppressed = self._rate_limiter.passes(kind, time.monotonic())
                if suppressed is not None:
                    log.info(
                        "namespace reset",
                        namespace=client.namespace,
                        **_who(client),
                        suppressed=suppressed,
                    )

    def client_disconnected(self, client: LoggedClient, action: CloseSession) -> None:
        log.info(
            "client disconnected",
            **_who(client),
            reason=client.close_reason,
            jobs_lost=action.unfinished,
            bytes_moved=action.nbytes,
        )

    def mapping_started(self, client: LoggedClient | None, action: MapTensors) -> None:
        """Mapping of an engine's tensors starts. client: None for the daemon's own session."""
        if client is not None:
            self._mappings[action.registration] = client, action, time.monotonic()

    def mapping_ended(self, report: TensorsMapped) -> None:
        if report.registration not in self._mappings:
            return
        client, action, started = self._mappings.pop(report.registration)
        if report.error is not None:
            self._warn("engine registration failed", client, report.error)
            return
        layout = action.layout.layout_arrays
        log.info(
            "engine registered",
            engine=client.engine,
            pid=client.pid,
            tensors=layout.num_tensors,
            groups=layout.num_groups,
            gpu_blocks=int(layout.tensors[0].max()),
            host_blocks=action.layout.host_blocks,
            host_block_bytes=action.layout.host_block_bytes,
            copied=[f"store {each.store}, load {each.load}" for each in report.copying],
            seconds=round(time.monotonic() - started, 3),
        )

    def pool_registered(self, nbytes: int) -> None:
        seconds = round(time.monotonic() - self._started, 2)
        log.info("pool registered", bytes=nbytes, seconds=seconds)

    def message_refused(self, client: LoggedClient | None, error: ErrorInfo) -> None:
        """A message was invalid, or its connection has no session."""
        self._warn("message refused", client, error)

    def client_refused(self, client: LoggedClient) -> None:
        """A Hello was refused."""
        suppressed = self._rate_limiter.passes(
            ("connection refused", client.client), time.monotonic()
        )
        if suppressed is not None:
            log.warning(
                "connection refused", client=client.client, pid=client.pid, suppressed=suppressed
            )

    def job_failed(self, client: LoggedClient | None, error: ErrorInfo) -> None:
        """A job that was accepted failed."""
        self._warn("job failed", client, error)

    def internal_error(self, client: LoggedClient | None, error: Exception) -> None:
        """An unexpected exception, with its traceback."""
        suppressed = self._rate_limiter.passes(
            ("internal error", type(error).__name__), time.monotonic()
        )
        if suppressed is not None:
            engine = client.engine if client else ""
            log.error("internal error", engine=engine, suppressed=suppressed, exc_info=error)

    def _warn(self, what: str, client: LoggedClient | None, error: ErrorInfo) -> None:
        suppressed = self._rate_limiter.passes((what, error.code), time.monotonic())
        if suppressed is not None:
            log.warning(
                what,
                engine=client.engine if client else "",
                code=error.code,
                reason=error.message,
                value=error.value,
                suppressed=suppressed,
            )


def _who(client: LoggedClient) -> dict[str, Any]:
    return {
        "client": client.client,
        "engine": client.engine,
        "uid": client.uid,
        "pid": client.pid,
    }
