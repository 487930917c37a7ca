"""A worker process's end of its connection to the daemon; the daemon's end is processes.py.

Each message is one datagram: the number of the request, then the payload. A reply repeats the
number. READY, sent once, says that the process serves requests; NOTICE answers nothing. Imported
by worker processes, so it imports little.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from contextlib import suppress

from setproctitle import setproctitle

# Bytes of a datagram: they fit the default buffer of a socket.
MAX_DATAGRAM = 192 << 10
NUMBER = struct.Struct("=q")
READY, NOTICE = 0, -1


class DaemonConnection:
    """Receives requests and sends replies. Any thread may send, one receives."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer

    def receive(self) -> tuple[int, bytes] | None:
        """The number and the payload of the next request; None once the daemon has disconnected."""
        try:
            data = self._peer.recv(MAX_DATAGRAM)
        except ConnectionResetError:  # it disconnected before it had read all replies
            return None
        if not data:
            return None
        return NUMBER.unpack_from(data)[0], data[NUMBER.size :]

    def send(self, number: int, payload: bytes = b"") -> None:
        """Send the reply to a request, READY or a NOTICE."""
        with suppress(OSError):  # the daemon has disconnected, which `receive` reports
            self._peer.send(NUMBER.pack(number) + payload)

    def close(self) -> None:
        """Disconnect. Any thread; `receive` ends."""
        self._peer.shutdown(socket.SHUT_RDWR)


def connect_to_daemon(nice_increment: int) -> tuple[DaemonConnection, list[str]]:
    """Prepare this process to serve the daemon. Returns the connection, and the arguments.

    Called first by the main function of a worker process. It exits if the daemon died before it
    could arrange that this process dies with it. nice_increment: see `lower_priority`.
    """
    title, descriptor, daemon, *arguments = sys.argv[1:]
    setproctitle(f"kvferryd: {title}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the daemon handles them
        signal.signal(number, signal.SIG_IGN)
    lower_priority(nice_increment)
    if os.getppid() != int(daemon):
        os._exit(2)
    return DaemonConnection(socket.socket(fileno=int(descriptor))), arguments


def lower_priority(increment: int) -> None:
    """Add to the nice value of this process, if it may change that (`can_lower_priority`)."""
    with suppress(OSError):
        os.nice(increment)


def can_lower_priority() -> bool:
    """Whether processes may set their priority. A seccomp profile may deny it."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))
    except OSError:
        return False
    return True
