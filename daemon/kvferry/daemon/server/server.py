"""The loop: messages in, the core's answers out. Nothing here blocks or touches the device.

ZeroMQ's descriptor is edge-triggered: it wakes the loop when something changed, not while there is
something to read. So it is drained until EVENTS shows nothing, after each wake and after each
send; a turn at a time, or who sends without end would have the loop for itself. The ROUTER drops
nothing: a peer that does not take its messages gets them kept, and is sent
away when they have become too many.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.daemon.core.actions import (
    Action,
    Amend,
    Broadcast,
    Dismiss,
    Drop,
    Ended,
    Enter,
    Map,
    Mapped,
    Pinned,
    Post,
    Publish,
    Report,
    Send,
    Shelve,
    Start,
    Stream,
    Strike,
)
from kvferry.daemon.core.core import Core
from kvferry.daemon.lane.lane import Lane, MapOrder
from kvferry.daemon.server.archive import Archive
from kvferry.daemon.server.bulletins import Bulletins
from kvferry.daemon.server.descriptors import DescriptorDesk
from kvferry.daemon.server.door import BACKLOG, Door
from kvferry.daemon.server.endpoint import Endpoint
from kvferry.daemon.server.feed import Feed
from kvferry.daemon.server.peers import Peer, Peers
from kvferry.daemon.server.shelf import Shelf
from kvferry.proto.codec import MAX_MESSAGE_BYTES, decode_client_message, encode
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.messages import DaemonMessage, FdAllocation, Goodbye, Hello, News

HIGH_WATER = 256
"""Messages that ZeroMQ itself keeps for a peer each way, of whatever size."""
TURN = 128
"""Messages taken in before the loop looks after everything else."""
MAX_OUTBOX = 100_000
"""Messages kept for a peer that does not take them, before it is sent away."""
MAX_OUTBOX_BYTES = 32 << 20
MAX_NEWS = 1000
"""Messages kept for a peer beyond which it misses news: it notices, and asks for all anew."""
RETRY = 0.002
POLLIN = int(zmq.POLLIN)
"""A plain int: arithmetic on zmq's flags costs more than asking the socket."""
LINGER_MS = 1000

log = structlog.get_logger()


class Server:
    """Serves one device at one endpoint until `stop`, or until `fail` says why it cannot."""

    def __init__(self, core: Core, endpoint: Endpoint, events: str = "off") -> None:
        self._core = core
        self._lane: Lane
        self._archive: Archive
        self._shelf: Shelf
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._trouble: KVFerryError | None = None
        self._peers = Peers(endpoint.admission, self._died)
        self._desk = DescriptorDesk(endpoint, lambda: core.sessions, core.refused)
        self._bulletins = Bulletins()
        self._reports: deque[Report] = deque()
        self._drain_is_due = False
        self._context = zmq.Context(io_threads=1)
        self._feed = Feed(self._context, events)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket.bind(f"ipc://{endpoint.messages}")
        endpoint.open()
        self._door = Door(endpoint.messages)

    async def serve(self, lane: Lane, archive: Archive, shelf: Shelf, drain_seconds: float) -> None:
        """Serve until stopped; then let what was accepted end, and say goodbye."""
        self._lane, self._archive, self._shelf = lane, archive, shelf
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._watch()
        await self._stop.wait()
        self._core.stop()
        if self._trouble is None:
            await self._until_idle(drain_seconds)
            self._perform(self._core.abandon_all())
            await self._until_idle(1.0)
        await self._close()
        if self._trouble is not None:
            raise self._trouble

    def stop(self) -> None:
        self._stop.set()

    # Called from other threads

    def lane_reports(self, reports: list[Report]) -> None:
        """Who sees a result on a bulletin may act on it at once: so first it is here to be taken,
        before any message."""
        self._reports.extend(reports)
        for report in reports:
            if isinstance(report, Ended):
                self._bulletins.ended(report)
        self._loop.call_soon_threadsafe(self._take_reports)

    def pool_grew(self, nbytes: int) -> None:
        self._loop.call_soon_threadsafe(self._core.report, Pinned(nbytes))

    def fail(self, error: KVFerryError) -> None:
        """The daemon cannot go on: end with this error."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: KVFerryError) -> None:
        self._trouble = self._trouble or error
        self._stop.set()

    # In

    def _drain_soon(self) -> None:
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self, most: int = TURN) -> None:
        self._drain_is_due = False
        for _ in range(most):
            if self._socket.closed or not cast(int, self._socket.get(zmq.EVENTS)) & POLLIN:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(frames[0].bytes, frames[1:])
        self._drain_soon()

    def _watch(self) -> None:
        """Connections closed; what came through them before is heard first."""
        self._drain(10 * TURN)
        self._hear_of_closed()

    def _hear_of_closed(self) -> None:
        while not self._monitor.closed and cast(int, self._monitor.get(zmq.EVENTS)) & POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._door.came(int(event["value"]))
            else:
                self._peers.disconnected(event["value"])

    def _receive(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        peer = self._peers.by_identity.get(identity)
        try:
            if len(frames) != 1:
                raise Refused(Code.BAD_MESSAGE, "a message is one frame", len(frames))
            message = decode_client_message(frames[0].buffer)
            self._take_reports()
            if peer is not None:
                self._perform(self._core.handle(peer.session, message, time.monotonic()))
            elif isinstance(message, Hello):
                self._greet(identity, frames[0], message)
            else:
                raise Refused(Code.NO_SESSION, "say Hello first: this daemon does not know you")
        except KVFerryError as error:
            self._push(identity, self._core.refusal(None, error))

    def _greet(self, identity: bytes, frame: zmq.Frame, hello: Hello) -> None:
        self._hear_of_closed()  # or the end of this connection's namesake would seem its own
        session = secrets.token_hex(16)
        peer = self._peers.admit(session, identity, frame, hello.client)
        self._perform(self._core.welcome(session, hello))
        if session in self._core.sessions:
            log.info("client came", client=hello.client, engine=hello.engine, pid=peer.pid)
        else:
            self._peers.dismiss(session)

    def _died(self, peer: Peer) -> None:
        log.info("client went", client=peer.client, pid=peer.pid)
        self._perform(self._core.leave(peer.session))

    def _take_reports(self) -> None:
        while self._reports:
            report = self._reports.popleft()
            if isinstance(report, Mapped) and report.descriptors:
                report = self._with_tickets(report)
            self.tell(self._archive.ended(report) if isinstance(report, Ended) else (report,))

    def tell(self, reports: Iterable[Report]) -> None:
        """The core hears of what happened, and what follows from it is done."""
        for report in reports:
            self._perform(self._core.report(report))

    def _with_tickets(self, report: Mapped) -> Mapped:
        """Memory allocated here: put its descriptors where the client can collect them."""
        tickets = [self._desk.keep(report.session, d) for d in report.descriptors]
        allocations = tuple(
            FdAllocation(tickets[a.ticket], a.size) if isinstance(a, FdAllocation) else a
            for a in report.allocations
        )
        return replace(report, allocations=allocations, descriptors=())

    # Out

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:  # the usual ones first
                case Start():
                    self._bulletins.started(action, held=self._archive.started(action))
                    self._lane.post(action)
                case Send(session, message):
                    peer = self._peers.by_session.get(session)
                    if peer is not None:
                        self._send(peer, message)
                case Stream(session, messages):
                    peer = self._peers.by_session[session]
                    flows, peer.stream = peer.stream is not None, messages
                    if not flows:
                        self._stream(session)
                case Broadcast(sessions, news):
                    self._broadcast(sessions, news)
                case Publish():
                    self._feed.publish(action)
                case Post(session, ticket):
                    self._post(session, ticket)
                case Map():
                    self._map(action)
                case Dismiss(session):
                    self._desk.forget(session)
                    self._bulletins.close(session)
                    self._peers.dismiss(session)
                case Enter() | Amend() | Strike():
                    self._archive.write(action)
                case Shelve():
                    self._shelf.put(action)
                case Drop(number):
                    self._shelf.remove(number)
                    self._lane.post(action)
                case order:
                    self._lane.post(order)

    def _map(self, action: Map) -> None:
        tickets = [a.ticket for a in action.allocations if isinstance(a, FdAllocation)]
        clock = () if action.timeline is None else (action.timeline,)
        try:
            taken = self._desk.take(action.session, (*tickets, *clock))
        except KVFerryError as error:
            self._perform(
                self._core.report(Mapped(action.registration, action.session, error.info))
            )
            return
        timeline = taken[-1] if clock else None
        self._lane.post(MapOrder(action, taken[: len(tickets)], timeline))

    def _post(self, session: str, ticket: int) -> None:
        try:
            (descriptor,) = self._desk.take(session, (ticket,))
            self._bulletins.open(session, descriptor)
        except KVFerryError as error:
            self._perform([Send(session, self._core.refusal(None, error))])

    def _stream(self, session: str) -> None:
        """Send the next of many messages once the peer has taken what is there for it, and the
        others after what else is to be done."""
        peer = self._peers.by_session.get(session)
        if peer is None or peer.stream is None:
            return
        if peer.outbox:
            self._loop.call_later(RETRY, self._stream, session)
        elif (message := next(peer.stream, None)) is None:
            peer.stream = None
        else:
            self._send(peer, message)
            self._loop.call_soon(self._stream, session)

    def _broadcast(self, sessions: Sequence[str], news: News) -> None:
        data = encode(news)
        for session in sessions:
            peer = self._peers.by_session.get(session)
            if peer is None:
                continue
            if len(peer.outbox) < MAX_NEWS:
                self._send_bytes(peer, data)
            else:
                peer.missed = news

    def _send(self, peer: Peer, message: DaemonMessage) -> None:
        self._send_bytes(peer, encode(message))

    def _send_bytes(self, peer: Peer, data: bytes) -> None:
        peer.outbox.append(data)
        peer.outbox_bytes += len(data)
        if len(peer.outbox) == 1:
            self._flush(peer)
        elif len(peer.outbox) > MAX_OUTBOX or peer.outbox_bytes > MAX_OUTBOX_BYTES:
            log.warning("client takes no messages: sent away", client=peer.client, pid=peer.pid)
            peer.outbox.clear()
            self._perform(self._core.leave(peer.session))

    def _flush(self, peer: Peer) -> None:
        """Send what a peer's outbox holds; try again soon where the socket is full.

        A send that fails has looked for messages, too, and taken the wake-up for them.
        """
        self._drain_soon()
        while peer.outbox:
            try:
                self._socket.send_multipart([peer.identity, peer.outbox[0]], zmq.NOBLOCK)
            except zmq.Again:
                self._loop.call_later(RETRY, self._flush, peer)
                return
            except zmq.ZMQError:  # the peer is not connected any more; its pidfd tells the rest
                peer.outbox.clear()
                peer.outbox_bytes = 0
                return
            peer.outbox_bytes -= len(peer.outbox.popleft())
            if peer.missed is not None and not peer.outbox:
                missed, peer.missed = peer.missed, None
                peer.outbox.append(encode(News(missed.sequence, (), missed.generation)))
                peer.outbox_bytes += len(peer.outbox[0])

    def _push(self, identity: bytes, message: DaemonMessage) -> None:
        """Answer a peer that has no session, if it is still there."""
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return

    # The end

    async def _until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._core.busy or self._archive.busy) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def _close(self) -> None:
        for peer in tuple(self._peers.by_session.values()):
            self._send(peer, Goodbye("the daemon stops"))
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._door.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._peers.close()
        self._desk.close()
        self._feed.close()
        self._socket.close()
        await self._loop.run_in_executor(None, self._context.term)
