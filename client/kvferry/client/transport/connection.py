"""The client's ZeroMQ socket: sends and receives without waiting, and detects a disconnect.

ZeroMQ reconnects silently, but a session ends with its connection. So the socket's monitor is
polled for a disconnect. Reconnecting opens a new socket, because messages that are still queued in
the old one belong to the old session.

A ZeroMQ context that is garbage collected waits for its sockets to be closed; if they are collected
together with it, it waits forever. So a finalizer keeps the sockets, and closes them first.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import sys
import time
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.proto.codec import MAX_REPLY_BYTES
from kvferry.proto.errors import Code, Gone, Refused

# An int: arithmetic on zmq's flags costs more than reading the socket's events.
POLLIN = int(zmq.POLLIN)
# Milliseconds for which ZeroMQ still sends queued messages after a socket is closed.
LINGER_MS = 200
# Between two attempts of ZeroMQ to connect: the first and the longest. Each client uses a random
# time up to twice as long, so that they do not all connect at once.
RECONNECT_MS, RECONNECT_MAX_MS = 10, 300
# A daemon does not answer the handshake of a connection beyond its user's quota. ZeroMQ connects
# again after this time; its default is 30 s.
HANDSHAKE_MS = 2000

# Messages that are held for a client that does not poll. The daemon holds further ones, and leaves
# key events out.
RECEIVED_MESSAGES = 256

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
_monitors = count()
# Longest sleep in seconds: poll() takes the milliseconds as an int.
MAX_SLEEP = 1e6


class Connection:
    """A DEALER socket to the daemon in `directory`. Used by one thread at a time."""

    # Seconds between two calls of check_alive, while a client polls.
    alive_check_interval = 0.02
    # Bytes of a message above which the connection is closed. A message that is a little too large
    # is refused with a reason when it is decoded.
    max_message_bytes = 2 * MAX_REPLY_BYTES
    # Messages that one call of receive_messages handles at most.
    receives_at_once = sys.maxsize
    # A lookup receives messages first if more seconds have passed since the last time.
    mirror_max_age = 200e-6

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.closed = False
        self._context = zmq.Context(io_threads=1)
        self._context.setsockopt(zmq.LINGER, 0)
        self._sockets: list[zmq.Socket[bytes]] = []
        # Not at exit: another thread may still use the sockets, and the process ends anyway.
        weakref.finalize(self, _close_context, self._context, self._sockets).atexit = False
        self._open_socket()

    def _open_socket(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self._sockets.append(self.socket)
        self.socket.setsockopt(zmq.RECONNECT_IVL, random.randint(RECONNECT_MS, 2 * RECONNECT_MS))
        most = random.randint(RECONNECT_MAX_MS, 2 * RECONNECT_MAX_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, most)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVED_MESSAGES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, self.max_message_bytes)
        address = f"inproc://monitor-{next(_monitors)}"
        self._connected = self._disconnected = self._forbidden = False
        self.monitor = self.socket.get_monitor_socket(_EVENTS, address)
        self._sockets.append(self.monitor)
        # Addresses of ZeroMQ are UTF-8, whatever the locale is.
        self.socket.connect(f"ipc://{os.fsencode(self.directory / 'kvferry.sock').decode()}")
        self._poller = select.poll()
        for descriptor in self.filenos():
            self._poller.register(descriptor, select.POLLIN)

    def reopen(self) -> None:
        """Replace the socket by a new one. Queued messages are dropped.

        Raises zmq.ZMQError if the process has no descriptors left; only `close` may follow.
        """
        self._close_sockets(0)
        self._open_socket()

    def send(self, data: bytes) -> None:
        """Queue a message. Raises Refused (BUSY) if the queue is full, and as check_alive: without
        a connection there is no queue."""
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self.check_alive()
            raise Refused(Code.BUSY, "the send queue is full; try again later") from None

    def receive_messages(self, handle: Callable[[bytes], None]) -> bool:
        """Call `handle` for the messages that have arrived. Returns whether there was any."""
        get, recv = self.socket.get, self.socket.recv
        received = 0
        while received < self.receives_at_once and cast(int, get(zmq.EVENTS)) & POLLIN:
            with contextlib.suppress(zmq.Again):
                handle(recv(zmq.NOBLOCK))
                received += 1
        return received > 0

    def check_alive(self) -> None:
        """Raise Gone (DAEMON_GONE) if the connection was closed, Refused (FORBIDDEN) if the daemon
        does not let this user connect.

        A connection that is closed before its handshake has ended exceeds the user's quota, or the
        daemon is starting: ZeroMQ connects again.
        """
        while cast(int, self.monitor.get(zmq.EVENTS)) & POLLIN:
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            self._connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._forbidden |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            self._disconnected |= event == zmq.EVENT_DISCONNECTED and self._connected
        if self._forbidden:
            message = (
                "the daemon does not let your user connect; run as the daemon's user, or in the "
                "group of its access.group"
            )
            raise Refused(Code.FORBIDDEN, message, os.geteuid())
        if self._disconnected:
            raise Gone(Code.DAEMON_GONE, "the daemon disconnected", str(self.directory))

    def wait_readable(self, seconds: float) -> None:
        """Sleep until a message may have arrived, or the daemon has disconnected, or the timeout.

        The sockets' descriptors are edge-triggered, so their events are read first.
        """
        if self.closed or any(
            cast(int, socket.get(zmq.EVENTS)) & POLLIN for socket in (self.socket, self.monitor)
        ):
            return
        self._poller.poll(1e3 * min(seconds, MAX_SLEEP))

    def filenos(self) -> tuple[int, ...]:
        """Descriptors that become readable when a message or a disconnect may have arrived."""
        return tuple(cast(int, socket.get(zmq.FD)) for socket in (self.socket, self.monitor))

    def close(self, *, linger: bool = True) -> None:
        """Close the sockets. linger: first send the queued messages, for at most LINGER_MS."""
        self.closed = True
        self._close_sockets(LINGER_MS if linger else 0)
        self._context.term()

    def _close_sockets(self, linger_ms: int) -> None:
        if self.monitor in self._sockets:
            self.socket.disable_monitor()
        for socket in reversed(self._sockets):
            socket.close(0 if socket is self.monitor else linger_ms)
        self._sockets.clear()


class NoConnection:
    """Stands in for a Connection until a daemon is found, or a socket could be opened.

    reason: why there is none.
    """

    directory = Path()
    alive_check_interval = mirror_max_age = 0.0

    def __init__(self, reason: str = "no daemon has been found yet") -> None:
        self.closed = False
        self._reason = reason

    def send(self, data: bytes) -> None:
        raise Gone(Code.DAEMON_GONE, self._reason)

    def receive_messages(self, handle: Callable[[bytes], None]) -> bool:
        return False

    def check_alive(self) -> None:
        pass

    def wait_readable(self, seconds: float) -> None:
        time.sleep(seconds)

    def filenos(self) -> tuple[int, ...]:
        return ()

    def close(self, *, linger: bool = True) -> None:
        self.closed = True


def _close_context(
    context: zmq.Context[zmq.Socket[bytes]], sockets: list[zmq.Socket[bytes]]
) -> None:
    """Finalizer of a connection that was not closed. In a forked child ZeroMQ does nothing."""
    for socket in sockets:
        socket.close(0)
    context.term()
