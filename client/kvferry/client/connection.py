"""A client's ZeroMQ socket: it sends and drains without waiting, and notices a disconnect.

ZeroMQ reconnects silently, but a session ends with its connection, so the socket's monitor is
watched for the disconnect. Reconnecting opens a new socket: what was still queued in the old one
was meant for the old session.

A context that is garbage collected waits for its sockets; if they are collected with it, forever.
So the finalizer of a connection keeps its sockets, and closes them first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import time
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.proto.errors import Code, Gone, Refused

POLLIN = int(zmq.POLLIN)
"""A plain int: arithmetic on zmq's flags costs more than asking the socket."""
LINGER_MS = 200
# Between two attempts of ZeroMQ to reach a daemon: the first and the longest. Each client takes a
# random time up to twice as long, so that they do not all connect at once.
RECONNECT_MS, RECONNECT_MAX_MS = 10, 300
# A daemon does not answer the handshake of a connection beyond its user's quota. ZeroMQ connects
# again after this time; its default is 30 s.
HANDSHAKE_MS = 2000

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
_monitors = count()
_libc = ctypes.CDLL(None)


class _PollFd(ctypes.Structure):
    """ppoll, called through ctypes: Python's own poll and epoll wait for whole milliseconds, and
    its select knows no descriptor above 1,023."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Connection:
    """A DEALER to the daemon in `directory`. Not for use by several threads at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.closed = False
        self._context = zmq.Context(io_threads=1)
        self._context.setsockopt(zmq.LINGER, 0)
        self._ends: list[zmq.Socket[bytes]] = []
        self._polled = (_PollFd * 2)()
        # Not at exit: a thread may still wait there, and the process takes all with it.
        weakref.finalize(self, _let_go, self._context, self._ends).atexit = False
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self._ends.append(self.socket)
        self.socket.setsockopt(zmq.RECONNECT_IVL, random.randint(RECONNECT_MS, 2 * RECONNECT_MS))
        most = random.randint(RECONNECT_MAX_MS, 2 * RECONNECT_MAX_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, most)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        address = f"inproc://monitor-{next(_monitors)}"
        self._connected = self._lost = self._forbidden = False
        self.monitor = self.socket.get_monitor_socket(_EVENTS, address)
        self._ends.append(self.monitor)
        self.socket.connect(f"ipc://{self.directory / 'kvferry.sock'}")
        for place, end in enumerate((self.socket, self.monitor)):
            self._polled[place] = _PollFd(cast(int, end.get(zmq.FD)), select.POLLIN)

    def reopen(self) -> None:
        """Replace the socket by a new one; messages that were not sent yet are dropped."""
        self._hang_up(0)
        self._open()

    def send(self, data: bytes) -> None:
        """Hand a message to ZeroMQ. Raises Refused (BUSY) where its queue is full."""
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raise Refused(Code.BUSY, "the daemon takes no messages: try again later") from None

    def drain(self, feed: Callable[[bytes], None]) -> bool:
        """Give `feed` every message that has arrived; returns whether there was any."""
        get, recv = self.socket.get, self.socket.recv
        news = False
        while cast(int, get(zmq.EVENTS)) & POLLIN:
            with contextlib.suppress(zmq.Again):
                feed(recv(zmq.NOBLOCK))
                news = True
        return news

    def check_alive(self) -> None:
        """Raise Gone (DAEMON_GONE) once the daemon closed a connection, Refused (FORBIDDEN) if it
        never lets this user connect.

        A connection that is closed before its handshake ended is one too many at the moment, or
        its daemon is starting: ZeroMQ connects again.
        """
        while cast(int, self.monitor.get(zmq.EVENTS)) & POLLIN:
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            self._connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._forbidden |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self._lost |= event == zmq.EVENT_DISCONNECTED and self._connected
        if self._forbidden:
            message = (
                "the daemon does not let your user connect: run as the daemon's user, or in the "
                "group that its access.group names"
            )
            raise Refused(Code.FORBIDDEN, message, os.geteuid())
        if self._lost:
            raise Gone(Code.DAEMON_GONE, "the daemon went away", str(self.directory))

    def wait(self, seconds: float) -> None:
        """Sleep until something may be to be drained, or the daemon gone, or the time is over.

        Sockets' descriptors are edge-triggered, so each is asked first. A signal ends the wait.
        """
        if self.closed or any(
            cast(int, end.get(zmq.EVENTS)) & POLLIN for end in (self.socket, self.monitor)
        ):
            return
        whole = int(seconds)
        timeout = _TimeSpec(whole, int((seconds - whole) * 1e9))
        _libc.ppoll(self._polled, len(self._polled), ctypes.byref(timeout), None)

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that become readable when there may be something to drain or to notice."""
        return tuple(cast(int, end.get(zmq.FD)) for end in (self.socket, self.monitor))

    def close(self, *, heard: bool = True) -> None:
        """heard: whether a daemon is there to receive what was sent last."""
        self.closed = True
        self._hang_up(LINGER_MS if heard else 0)
        self._context.term()

    def _hang_up(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
        self._ends.clear()


class NoConnection:
    """In the place of a Connection while no daemon was found yet."""

    directory = Path()

    def __init__(self) -> None:
        self.closed = False

    def send(self, data: bytes) -> None:
        raise Gone(Code.DAEMON_GONE, "no daemon was found yet")

    def drain(self, feed: Callable[[bytes], None]) -> bool:
        return False

    def check_alive(self) -> None:
        """Nothing to notice."""

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def filenos(self) -> tuple[int, ...]:
        return ()

    def close(self, *, heard: bool = True) -> None:
        self.closed = True


def _let_go(context: zmq.Context[zmq.Socket[bytes]], ends: list[zmq.Socket[bytes]]) -> None:
    """What a connection held that was dropped; in a fork's child ZeroMQ leaves it as it is."""
    for end in ends:
        end.close(0)
    context.term()
