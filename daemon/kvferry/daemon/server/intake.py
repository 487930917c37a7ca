"""What is said to the daemon, in its order: by sockets, and on trays; and who came and went.

ZeroMQ's descriptor is edge-triggered: it wakes the loop when something changed, not while there is
something to read. So it is drained until EVENTS shows nothing, after each wake and after each
send; a turn at a time, or who sends without end would have the loop for itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, TypeAlias, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.daemon.access.connections import Connections
from kvferry.daemon.server.door import Door
from kvferry.daemon.server.peers import Peer, Peers
from kvferry.daemon.server.trays import Trays
from kvferry.proto.errors import KVFerryError

TURN = 32
"""Messages taken in before the loop looks after everything else, the trays among it: who floods
the socket has one turn of two."""
BEFORE = 1280
"""Messages taken in before connections that closed are."""
POLLIN = int(zmq.POLLIN)
"""A plain int: arithmetic on zmq's flags costs more than asking the socket."""

Frames: TypeAlias = "list[bytes | zmq.Frame]"


class Listener(Protocol):
    """Who is told what was said."""

    def receive(self, identity: bytes, peer: Peer | None, frames: Frames) -> None:
        """A message came by the socket, from a peer or from a stranger."""

    def hear(self, peer: Peer, data: bytes) -> None:
        """A peer has laid this on its tray."""

    def part(self, peer: Peer, reason: str) -> None:
        """A peer is of no use any more."""


class Intake:
    """Reads a ROUTER, its monitor and the trays of peers."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        peers: Peers,
        door: Door,
        connections: Connections,
        listener: Listener,
    ) -> None:
        self._socket, self._peers, self._listener = socket, peers, listener
        self._door, self._connections = door, connections
        self._monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._loop = asyncio.get_running_loop()
        self.trays = Trays(self._laid, self._senseless)
        self._drain_is_due = self._watch_is_due = False
        self._changes: deque[tuple[int, bool]] = deque()
        """Connections, by number, that came (or else closed), and that nobody was told of."""

    def start(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._watch()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self.trays.close_all()
        self._socket.disable_monitor()
        self._monitor.close(0)

    def drain_soon(self) -> None:
        """The socket was written to, which may have swallowed its descriptor's edge."""
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def count_connections(self) -> None:
        """Bring the count of connections up to date; what else they mean is heard in order."""
        self._look_at_connections()
        if self._changes and not self._watch_is_due:  # the monitor's edge is gone
            self._watch_is_due = True
            self._loop.call_soon(self._watch)

    def hear_of_connections(self) -> None:
        self._look_at_connections()
        while self._changes:
            number, came = self._changes.popleft()
            if came:
                self._peers.connected(number)
            else:
                self._peers.disconnected(number)

    def _drain(self, most: int = TURN) -> None:
        self._drain_is_due = False
        while most > 0:
            if self._socket.closed or not cast(int, self._socket.get(zmq.EVENTS)) & POLLIN:
                return
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            most -= 1 + self._receive(identity)
        self.drain_soon()

    def _receive(self, identity: bytes) -> int:
        """Pass on what came by the socket; returns how many messages from a tray came before."""
        peer = self._peers.by_identity.get(identity)
        frames = self._frames(copy=peer is not None)
        before = 0
        if peer is not None:
            before = self.trays.catch_up(peer.session)
            peer = self._peers.by_identity.get(identity)  # it may have left with what lay there
        self._listener.receive(identity, peer, frames)
        if peer is not None:
            self.trays.heard(peer.session)
        return before

    def _frames(self, *, copy: bool) -> Frames:
        """The rest of a message. A copy costs less than a Frame, which a stranger's must be: it
        tells where it came from."""
        frames: Frames = []
        while self._socket.get(zmq.RCVMORE):
            frames.append(self._socket.recv(zmq.NOBLOCK, copy=copy))
        return frames

    def _laid(self, session: str, data: bytes) -> None:
        peer = self._peers.by_session.get(session)
        if peer is not None:
            self._listener.hear(peer, data)

    def _senseless(self, session: str, error: KVFerryError) -> None:
        peer = self._peers.by_session.get(session)
        if peer is not None:
            self._listener.part(peer, error.message)

    def _watch(self) -> None:
        """Connections came or closed; what came through those before is heard first."""
        self._watch_is_due = False
        if self._socket.closed:
            return
        self._look_at_connections()
        self._drain(BEFORE)
        self.hear_of_connections()

    def _look_at_connections(self) -> None:
        """The door has to know at once who came; the others are heard in order."""
        while not self._monitor.closed and cast(int, self._monitor.get(zmq.EVENTS)) & POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            number, came = int(event["value"]), event["event"] == zmq.EVENT_ACCEPTED
            if came:
                self._door.came(number)
                self._connections.opened(number)
            else:
                self._connections.closed(number)
            self._changes.append((number, came))
