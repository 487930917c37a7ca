"""Connected clients: their processes, as the kernel reports them.

The uid and pid of a client come from the socket (SO_PEERCRED, in ZeroMQ's Peer-Address
"localhost:uid:gid:pid"), not from its messages. A pidfd reports the exit of a client's process, and
the ROUTER's monitor the end of its connection. A client in another PID namespace has pid 0; its
pidfd is that of the socket (SO_PEERPIDFD, Linux 6.5), or it has none. Event loop only.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from kvferry.daemon.transport.accept_gate import NONE_LEFT
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import DaemonMessage, Hello, KeyEvents

# Linux, include/uapi/asm-generic/socket.h; Python has no name for it.
SO_PEERPIDFD = 77


@dataclass(slots=True, eq=False)
class Peer:
    """A connected client process.

    identity: its address on the ROUTER. The fields from `overflowed` on belong to outbox.py.
    """

    session: str
    identity: bytes
    uid: int
    pid: int
    pidfd: int | None
    # File descriptor number of the connection, as in ZeroMQ's SRCFD and monitor events.
    connection: int
    client: str
    engine: str
    # That it has opened; empty: none.
    namespace: str = ""
    # Whether it has asked for more than the status: a health check each minute fills no log.
    is_logged: bool = False
    # Reason that is logged when the session ends.
    close_reason: str = "goodbye"
    # Its outbox overflowed: the last message that it gets is a Goodbye.
    overflowed: bool = False
    outbox: deque[bytes] = field(default_factory=deque)
    outbox_bytes: int = 0
    # A long reply that is sent message by message.
    stream: Iterator[DaemonMessage] | None = None
    # The newest KeyEvents that was left out.
    missed_events: KeyEvents | None = None


def frame_credentials(frame: zmq.Frame) -> tuple[int, int]:
    """(uid, pid) of a frame's sender. Raises Refused (FORBIDDEN) if the kernel names none."""
    try:
        _, uid, _, pid = str(frame.get("Peer-Address")).split(":")
        return int(uid), int(pid)
    except (zmq.ZMQError, ValueError) as error:
        message = "the kernel reports no credentials of the client; connect through the ipc socket"
        raise Refused(Code.FORBIDDEN, message) from error


def open_pidfd(connection: int, pid: int) -> int | None:
    """A pidfd of the process at the other end of a connected socket; None if there is none.

    connection: descriptor of the socket. pid: 0 if it is not visible here. Raises Refused (BUSY).
    """
    try:
        with socket.socket(fileno=os.dup(connection)) as peer:
            try:
                return peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
            except OSError as error:
                if error.errno != errno.ENOPROTOOPT:
                    raise
        return os.pidfd_open(pid) if pid else None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise Refused(Code.BUSY, NONE_LEFT, error.strerror) from error
        return None  # the process has ended: so does the connection


class Peers:
    """All connected clients, by session and by address.

    on_exit: called with a client whose process has exited, and the reason.
    """

    def __init__(self, on_exit: Callable[[Peer, str], None]) -> None:
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self.by_session: dict[str, Peer] = {}
        self.by_identity: dict[bytes, Peer] = {}
        self._by_connection: dict[int, Peer] = {}
        # Numbers of closed connections that no newer connection has.
        self._closed: set[int] = set()

    def add_peer(self, session: str, identity: bytes, frame: zmq.Frame, hello: Hello) -> Peer:
        """Add the process that sent `frame`; zap.py has admitted it.

        Raises Refused (FORBIDDEN, BUSY; NO_SESSION if it has disconnected).
        """
        connection = int(frame.get(zmq.SRCFD))
        self._check_connected(identity, connection)
        uid, pid = frame_credentials(frame)
        pidfd = open_pidfd(connection, pid)
        peer = Peer(session, identity, uid, pid, pidfd, connection, hello.client, hello.engine)
        self.by_session[session] = self.by_identity[identity] = peer
        self._by_connection[connection] = peer
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._on_exit, peer, "process exited")
        return peer

    def remove_peer(self, session: str) -> None:
        """Remove a client whose session has ended."""
        peer = self.by_session.pop(session)
        del self.by_identity[peer.identity]
        if self._by_connection.get(peer.connection) is peer:
            del self._by_connection[peer.connection]
        if peer.pidfd is not None:
            self._loop.remove_reader(peer.pidfd)
            os.close(peer.pidfd)

    def connection_opened(self, connection: int) -> None:
        """A connection was accepted."""
        self._closed.discard(connection)

    def connection_closed(self, connection: int) -> Peer | None:
        """A connection closed. Return its peer, if it had a session."""
        self._closed.add(connection)
        return self._by_connection.get(connection)

    def close(self) -> None:
        for session in tuple(self.by_session):
            self.remove_peer(session)

    def _check_connected(self, identity: bytes, connection: int) -> None:
        """Raise Refused (NO_SESSION) if the connection is closed: messages outlive it.

        Its number may belong to another client now. If a client chooses no identity, ROUTER numbers
        it in order, so the higher number is the newer client.
        """
        other = self._by_connection.get(connection)
        late = other is not None and identity[:1] == b"\0" and identity < other.identity
        if late or connection in self._closed:
            message = f"connection {connection} is closed; connect again"
            raise Refused(Code.NO_SESSION, message, connection)
        if other is not None:
            self._on_exit(other, "connection closed")
