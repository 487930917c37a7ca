"""The server: passes messages and reports to the core, and each action to its owner.

It performs the actions of transport (sessions.py, outbox.py, fd_server.py); action_owners.py
performs the others. The server contains no other logic. It never blocks and never touches the
device. All reports of one wake-up are handled together, and a session gets their results in one
message. Event loop only.
"""

from __future__ import annotations

import asyncio
import time

import zmq

from kvferry.daemon.access.connections import Connections
from kvferry.daemon.access.runtime_directory import Endpoint
from kvferry.daemon.core.actions import (
    Action,
    Broadcast,
    CloseSession,
    Continue,
    CopyCalibrated,
    MapTensors,
    Pong,
    PoolRegistered,
    Report,
    SendMessage,
    SendStatus,
    SendStream,
    TensorsMapped,
    TransferCompleted,
)
from kvferry.daemon.core.core import Core
from kvferry.daemon.core.registration import OWN_SESSION
from kvferry.daemon.core.tier_actions import LendMemory
from kvferry.daemon.device.report_queue import ReportQueue
from kvferry.daemon.observability.event_log import EventLog
from kvferry.daemon.transport.accept_gate import AcceptGate
from kvferry.daemon.transport.action_owners import ActionOwners
from kvferry.daemon.transport.fd_server import FdServer
from kvferry.daemon.transport.lender import LentPool, check_sibling, lend_memory
from kvferry.daemon.transport.outbox import merge_results
from kvferry.daemon.transport.sessions import Sessions
from kvferry.daemon.transport.status import StatusAssembler
from kvferry.daemon.transport.zap import ZapHandler, protect
from kvferry.proto.codec import MAX_MESSAGE_BYTES
from kvferry.proto.errors import KVFerryError
from kvferry.proto.lending import LendingMessage
from kvferry.proto.messages import ClientMessage, DaemonMessage, Goodbye, Hello, StatusReport

# Messages of any size that ZeroMQ itself queues per connection: received ones, of at most twice
# MAX_MESSAGE_BYTES, and those to be sent. Replies that it does not accept are in the outbox, which
# is bounded in bytes.
RECEIVE_HIGH_WATER, SEND_HIGH_WATER = 8, 16
LINGER_MS = 1000


class Server:
    """Serves one device at one endpoint. Clients can connect at once, and are served from `start`
    to `close`.

    reports: of all parts of the daemon. owners: perform what transport does not.
    """

    def __init__(
        self,
        core: Core,
        endpoint: Endpoint,
        reports: ReportQueue,
        owners: ActionOwners,
        status: StatusAssembler,
        pool: LentPool,
    ) -> None:
        self._core = core
        self._client_log = client_log = EventLog()
        self._reports, self._owners, self._status = reports, owners, status
        self._fd_server = FdServer(endpoint, lambda: core.sessions, core.error_reply)
        self._pool = pool
        # Of the core's deadline, and its time.
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
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

    def start(self) -> None:
        """Serve clients from now on."""
        self._ingress.start()

    async def run(self) -> None:
        """Handle reports until cancelled."""
        while True:
            await self._reports.wait_for_reports()
            self._take_reports()

    async def drain(self, seconds: float) -> None:
        """Refuse new jobs, and let accepted ones run on for so long; then they are cancelled.

        `run` must run meanwhile.
        """
        self._core.stop()
        await self._wait_until_idle(seconds)
        self._perform(self._core.cancel_all_transfers())
        await self._wait_until_idle(1.0)

    async def close(self) -> None:
        """Send Goodbye to all clients, and end their sessions."""
        self._core.stop()
        self._owners.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._sessions.send_to_all(Goodbye("the daemon is stopping"))
        self._accept_gate.close()
        self._sessions.close()
        self._fd_server.close()
        self._socket.close()
        self._zap.close()
        await asyncio.to_thread(self._context.term)

    # Called by sessions.py

    def handle_message(self, session: str, message: ClientMessage) -> None:
        self._take_reports()
        if isinstance(message, LendingMessage) and not self._is_sibling(session, message):
            return
        self._perform(self._core.handle(session, message, time.monotonic()))
        self._set_timer()

    def open_session(self, session: str, hello: Hello, uid: int) -> bool:
        self._take_reports()
        self._perform(self._core.open_session(session, hello, uid))
        return session in self._core.sessions

    def close_session(self, session: str) -> None:
        self._perform(self._core.close_session(session))

    def refusal_reply(self, error: KVFerryError) -> DaemonMessage:
        return self._core.refusal_reply(None, error)

    # Reports

    def _take_reports(self) -> None:
        """Pass all reports to the core and perform its actions."""
        reports, actions = list[Report](), list[Action]()
        for report in self._reports.take_reports():
            match report:
                case Continue(command):
                    actions.append(command)
                    continue
                case TensorsMapped():
                    self._client_log.mapping_ended(report)
                    report = self._fd_server.hold_fds_of(report)
                case Pong() | CopyCalibrated() | PoolRegistered():
                    self._note_report(report)
            follows = self._core.report(report)
            if isinstance(report, TransferCompleted) and report.error is not None:
                sessions = (each.session for each in follows if isinstance(each, SendMessage))
                self._sessions.log_failed_job(sessions, report.error)
            reports.append(report)
            actions += follows
        self._perform(merge_results(actions))
        self._owners.wake_up(reports)
        self._set_timer()

    # Time

    def _set_timer(self) -> None:
        """Call the core again by its deadline. A timer that fires too early is harmless."""
        deadline = self._core.deadline
        if deadline is None or (self._timer is not None and self._due <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        loop, self._due = asyncio.get_running_loop(), deadline
        self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._advance)

    def _advance(self) -> None:
        self._timer = None
        self._perform(self._core.advance(time.monotonic()))
        self._set_timer()

    def _note_report(self, report: Pong | CopyCalibrated | PoolRegistered) -> None:
        self._status.note_report(report)
        if isinstance(report, PoolRegistered) and report.nbytes == self._core.pool_bytes:
            self._client_log.pool_registered(report.nbytes)

    # Actions

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendMessage(session, message) if session != OWN_SESSION:
                    self._sessions.send_message(session, message)
                case SendStatus(session, request_id):
                    report = StatusReport(request_id, self._status.assemble())
                    self._sessions.send_message(session, report)
                case SendStream(session, messages):
                    self._outboxes.start_stream(session, messages)
                case Broadcast(sessions, key_events):
                    self._outboxes.broadcast_events(sessions, key_events)
                case MapTensors():
                    self._map_tensors(action)
                case CloseSession(session):
                    self._fd_server.close_session(session)
                    self._sessions.remove_session(action)
                case LendMemory():
                    self._lend_memory(action)
                case _:
                    self._owners.perform(action)

    def _is_sibling(self, session: str, message: LendingMessage) -> bool:
        """Whether the session is of the daemon's own user; others get an error."""
        peer = self._sessions.peer_of(session)
        try:
            check_sibling(-1 if peer is None else peer.uid)
        except KVFerryError as error:
            number = getattr(message, "request_id", None)
            reply = self._core.error_reply(error, number, session)
            self._sessions.send_message(session, reply)
            return False
        return True

    def _lend_memory(self, action: LendMemory) -> None:
        try:
            reply: DaemonMessage = lend_memory(self._pool, self._fd_server, action)
        except KVFerryError as error:
            reply = self._core.error_reply(error, action.request_id, action.session)
        self._sessions.send_message(action.session, reply)

    def _map_tensors(self, action: MapTensors) -> None:
        """Pass the descriptors that the client has sent to the device worker."""
        try:
            command = self._fd_server.take_fds_of(action)
        except KVFerryError as error:
            failed = TensorsMapped(action.registration, action.session, error.info)
            self._perform(self._core.report(failed))
            return
        self._client_log.mapping_started(self._sessions.peer_of(action.session), action)
        self._owners.post_command(command)

    async def _wait_until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._core.busy or self._owners.busy) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)


def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    router.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    router.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.LINGER, LINGER_MS)
    return router
