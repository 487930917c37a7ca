"""The interfaces through which transport reports events to the log and to the health check.

observability/event_log.py and observability/health.py implement them; app.py connects the two.
Every method is called on the event loop.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.daemon.core.actions import CloseSession, MapTensors, Pong, TensorsMapped
from kvferry.daemon.transport.peers import Peer
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.status import HealthStatus


class ClientLog(Protocol):
    """Logs what clients do and which errors they cause. None stands for an unknown client."""

    def client_connected(self, client: Peer) -> None: ...

    def client_refused(self, client: Peer) -> None: ...

    def client_disconnected(self, client: Peer, action: CloseSession) -> None: ...

    def message_refused(self, client: Peer | None, error: ErrorInfo) -> None: ...

    def job_failed(self, client: Peer | None, error: ErrorInfo) -> None: ...

    def internal_error(self, client: Peer | None, error: Exception) -> None: ...

    def mapping_started(self, client: Peer | None, action: MapTensors) -> None: ...

    def mapping_ended(self, report: TensorsMapped) -> None: ...

    def pool_registered(self, nbytes: int) -> None: ...


class HealthMonitor(Protocol):
    """Watches the health of the daemon."""

    def status(self) -> HealthStatus: ...

    async def check_health(self) -> HealthStatus: ...

    def handle_pong(self, pong: Pong) -> None: ...

    def pool_grew(self) -> None: ...
