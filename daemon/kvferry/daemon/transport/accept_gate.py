"""Stops accepting clients while file descriptors run out.

libzmq aborts the process if accept() finds no free descriptor. The kernel assigns the lowest free
number, so the number of a new connection shows how many are in use. If it is close to the limit,
the socket's file is renamed. Connected clients stay; new ones retry by themselves, and connect once
low numbers are free again. Unbinding the socket would end its connections. Event loop only.
"""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import structlog
import zmq

from kvferry.daemon.access.runtime_directory import closed_path, file_of, remove_own

# Connections that the kernel queues for accept(). These connect after the gate was closed, too.
BACKLOG = 64
MAX_RESERVED = 1024
CHECK_SECONDS = 1.0
NONE_LEFT = "the daemon has no file descriptors left; raise its LimitNOFILE, or try later"

log = structlog.get_logger()


def max_client_fd() -> int:
    """The highest descriptor number for clients; higher ones are reserved for the daemon."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit - min(MAX_RESERVED, 2 * limit // 3)


def fds_exhausted() -> bool:
    """Whether the next descriptor would be one of those reserved for the daemon."""
    try:
        number = os.dup(0)
    except OSError:
        return True
    os.close(number)
    return number > max_client_fd()


class AcceptGate:
    """The gate of an ipc socket: clients can connect while its file is at `path`.

    The socket is bound at another path and renamed once it listens, because a client that finds the
    file earlier is refused.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._closed_path = path, closed_path(path)
        self._file: tuple[int, int] | None = None
        self._last = max_client_fd()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def bind_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Bind and listen while the gate is closed. Raises zmq.ZMQError."""
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.bind(f"ipc://{self._closed_path}")
        self._file = file_of(self._closed_path)

    def open_gate(self) -> None:
        """Let clients connect."""
        self._closed_path.rename(self._path)

    def connection_accepted(self, descriptor: int) -> None:
        """A connection was accepted; close the gate if few descriptors are left."""
        if descriptor > self._last and self._timer is None:
            log.warning("not accepting clients: out of file descriptors", descriptor=descriptor)
            self._path.rename(self._closed_path)
            self._timer = self._loop.call_later(CHECK_SECONDS, self._check_descriptors)

    def close(self) -> None:
        """Remove the socket's file, which libzmq does not, if it is still ours."""
        if self._timer is not None:
            self._timer.cancel()
        if self._file is not None:
            remove_own(self._path, self._file)

    def _check_descriptors(self) -> None:
        if fds_exhausted():
            self._timer = self._loop.call_later(CHECK_SECONDS, self._check_descriptors)
        else:
            self._timer = None
            self.open_gate()
