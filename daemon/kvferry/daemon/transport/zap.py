"""The ZAP handler (ZeroMQ RFC 27): decides for libzmq whether a connection may begin.

A socket with ZMQ_ZAP_DOMAIN sends a request for each new connection, with the user, group and
process of the peer from SO_PEERCRED. ROUTER sees nothing of a refused connection. On such a socket
libzmq also rejects ZMTP 1.0 and 2.0 peers, because these versions have no handshake. Event loop
only; it never waits.

    200   the connection begins
    300   closed without a reply: the client's libzmq connects again, until the client's timeout
    400   the client gets an error, and raises FORBIDDEN
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import structlog
import zmq

from kvferry.daemon.access.connections import Connections, Decision
from kvferry.proto.errors import KVFerryError

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"kvferry"
# Maximum of requests served before the event loop runs something else.
TURN = 64
# Seconds between two log lines about deferred connections.
LOG_INTERVAL = 60.0
POLLIN = int(zmq.POLLIN)
_OK, _LATER, _FORBIDDEN, _MALFORMED = b"200", b"300", b"400", b"500"

log = structlog.get_logger()


class ZapHandler:
    """Binds the handler's address in `context`. Call `protect` for a socket before it is bound.

    update_connections: updates `connections`. refused: counts an error.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connections: Connections,
        update_connections: Callable[[], None],
        refused: Callable[[KVFerryError], object],
    ) -> None:
        self._connections = connections
        self._update_connections, self._refused = update_connections, refused
        self._loop = asyncio.get_running_loop()
        self._log_at = 0.0
        self._socket = context.socket(zmq.REP)
        self._socket.bind(ADDRESS)
        self._loop.add_reader(self._socket.fileno(), self._serve)
        self._loop.call_soon(self._serve)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(0)

    def _serve(self) -> None:
        """Serve all requests, TURN at a time: the socket's descriptor is edge-triggered."""
        for _ in range(TURN):
            if self._socket.closed or not cast(int, self._socket.get(zmq.EVENTS)) & POLLIN:
                return
            request = self._socket.recv_multipart(zmq.NOBLOCK)
            self._update_connections()
            version, number, _, address, *_ = request
            reply = [version, number, self._status(address), b"", b"", b""]
            self._socket.send_multipart(reply, zmq.NOBLOCK)
        self._loop.call_soon(self._serve)

    def _status(self, address: bytes) -> bytes:
        try:
            _, uid, gid, pid = address.split(b":")
            decision = self._connections.decide_admission(int(uid), int(gid), int(pid))
        except KVFerryError as error:
            self._refused(error)
            return _FORBIDDEN
        except ValueError:  # the kernel reported no credentials
            return _MALFORMED
        if decision is Decision.ADMIT:
            return _OK
        if (now := self._loop.time()) > self._log_at:
            self._log_at = now + LOG_INTERVAL
            log.warning("connection deferred: too many connections", uid=int(uid))
        return _LATER


def protect(socket: zmq.Socket[bytes]) -> None:
    """Let the handler decide about each connection of a socket; without a handler, refuse all."""
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    # ZMQ_ZAP_ENFORCE_DOMAIN: without it a missing handler admits everybody.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
