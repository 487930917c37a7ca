"""The server: passes messages and reports to the core, and each action to its owner.

Five kinds of actions have five owners: transport (sessions.py, outbox.py, fd_server.py), the
device worker, persistence, the tiers, and observability. The server contains no other logic. It
never blocks and never touches the device. All reports of one wake-up are handled together, and a
session gets their results in one message. Event loop only, except `device_reports`, `pool_grew` and
`fail`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import zmq

from kvferry.daemon.access.connections import Connections
from kvferry.daemon.access.runtime_directory import Endpoint
from kvferry.daemon.core.actions import (
    Action,
    Broadcast,
    CloseSession,
    CommitBlocks,
    CopyCalibrated,
    FreeDeferred,
    KeepTensors,
    MapTensors,
    Pong,
    PublishKVEvents,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
    ReleaseTensors,
    Report,
    SendMessage,
    SendStatus,
    SendStream,
    StartTransfer,
    TensorsMapped,
    TransferCompleted,
)
from kvferry.daemon.core.core import Core
from kvferry.daemon.core.tier_actions import (
    DropStore,
    FetchBlocks,
    FetchReleased,
    FindKeys,
    fetch_serial,
)
from kvferry.daemon.device.device_worker import DeviceWorker
from kvferry.daemon.device.report_queue import ReportQueue
from kvferry.daemon.memory.free_in_steps import free_in_steps
from kvferry.daemon.persistence.kept_tensor_store import KeptTensorStore
from kvferry.daemon.persistence.region_store import RegionStore
from kvferry.daemon.tiers.tiering import Tiering
from kvferry.daemon.transport.accept_gate import AcceptGate
from kvferry.daemon.transport.fd_server import FdServer
from kvferry.daemon.transport.observers import ClientLog, HealthMonitor
from kvferry.daemon.transport.outbox import merge_results
from kvferry.daemon.transport.sessions import Sessions
from kvferry.daemon.transport.status import StatusAssembler
from kvferry.daemon.transport.zap import ZapHandler, protect
from kvferry.proto.codec import MAX_MESSAGE_BYTES
from kvferry.proto.errors import KVFerryError
from kvferry.proto.messages import ClientMessage, DaemonMessage, Goodbye, Hello, StatusReport
from kvferry.proto.status import DaemonStatus, HealthStatus, NamespaceStatus

# Messages of any size that ZeroMQ itself queues per connection: received ones, of at most twice
# MAX_MESSAGE_BYTES, and those to be sent. Replies that it does not accept are in the outbox, which
# is bounded in bytes.
RECEIVE_HIGH_WATER, SEND_HIGH_WATER = 8, 16
LINGER_MS = 1000


class Server:
    """Serves one device at one endpoint until `stop` or `fail`.

    publish: publishes KV events to subscribers outside of the daemon.
    """

    def __init__(
        self,
        core: Core,
        endpoint: Endpoint,
        client_log: ClientLog,
        publish: Callable[[PublishKVEvents], None],
    ) -> None:
        self._core, self._client_log, self._publish = core, client_log, publish
        self._worker: DeviceWorker
        self._region_store: RegionStore
        self._kept_tensor_store: KeptTensorStore
        self._tiering: Tiering
        self._health: HealthMonitor
        self._status = StatusAssembler(core)
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._error: KVFerryError | None = None
        self._fd_server = FdServer(endpoint, lambda: core.sessions, core.error_reply)
        self._report_queue = ReportQueue(self._loop, self._take_reports)
        self._context = zmq.Context(io_threads=1)
        self._socket = _router(self._context)
        self._accept_gate = AcceptGate(endpoint.messages)
        connections = Connections(endpoint.admission)
        self._sessions = Sessions(self._socket, self._accept_gate, connections, client_log, self)
        self._outboxes, self._ingress = self._sessions.outboxes, self._sessions.ingress
        self._zap = ZapHandler(
            self._context, connections, self._ingress.count_connections, core.error_reply
        )
        protect(self._socket)
        self._accept_gate.bind_socket(self._socket)
        endpoint.apply_access()
        self._accept_gate.open_gate()

    def open_own_session(
        self, receive: Callable[[DaemonMessage], None]
    ) -> Callable[[ClientMessage], None]:
        """Open a session inside the daemon; return its send function.

        receive: called with each reply.
        """
        session = self._sessions.add_own_session(receive)
        self._core.open_own_session(session)

        def send(message: ClientMessage) -> None:
            self._perform(self._core.handle(session, message, time.monotonic()))

        return send

    async def serve(
        self,
        worker: DeviceWorker,
        region_store: RegionStore,
        kept_tensor_store: KeptTensorStore,
        tiering: Tiering,
        health: HealthMonitor,
        drain_seconds: float,
    ) -> None:
        """Serve until stopped, then let accepted jobs end and send Goodbye to all clients.

        drain_seconds: for which accepted jobs may run on; then they are cancelled. Raises the error
        that was passed to `fail`.
        """
        self._worker, self._region_store = worker, region_store
        self._kept_tensor_store, self._tiering = kept_tensor_store, tiering
        self._health = health
        health.start()
        self._ingress.start()
        await self._stop.wait()
        self._core.stop()
        health.stop()
        if self._error is None:
            await self._wait_until_idle(drain_seconds)
            self._perform(self._core.cancel_all_transfers())
            await self._wait_until_idle(1.0)
        tiering.stop()
        await self._close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End `serve`."""
        self._stop.set()

    # What operators see

    async def check_health(self) -> HealthStatus:
        return await self._health.check_health()

    async def status_snapshot(self) -> tuple[DaemonStatus, tuple[NamespaceStatus, ...]]:
        return self._daemon_status(), self._core.namespaces()

    # Called from other threads

    def device_reports(self, reports: list[Report]) -> None:
        """Queue reports of the device worker. Its thread."""
        self._report_queue.put_reports(reports)

    def pool_grew(self, nbytes: int) -> None:
        """The host pool is registered up to this byte. Any thread."""
        self._loop.call_soon_threadsafe(self._pool_registered, nbytes)

    def fail(self, error: KVFerryError) -> None:
        """End the daemon with this error. Any thread."""
        self._loop.call_soon_threadsafe(self._stop_with_error, error)

    def _pool_registered(self, nbytes: int) -> None:
        self._status.registered_bytes = nbytes
        if nbytes == self._core.pool_bytes:
            self._client_log.pool_registered(nbytes)
        self._health.pool_grew()

    def _stop_with_error(self, error: KVFerryError) -> None:
        self._error = self._error or error
        self._stop.set()

    # Called by sessions.py

    def handle_message(self, session: str, message: ClientMessage) -> None:
        self._take_reports()
        self._perform(self._core.handle(session, message, time.monotonic()))

    def open_session(self, session: str, hello: Hello, uid: int) -> bool:
        self._take_reports()
        self._perform(self._core.open_session(session, hello, uid))
        return session in self._core.sessions

    def close_session(self, session: str) -> None:
        self._perform(self._core.close_session(session))

    def refusal_reply(self, error: KVFerryError) -> DaemonMessage:
        return self._core.refusal_reply(None, error)

    # Reports

    def report_to_core(self, reports: Iterable[Report]) -> None:
        """Pass reports to the core and perform its actions."""
        actions = list[Action]()
        for report in reports:
            follows = self._core.report(report)
            if isinstance(report, TransferCompleted) and report.error is not None:
                sessions = (each.session for each in follows if isinstance(each, SendMessage))
                self._sessions.log_failed_job(sessions, report.error)
            actions += follows
            if isinstance(report, FetchReleased):
                self._region_store.end_store(fetch_serial(report.fetch))
        self._perform(merge_results(actions))
        self._tiering.wake_up()

    def _take_reports(self) -> None:
        reports = list[Report]()
        for report in self._report_queue.take_reports():
            if isinstance(report, TensorsMapped):
                self._client_log.mapping_ended(report)
                report = self._fd_server.hold_fds_of(report)
            elif isinstance(report, Pong):
                self._health.handle_pong(report)
            elif isinstance(report, CopyCalibrated):
                self._status.copying = report.copying
            reports.append(report)
        self.report_to_core(reports)
        for report in reports:
            if isinstance(report, TransferCompleted):
                self._region_store.end_store(report.serial)

    def _daemon_status(self) -> DaemonStatus:
        return self._status.assemble(
            time.monotonic(),
            self._health.status(),
            self._region_store.verification,
            self._tiering.status(self._core.tier_counters()),
        )

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
                    self._sessions.send_message(session, message)
                case SendStatus() | SendStream() | Broadcast():
                    self._send(action)
                case PublishKVEvents():
                    self._publish(action)
                case MapTensors():
                    self._map_tensors(action)
                case CloseSession(session):
                    self._fd_server.close_session(session)
                    self._sessions.remove_session(action)
                case RegionCreated() | RegionUpdated() | RegionFreed():
                    self._region_store.apply_change(action)
                case KeepTensors():
                    self._kept_tensor_store.store_tensors(action)
                case ReleaseTensors(number):
                    self._kept_tensor_store.remove_tensors(number)
                    self._worker.post_command(action)
                case FetchBlocks():
                    serial = fetch_serial(action.fetch)
                    self._region_store.begin_store(serial, action.owner, action.blocks)
                    self._tiering.perform(action)
                case FindKeys() | DropStore():
                    self._tiering.perform(action)
                case FreeDeferred(deferred):
                    free_in_steps(deferred)
                case command:
                    self._worker.post_command(command)

    def _send(self, action: SendStatus | SendStream | Broadcast) -> None:
        match action:
            case Broadcast(sessions, key_events):
                self._outboxes.broadcast_events(sessions, key_events)
            case SendStream(session, messages):
                self._outboxes.start_stream(session, messages)
            case SendStatus(session, request_id):
                report = StatusReport(request_id, self._daemon_status())
                self._sessions.send_message(session, report)

    def _map_tensors(self, action: MapTensors) -> None:
        """Pass the descriptors that the client has sent to the device worker."""
        try:
            command = self._fd_server.take_fds_of(action)
        except KVFerryError as error:
            failed = TensorsMapped(action.registration, action.session, error.info)
            self._perform(self._core.report(failed))
            return
        self._client_log.mapping_started(self._sessions.peer_of(action.session), action)
        self._worker.post_command(command)

    # Stopping

    async def _wait_until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._core.busy or self._region_store.busy) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def _close(self) -> None:
        self._sessions.send_to_all(Goodbye("the daemon is stopping"))
        self._accept_gate.close()
        self._sessions.close()
        self._fd_server.close()
        self._socket.close()
        self._zap.close()
        await self._loop.run_in_executor(None, self._context.term)


def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    router.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    router.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.LINGER, LINGER_MS)
    return router
