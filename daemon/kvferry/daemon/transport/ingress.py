"""Reads the ROUTER and its monitor, and serves connections fairly, in turns of limited time.

Handling a message takes some microseconds or, if it names a million blocks, a large part of a
second. So messages are first read into a queue per connection, which is cheap. Then the connection
that has used the least time is served. One that used 0.3 s waits until every other one with
messages has used as much; if there is no other, it continues at once. ROUTER alone would alternate
message by message: each cheap message of one client would wait for an expensive one of another.

The total size of the queues is limited; above it nothing is read, and ZeroMQ blocks the clients.
ZeroMQ's descriptor is edge-triggered: it signals changes, not the presence of messages. So the
socket is read until EVENTS shows none, after each wake-up and after each send. Event loop only.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.daemon.access.connections import Connections
from kvferry.daemon.transport.accept_gate import AcceptGate
from kvferry.daemon.transport.peers import Peer, Peers

# Seconds of a turn, after which the loop runs everything else: device reports, timers, other
# sockets. If one message takes longer, it is the only one of its turn.
TURN = 1e-3
# Maximum of messages read in a turn.
READ = 64
# Maximum of messages read before a closed connection is handled: its messages are handled first.
READ_BEFORE_CLOSE = 1280
# A plain int: arithmetic on zmq's flags takes longer than reading the socket option.
POLLIN = int(zmq.POLLIN)

Frames: TypeAlias = list[zmq.Frame]


class MessageHandler(Protocol):
    """Handles what the ingress reads."""

    def receive_message(self, identity: bytes, peer: Peer | None, frames: Frames) -> None:
        """Handle a message. peer: None if the connection has no session."""

    def disconnect_client(self, peer: Peer, reason: str) -> None:
        """Close the session of a client that has disconnected."""


@dataclass(slots=True, eq=False)
class IncomingQueue:
    """Messages of one connection that were read and not served.

    used: seconds of the event loop that the connection has used, comparable with Ingress._served.
    """

    identity: bytes
    used: float
    messages: deque[Frames] = field(default_factory=deque)
    # The connection is closed: the session ends once these messages are handled.
    closed: bool = False

    def __lt__(self, other: IncomingQueue) -> bool:
        return self.used < other.used


class Ingress:
    """Reads a ROUTER and its monitor. clock: seconds, monotonic."""

    # Maximum of all queued messages, and of their bytes.
    max_waiting, max_waiting_bytes = 4096, 16 << 20

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        peers: Peers,
        accept_gate: AcceptGate,
        connections: Connections,
        handler: MessageHandler,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._socket, self._peers, self._handler = socket, peers, handler
        self._accept_gate, self._connections, self._clock = accept_gate, connections, clock
        self._monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._loop = asyncio.get_running_loop()
        self._drain_is_due = self._watch_is_due = False
        # Unhandled changes: (number of a connection, accepted or closed).
        self._changes: deque[tuple[int, bool]] = deque()
        # Queues of peers that sent a message, and of connections without a session while one waits.
        self._queues: dict[bytes, IncomingQueue] = {}
        # Heap of the queues with messages, by time used.
        self._waiting: list[IncomingQueue] = []
        # Time used by the connection that was served last. One that was idle starts with at least
        # that.
        self._served = 0.0
        # Waiting messages, and their bytes.
        self._count = self._nbytes = 0

    def start(self) -> None:
        """Read from now on."""
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._watch()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(0)

    def drain_soon(self) -> None:
        """Read soon: a send may have consumed the edge of the socket's descriptor."""
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def drop_messages(self, peer: Peer) -> None:
        """Drop the queued messages of a client that has disconnected, and its used time."""
        queue = self._queues.pop(peer.identity, None)
        if queue is not None:
            self._count -= len(queue.messages)
            self._nbytes -= sum(map(_nbytes, queue.messages))
            queue.messages.clear()

    def count_connections(self) -> None:
        """Count accepted and closed connections now; they are handled later, in order."""
        self._read_monitor()
        if self._changes and not self._watch_is_due:  # the monitor's edge is gone
            self._watch_is_due = True
            self._loop.call_soon(self._watch)

    def handle_connections(self) -> None:
        """Handle accepted and closed connections."""
        self._read_monitor()
        while self._changes:
            number, accepted = self._changes.popleft()
            if accepted:
                self._peers.connection_opened(number)
            elif (peer := self._peers.connection_closed(number)) is not None:
                queue = self._queues.get(peer.identity)
                if queue is not None and queue.messages:
                    queue.closed = True
                else:
                    self._connection_closed(peer)

    # Reading

    def _drain(self) -> None:
        """Serve waiting connections for one turn."""
        self._drain_is_due = False
        if self._socket.closed:
            return
        more = self._read(READ)
        self._serve()
        if more or self._waiting:
            self.drain_soon()

    def _read(self, most: int) -> bool:
        """Read messages into queues. Return whether more may be there."""
        for _ in range(most):
            if self._count >= self.max_waiting or self._nbytes >= self.max_waiting_bytes:
                return True
            if not cast(int, self._socket.get(zmq.EVENTS)) & POLLIN:
                return False
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._enqueue(identity)
        return True

    def _enqueue(self, identity: bytes) -> None:
        """Read the rest of a message and queue it, with the credentials that a Frame has."""
        queue = self._queues.get(identity)
        if queue is None:
            queue = self._queues[identity] = IncomingQueue(identity, self._served)
        frames: Frames = []
        while self._socket.get(zmq.RCVMORE):
            frames.append(self._socket.recv(zmq.NOBLOCK, copy=False))
        if not queue.messages:
            queue.used = max(queue.used, self._served)
            heapq.heappush(self._waiting, queue)
        queue.messages.append(frames)
        self._count += 1
        self._nbytes += _nbytes(frames)

    # Serving

    def _serve(self) -> None:
        now = self._clock()
        end = now + TURN
        while self._waiting and now < end and not self._socket.closed:
            queue = heapq.heappop(self._waiting)
            if not queue.messages:  # its peer has disconnected
                continue
            self._served = queue.used
            self._serve_one(queue)
            before, now = now, self._clock()
            queue.used += now - before
            if queue.messages:
                heapq.heappush(self._waiting, queue)
            elif queue.identity not in self._peers.by_identity:
                self._queues.pop(queue.identity, None)

    def _serve_one(self, queue: IncomingQueue) -> None:
        frames = queue.messages.popleft()
        self._count -= 1
        self._nbytes -= _nbytes(frames)
        self._handler.receive_message(
            queue.identity, self._peers.by_identity.get(queue.identity), frames
        )
        peer = self._peers.by_identity.get(queue.identity)
        if queue.closed and not queue.messages and peer is not None:
            self._connection_closed(peer)

    def _connection_closed(self, peer: Peer) -> None:
        self._handler.disconnect_client(peer, "connection closed")

    # Connections

    def _watch(self) -> None:
        """Connections were accepted or closed; earlier messages on them are handled first."""
        self._watch_is_due = False
        if self._socket.closed:
            return
        self._read_monitor()
        if self._read(READ_BEFORE_CLOSE) or self._waiting:
            self.drain_soon()
        self.handle_connections()

    def _read_monitor(self) -> None:
        """Pass changes to the accept gate and the quotas at once; the rest is handled in order."""
        while not self._monitor.closed and cast(int, self._monitor.get(zmq.EVENTS)) & POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            number, accepted = int(event["value"]), event["event"] == zmq.EVENT_ACCEPTED
            if accepted:
                self._accept_gate.connection_accepted(number)
                self._connections.add_connection(number)
            else:
                self._connections.remove_connection(number)
            self._changes.append((number, accepted))


def _nbytes(frames: Frames) -> int:
    return sum(map(len, frames))
