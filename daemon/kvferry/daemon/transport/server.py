"""The server: passes messages to the core and performs its actions.

It never blocks and never touches the device. Messages come from the ingress (ingress.py) and are
sent through outboxes (outbox.py). Each kind of action has one owner that performs it: transport,
device worker, persistence, KV event publisher. All reports of one wake-up are handled together, and
a session gets their results in one message. Event loop only, except `device_reports`, `pool_grew`
and `fail`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable

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
from kvferry.daemon.device.report_queue import ReportQueue
from kvferry.daemon.device.worker import DeviceWorker
from kvferry.daemon.observability.event_log import EventLog
from kvferry.daemon.observability.health import Health
from kvferry.daemon.persistence.kept_tensor_store import KeptTensorStore
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.daemon.transport.accept_gate import AcceptGate
from kvferry.daemon.transport.fd_passing import FdServer
from kvferry.daemon.transport.ingress import Frames, Ingress
from kvferry.daemon.transport.outbox import Outboxes, merge_results
from kvferry.daemon.transport.peers import Peer, Peers
from kvferry.daemon.transport.zap import ZapHandler, protect
from kvferry.proto.codec import MAX_MESSAGE_BYTES, decode_client_message
from kvferry.proto.errors import Code, ErrorInfo, KVFerryError, Refused
from kvferry.proto.messages import (
    ClientMessage,
    DaemonMessage,
    Goodbye,
    Hello,
    StatusRequest,
)
from kvferry.proto.status import DaemonStatus, HealthStatus, NamespaceStatus

# Messages of any size that ZeroMQ itself queues per peer and direction.
HIGH_WATER = 256
LINGER_MS = 1000
# Largest message of a connection without a session. Decoding a large one takes up to 0.3 s, and the
# ingress cannot charge that time to a new connection (ingress.py).
MAX_HELLO_BYTES = 8192


def ignore(_: PublishKVEvents) -> None:
    """Discard KV events."""


class Server:
    """Serves one device at one endpoint until `stop` or `fail`."""

    def __init__(
        self, core: Core, endpoint: Endpoint, publish: Callable[[PublishKVEvents], None] = ignore
    ) -> None:
        self._core, self._publish = core, publish
        self._worker: DeviceWorker
        self._region_store: RegionStore
        self._kept_tensor_store: KeptTensorStore
        self._health: Health
        self._own_sessions: dict[str, Callable[[DaemonMessage], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._error: KVFerryError | None = None
        self._peers = Peers(self.disconnect_client)
        self._fd_server = FdServer(endpoint, lambda: core.sessions, core.error_reply)
        self._event_log = EventLog()
        self._report_queue = ReportQueue(self._loop, self._take_reports)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._accept_gate = AcceptGate(endpoint.messages)
        connections = Connections(endpoint.admission)
        self._ingress = Ingress(self._socket, self._peers, self._accept_gate, connections, self)
        self._zap = ZapHandler(
            self._context, connections, self._ingress.count_connections, core.error_reply
        )
        protect(self._socket)
        self._accept_gate.bind_socket(self._socket)
        endpoint.apply_access()
        self._accept_gate.open_gate()
        self._outboxes = Outboxes(
            self._socket, self._peers, self._ingress.drain_soon, self.disconnect_client
        )

    def open_own_session(
        self, receive: Callable[[DaemonMessage], None]
    ) -> Callable[[ClientMessage], None]:
        """Open a session inside the daemon; return its send function.

        receive: called with each reply.
        """
        session = secrets.token_hex(16)
        self._core.open_own_session(session)
        self._own_sessions[session] = receive

        def send(message: ClientMessage) -> None:
            self._perform(self._core.handle(session, message, time.monotonic()))

        return send

    async def serve(
        self,
        worker: DeviceWorker,
        region_store: RegionStore,
        kept_tensor_store: KeptTensorStore,
        health: Health,
        drain_seconds: float,
    ) -> None:
        """Serve until stopped, then let accepted jobs end and send Goodbye to all clients."""
        self._worker, self._region_store = worker, region_store
        self._kept_tensor_store, self._health = kept_tensor_store, health
        health.start()
        self._ingress.start()
        await self._stop.wait()
        self._core.stop()
        health.stop()
        if self._error is None:
            await self._wait_until_idle(drain_seconds)
            self._perform(self._core.cancel_all_transfers())
            await self._wait_until_idle(1.0)
        await self._close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._stop.set()

    # What operators see

    async def check_health(self) -> HealthStatus:
        return await self._health.check_health()

    async def status_snapshot(self) -> tuple[DaemonStatus, tuple[NamespaceStatus, ...]]:
        self._core.report(self._health_report())
        return self._core.status(time.monotonic()), self._core.namespaces()

    # Called from other threads

    def device_reports(self, reports: list[Report]) -> None:
        self._report_queue.put_reports(reports)

    def pool_grew(self, nbytes: int) -> None:
        self._loop.call_soon_threadsafe(self._pool_registered, nbytes)

    def fail(self, error: KVFerryError) -> None:
        """End the daemon with this error. Any thread."""
        self._loop.call_soon_threadsafe(self._stop_with_error, error)

    def _pool_registered(self, nbytes: int) -> None:
        self._core.report(PoolRegistered(nbytes))
        if nbytes == self._core.pool_bytes:
            self._event_log.pool_registered(nbytes)
        self._health.pool_grew()

    def _stop_with_error(self, error: KVFerryError) -> None:
        self._error = self._error or error
        self._stop.set()

    # Messages and reports

    def receive_message(self, identity: bytes, peer: Peer | None, frames: Frames) -> None:
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
                self._open_session(identity, frame, message)
            else:
                kind = type(message).__name__
                text = f"{kind} was received before Hello; send Hello first"
                raise Refused(Code.NO_SESSION, text, kind)
        except KVFerryError as error:
            self._refuse(identity, peer, error)
        except Exception as error:
            self._disconnect_after_error(identity, peer, error)

    def disconnect_client(self, peer: Peer, reason: str) -> None:
        """Close the session of a client that has disconnected or is to be disconnected."""
        if peer.session in self._peers.by_session:
            peer.close_reason = reason
            self._ingress.drop_messages(peer)
            self._perform(self._core.close_session(peer.session))

    def _handle(self, peer: Peer, message: ClientMessage) -> None:
        self._take_reports()
        if isinstance(message, StatusRequest):
            self._core.report(self._health_report())
        self._perform(self._core.handle(peer.session, message, time.monotonic()))

    def _refuse(self, identity: bytes, peer: Peer | None, error: KVFerryError) -> None:
        self._event_log.message_refused(peer, error.info)
        self._outboxes.send_without_session(identity, self._core.refusal_reply(None, error))

    def _disconnect_after_error(self, identity: bytes, peer: Peer | None, error: Exception) -> None:
        """Disconnect a client whose message caused an internal error; the others continue."""
        self._event_log.internal_error(peer, error)
        self._outboxes.send_without_session(
            identity, Goodbye("internal error of the daemon; see its log")
        )
        if peer is not None:
            self.disconnect_client(peer, "internal error")

    def _open_session(self, identity: bytes, frame: zmq.Frame, hello: Hello) -> None:
        self._take_reports()
        # First: the disconnect of an earlier peer with this number would seem to be this peer's.
        self._ingress.handle_connections()
        session = secrets.token_hex(16)
        peer = self._peers.add_peer(session, identity, frame, hello)
        self._perform(self._core.open_session(session, hello, peer.uid))
        if session in self._core.sessions:
            self._event_log.client_connected(peer)
        else:
            self._event_log.client_refused(peer)
            self._peers.remove_peer(session)

    def _take_reports(self) -> None:
        reports = list[Report]()
        for report in self._report_queue.take_reports():
            if isinstance(report, TensorsMapped):
                self._event_log.mapping_ended(report)
                report = self._fd_server.hold_fds_of(report)
            elif isinstance(report, Pong):
                self._health.handle_pong(report)
            reports.append(report)
        self.report_to_core(reports)
        for report in reports:
            if isinstance(report, TransferCompleted):
                self._region_store.end_store(report.serial)

    def _health_report(self) -> HealthChecked:
        return HealthChecked(self._health.status(), self._region_store.verification)

    def report_to_core(self, reports: Iterable[Report]) -> None:
        """Pass reports to the core and perform its actions."""
        actions = list[Action]()
        for report in reports:
            follows = self._core.report(report)
            if isinstance(report, TransferCompleted) and report.error is not None:
                self._log_failed(report.error, follows)
            actions += follows
        self._perform(merge_results(actions))

    def _log_failed(self, error: ErrorInfo, actions: list[Action]) -> None:
        """Log a failed job, unless it is the probe's."""
        sessions = [action.session for action in actions if isinstance(action, SendMessage)]
        if not self._own_sessions.keys() & set(sessions):
            peers = [peer for name in sessions if (peer := self._peers.by_session.get(name))]
            self._event_log.job_failed(peers[0] if peers else None, error)

    # Actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:  # the most frequent first
                case StartTransfer():
                    self._region_store.invalidate_blocks(action)
                    self._worker.post_command(action)
                    self._region_store.touch_blocks(action)
                case CommitBlocks():
                    self._region_store.commit_store(action)
                case SendMessage(session, message):
                    peer = self._peers.by_session.get(session)
                    if peer is not None:
                        self._outboxes.send_message(peer, message)
                    elif receive := self._own_sessions.get(session):
                        receive(message)
                case SendStream(session, messages):
                    self._outboxes.start_stream(session, messages)
                case Broadcast(sessions, key_events):
                    self._outboxes.broadcast_events(sessions, key_events)
                case PublishKVEvents():
                    self._publish(action)
                case MapTensors():
                    self._map_tensors(action)
                case CloseSession(session):
                    self._event_log.client_disconnected(self._peers.by_session[session], action)
                    self._fd_server.close_session(session)
                    self._peers.remove_peer(session)
                case RegionCreated() | RegionUpdated() | RegionFreed():
                    self._region_store.apply_change(action)
                case KeepTensors():
                    self._kept_tensor_store.store_tensors(action)
                case ReleaseTensors(number):
                    self._kept_tensor_store.remove_tensors(number)
                    self._worker.post_command(action)
                case FreeDeferred(deferred):
                    self._free_deferred(deferred)
                case command:
                    self._worker.post_command(command)

    def _free_deferred(self, deferred: DeferredFree) -> None:
        if deferred.free_some():
            self._loop.call_soon(self._free_deferred, deferred)

    def _map_tensors(self, action: MapTensors) -> None:
        try:
            command = self._fd_server.take_fds_of(action)
        except KVFerryError as error:
            failed = TensorsMapped(action.registration, action.session, error.info)
            self._perform(self._core.report(failed))
            return
        self._event_log.mapping_started(self._peers.by_session.get(action.session), action)
        self._worker.post_command(command)

    # Stopping

    async def _wait_until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._core.busy or self._region_store.busy) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def _close(self) -> None:
        for peer in tuple(self._peers.by_session.values()):
            self._outboxes.send_message(peer, Goodbye("the daemon is stopping"))
        self._ingress.close()
        self._accept_gate.close()
        self._peers.close()
        self._fd_server.close()
        self._socket.close()
        self._zap.close()
        await self._loop.run_in_executor(None, self._context.term)
