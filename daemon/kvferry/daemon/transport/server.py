"""The server: passes messages to the core and performs its actions.

It never blocks and never touches the device. Messages come from the intake (intake.py) and are sent
through outboxes (outbox.py). All reports of one wake-up are handled together, and a session gets
their results in one message. Event loop only, except `lane_reports`,
`pool_grew` and `fail`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import zmq

from kvferry.daemon.access.connections import Connections
from kvferry.daemon.access.endpoint import Endpoint
from kvferry.daemon.core.actions import (
    Action,
    Broadcast,
    CloseSession,
    CommitBlocks,
    FreeDeferred,
    HealthChecked,
    KeepTensors,
    MapTensors,
    Pong,
    PoolRegistered,
    PublishKVEvents,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
    ReleaseTensors,
    Report,
    SendMessage,
    SendStream,
    StartTransfer,
    TensorsMapped,
    TransferCompleted,
)
from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.core import Core
from kvferry.daemon.device.mappings import MapCommand
from kvferry.daemon.device.report_queue import ReportQueue
from kvferry.daemon.device.worker import DeviceWorker
from kvferry.daemon.observability.event_log import EventLog
from kvferry.daemon.observability.health import Health
from kvferry.daemon.persistence.kept_tensor_store import KeptTensorStore
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.daemon.transport.accept_gate import AcceptGate
from kvferry.daemon.transport.fd_passing import FdServer
from kvferry.daemon.transport.ingress import Frames, Ingress
from kvferry.daemon.transport.outbox import Outboxes
from kvferry.daemon.transport.peers import Peer, Peers
from kvferry.daemon.transport.zap import ZapHandler, protect
from kvferry.proto.codec import MAX_MESSAGE_BYTES, decode_client_message
from kvferry.proto.errors import Code, ErrorInfo, KVFerryError, Refused
from kvferry.proto.memory import FdAllocation
from kvferry.proto.messages import (
    ClientMessage,
    DaemonMessage,
    Finished,
    Goodbye,
    Hello,
    JobResult,
    StatusRequest,
)
from kvferry.proto.status import DaemonStatus, HealthStatus, NamespaceStatus

# Messages of any size that ZeroMQ itself queues per peer and direction.
HIGH_WATER = 256
LINGER_MS = 1000
# Of a connection without a session nothing larger is decoded: to do so may take 0.3 s, and a new
# connection has used no time yet (intake.py).
MAX_HELLO_BYTES = 8192


def ignore(_: PublishKVEvents) -> None:
    """Drop KV events."""


class Server:
    """Serves one device at one endpoint until `stop` or `fail`."""

    def __init__(
        self, core: Core, endpoint: Endpoint, publish: Callable[[PublishKVEvents], None] = ignore
    ) -> None:
        self._core, self._publish = core, publish
        self._worker: DeviceWorker
        self._region_store: RegionStore
        self._shelf: KeptTensorStore
        self._health: Health
        self._inside: dict[str, Callable[[DaemonMessage], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._trouble: KVFerryError | None = None
        self._peers = Peers(self.part)
        self._desk = FdServer(endpoint, lambda: core.sessions, core.refused)
        self._journal = EventLog()
        self._report_queue = ReportQueue(self._loop, self._take_reports)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._door = AcceptGate(endpoint.messages)
        connections = Connections(endpoint.admission)
        self._intake = Ingress(self._socket, self._peers, self._door, connections, self)
        self._zap = ZapHandler(
            self._context, connections, self._intake.count_connections, core.refused
        )
        protect(self._socket)
        self._door.bind(self._socket)
        endpoint.open()
        self._door.open()
        self._outboxes = Outboxes(self._socket, self._peers, self._intake.drain_soon, self.part)

    def inside(self, hear: Callable[[DaemonMessage], None]) -> Callable[[ClientMessage], None]:
        """Open a session inside the daemon; return its send function. `hear` gets the replies."""
        session = secrets.token_hex(16)
        self._core.enter(session)
        self._inside[session] = hear
        return lambda said: self._perform(self._core.handle(session, said, time.monotonic()))

    async def serve(
        self,
        worker: DeviceWorker,
        region_store: RegionStore,
        shelf: KeptTensorStore,
        health: Health,
        drain_seconds: float,
    ) -> None:
        """Serve until stopped, then let accepted jobs end and send Goodbye to all clients."""
        self._worker, self._region_store = worker, region_store
        self._shelf, self._health = shelf, health
        health.start()
        self._intake.start()
        await self._stop.wait()
        self._core.stop()
        health.stop()
        if self._trouble is None:
            await self._until_idle(drain_seconds)
            self._perform(self._core.abandon_all())
            await self._until_idle(1.0)
        await self._close()
        if self._trouble is not None:
            raise self._trouble

    def stop(self) -> None:
        self._stop.set()

    # What operators see

    async def check(self) -> HealthStatus:
        return await self._health.check()

    async def snapshot(self) -> tuple[DaemonStatus, tuple[NamespaceStatus, ...]]:
        self._core.report(self._checked())
        return self._core.status(time.monotonic()), self._core.namespaces()

    # Called from other threads

    def device_reports(self, reports: list[Report]) -> None:
        self._report_queue.put(reports)

    def pool_grew(self, nbytes: int) -> None:
        self._loop.call_soon_threadsafe(self._grew, nbytes)

    def fail(self, error: KVFerryError) -> None:
        """End the daemon with this error. Any thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _grew(self, nbytes: int) -> None:
        self._core.report(PoolRegistered(nbytes))
        if nbytes == self._core.pool_bytes:
            self._journal.pool_registered(nbytes)
        self._health.pool_grew()

    def _fail(self, error: KVFerryError) -> None:
        self._trouble = self._trouble or error
        self._stop.set()

    # In

    def receive(self, identity: bytes, peer: Peer | None, frames: Frames) -> None:
        try:
            if len(frames) != 1:
                text = f"a message of {len(frames)} frames was received; send one frame"
                raise Refused(Code.BAD_MESSAGE, text, len(frames))
            frame = frames[0]
            if peer is None and len(frame) > MAX_HELLO_BYTES:
                text = (
                    f"a message of {len(frame)} bytes was received before Hello; send Hello first"
                )
                raise Refused(Code.NO_SESSION, text, len(frame))
            message = decode_client_message(frame if isinstance(frame, bytes) else frame.buffer)
            if peer is not None:
                self._handle(peer, message)
            elif isinstance(message, Hello) and isinstance(frame, zmq.Frame):
                self._greet(identity, frame, message)
            else:
                kind = type(message).__name__
                text = f"{kind} was received before Hello; send Hello first"
                raise Refused(Code.NO_SESSION, text, kind)
        except KVFerryError as error:
            self._refuse(identity, peer, error)
        except Exception as error:
            self._send_away(identity, peer, error)

    def part(self, peer: Peer, reason: str) -> None:
        """Close the session of a client that disconnected or is disconnected."""
        if peer.session in self._peers.by_session:
            peer.leaving = reason
            self._intake.forget(peer)
            self._perform(self._core.leave(peer.session))

    def _handle(self, peer: Peer, message: ClientMessage) -> None:
        self._take_reports()
        if isinstance(message, StatusRequest):
            self._core.report(self._checked())
        self._perform(self._core.handle(peer.session, message, time.monotonic()))

    def _refuse(self, identity: bytes, peer: Peer | None, error: KVFerryError) -> None:
        self._journal.refused(peer, error.info)
        self._outboxes.answer(identity, self._core.refusal(None, error))

    def _send_away(self, identity: bytes, peer: Peer | None, error: Exception) -> None:
        """Disconnect a client whose message caused an internal error; the others continue."""
        self._journal.broke(peer, error)
        self._outboxes.answer(identity, Goodbye("internal error of the daemon; see its log"))
        if peer is not None:
            self.part(peer, "internal error")

    def _greet(self, identity: bytes, frame: zmq.Frame, hello: Hello) -> None:
        self._take_reports()
        self._intake.handle_connections()  # or its number's last owner's end would seem its own
        session = secrets.token_hex(16)
        peer = self._peers.admit(session, identity, frame, hello)
        self._perform(self._core.welcome(session, hello, peer.uid))
        if session in self._core.sessions:
            self._journal.came(peer)
        else:
            self._journal.not_welcome(peer)
            self._peers.dismiss(session)

    def _take_reports(self) -> None:
        reports = list[Report]()
        for report in self._report_queue.take():
            if isinstance(report, TensorsMapped):
                self._journal.mapped(report)
                report = self._with_tickets(report) if report.descriptors else report
            elif isinstance(report, Pong):
                self._health.handle_pong(report)
            reports.append(report)
        self.tell(reports)
        for report in reports:
            if isinstance(report, TransferCompleted):
                self._region_store.ended(report.serial)

    def _checked(self) -> HealthChecked:
        return HealthChecked(self._health.status(), self._region_store.verification)

    def tell(self, reports: Iterable[Report]) -> None:
        """Pass reports to the core and perform its actions."""
        actions = list[Action]()
        for report in reports:
            follows = self._core.report(report)
            if isinstance(report, TransferCompleted) and report.error is not None:
                self._tell_failed(report.error, follows)
            actions += follows
        self._perform(merge_results(actions))

    def _tell_failed(self, error: ErrorInfo, actions: list[Action]) -> None:
        """Log a failed job, unless it is the probe's."""
        sessions = [action.session for action in actions if isinstance(action, SendMessage)]
        if not self._inside.keys() & set(sessions):
            peers = [peer for name in sessions if (peer := self._peers.by_session.get(name))]
            self._journal.failed(peers[0] if peers else None, error)

    def _with_tickets(self, report: TensorsMapped) -> TensorsMapped:
        """Register the descriptors of allocated memory, so that the client can fetch them."""
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
                case StartTransfer():
                    self._region_store.invalidate(action)
                    self._worker.post(action)
                    self._region_store.touch(action)
                case CommitBlocks():
                    self._region_store.commit(action)
                case SendMessage(session, message):
                    peer = self._peers.by_session.get(session)
                    if peer is not None:
                        self._outboxes.send(peer, message)
                    elif hear := self._inside.get(session):
                        hear(message)
                case SendStream(session, messages):
                    self._outboxes.stream(session, messages)
                case Broadcast(sessions, news):
                    self._outboxes.broadcast(sessions, news)
                case PublishKVEvents():
                    self._publish(action)
                case MapTensors():
                    self._map(action)
                case CloseSession(session):
                    self._journal.went(self._peers.by_session[session], action)
                    self._desk.forget(session)
                    self._peers.dismiss(session)
                case RegionCreated() | RegionUpdated() | RegionFreed():
                    self._region_store.write(action)
                case KeepTensors():
                    self._shelf.put(action)
                case ReleaseTensors(number):
                    self._shelf.remove(number)
                    self._worker.post(action)
                case FreeDeferred(rubble):
                    self._sweep(rubble)
                case command:
                    self._worker.post(command)

    def _sweep(self, rubble: DeferredFree) -> None:
        if rubble.clear_some():
            self._loop.call_soon(self._sweep, rubble)

    def _map(self, action: MapTensors) -> None:
        tickets = [a.ticket for a in action.allocations if isinstance(a, FdAllocation)]
        clock = () if action.timeline is None else (action.timeline,)
        try:
            taken = self._desk.take(action.session, (*tickets, *clock))
        except KVFerryError as error:
            self._perform(
                self._core.report(TensorsMapped(action.registration, action.session, error.info))
            )
            return
        timeline = taken[-1] if clock else None
        self._journal.mapping(self._peers.by_session.get(action.session), action)
        self._worker.post(MapCommand(action, taken[: len(tickets)], timeline))

    # The end

    async def _until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._core.busy or self._region_store.busy) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def _close(self) -> None:
        for peer in tuple(self._peers.by_session.values()):
            self._outboxes.send(peer, Goodbye("the daemon is stopping"))
        self._intake.close()
        self._door.close()
        self._peers.close()
        self._desk.close()
        self._socket.close()
        self._zap.close()
        await self._loop.run_in_executor(None, self._context.term)


def merge_results(actions: list[Action]) -> list[Action]:
    """The actions with all results of a session in one message, where its first one stood.

    A message costs the client and the daemon more than a result does. A result may pass others of
    its session's messages on the way forward, but no other result: so Waited stays behind the
    results of its jobs.
    """
    results: defaultdict[str, list[JobResult]] = defaultdict(list)
    for action in actions:
        if isinstance(action, SendMessage) and isinstance(action.message, Finished):
            results[action.session] += action.message.results
    merged = list[Action]()
    for action in actions:
        if isinstance(action, SendMessage) and isinstance(action.message, Finished):
            if (together := results.pop(action.session, None)) is not None:
                merged.append(SendMessage(action.session, Finished(tuple(together))))
        else:
            merged.append(action)
    return merged
