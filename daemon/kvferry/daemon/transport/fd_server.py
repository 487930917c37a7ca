"""The descriptor socket: clients send file descriptors, which messages then name by handle.

Clients also fetch descriptors that the daemon holds for them. A SOCK_SEQPACKET connection carries
one request and one reply. The number and the kinds of a session's descriptors are limited; they are
closed when it ends. Event loop only.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Container
from dataclasses import replace
from itertools import count

from kvferry.daemon.access.admission import Credentials, credentials_of
from kvferry.daemon.access.runtime_directory import Endpoint
from kvferry.daemon.core.actions import MapTensors, TensorsMapped
from kvferry.daemon.device.mappings import MapCommand
from kvferry.daemon.memory.fd_closer import close_descriptor_later
from kvferry.daemon.transport.accept_gate import NONE_LEFT, fds_exhausted
from kvferry.daemon.transport.received_fds import (
    MAX_FDS_PER_PACKET,
    close_received_fd,
    fd_kind,
)
from kvferry.proto.codec import decode_descriptor_request, encode
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.fd_passing import FdHandles, FdReply, FetchFd, SendFds
from kvferry.proto.memory import FdAllocation
from kvferry.proto.messages import Error

# Maximum of descriptors that one session has sent and not used.
MAX_HELD = 4096
# Connections of one user at a time: 64 engines that start together need one each. Others are closed
# at once, and their clients try again.
MAX_CONNECTIONS_PER_USER = 64
# Connections of all users; others wait in the kernel.
MAX_CONNECTIONS = 256
# Seconds until the request must arrive. A client sends it when it connects.
REQUEST_SECONDS = 1.0


class FdServer:
    """Holds descriptors by session and handle.

    sessions: returns the open sessions. refusal: creates the reply to a refused request, and counts
    the error. max_held: see MAX_HELD.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        sessions: Callable[[], Container[str]],
        refusal: Callable[[KVFerryError], Error],
        max_held: int = MAX_HELD,
    ) -> None:
        self._max_held = max_held
        self._admission, self._sessions, self._refusal = endpoint.admission, sessions, refusal
        self._held: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._handles = count(1)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, tuple[socket.socket, Credentials, asyncio.TimerHandle]] = {}
        self._per_user = Counter[int]()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(endpoint.descriptors))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._listen()

    def hold_fd(self, session: str, descriptor: int) -> int:
        """Hold a descriptor for a session and return its handle; close it if the session ended."""
        handle = next(self._handles)
        if session not in self._sessions():
            close_received_fd(descriptor)
            return handle
        self._held[session][handle] = descriptor
        return handle

    def holds_any(self, session: str) -> bool:
        """Whether a session has descriptors that it has not used."""
        return bool(self._held.get(session))

    def take_fds(self, session: str, handles: tuple[int, ...]) -> tuple[int, ...]:
        """Pass held descriptors to the caller, which then owns them.

        If it raises Refused (UNKNOWN_HANDLE), none is passed.
        """
        held = self._held[session]
        for handle in handles:
            if handle not in held:
                message = f"unknown handle {handle}; send its descriptor first, and use it once"
                raise Refused(Code.UNKNOWN_HANDLE, message, handle)
        if len(set(handles)) != len(handles):
            message = f"handles {list(handles)} contain one twice; use each handle once"
            raise Refused(Code.UNKNOWN_HANDLE, message, list(handles))
        return tuple(held.pop(handle) for handle in handles)

    def take_fds_of(self, action: MapTensors) -> MapCommand:
        """The command for the device worker, with the descriptors that the action names.

        Raises Refused (UNKNOWN_HANDLE).
        """
        handles = [a.handle for a in action.allocations if isinstance(a, FdAllocation)]
        timeline = () if action.timeline is None else (action.timeline,)
        fds = self.take_fds(action.session, (*handles, *timeline))
        return MapCommand(action, fds[: len(handles)], fds[-1] if timeline else None)

    def hold_fds_of(self, report: TensorsMapped) -> TensorsMapped:
        """Hold the descriptors of allocated tensors, for the client to fetch by handle."""
        handles = [self.hold_fd(report.session, fd) for fd in report.descriptors]
        allocations = tuple(
            FdAllocation(handles[a.handle], a.size) if isinstance(a, FdAllocation) else a
            for a in report.allocations
        )
        return replace(report, allocations=allocations, descriptors=())

    def close_session(self, session: str) -> None:
        """Close the descriptors that the session has not used."""
        for descriptor in self._held.pop(session, {}).values():
            close_received_fd(descriptor)

    def close(self) -> None:
        """Close the socket, its connections and all held descriptors."""
        for number in tuple(self._connections):
            self._close_connection(number)
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for session in tuple(self._held):
            self.close_session(session)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has closed it
            return
        connection.setblocking(False)
        try:
            process = credentials_of(connection)
        except OSError:
            close_descriptor_later(connection.detach())
            return
        if self._per_user[process.uid] >= MAX_CONNECTIONS_PER_USER:
            close_descriptor_later(connection.detach())  # its queue may contain descriptors
            return
        self._per_user[process.uid] += 1
        number = connection.fileno()
        timer = self._loop.call_later(REQUEST_SECONDS, self._close_connection, number)
        self._connections[number] = (connection, process, timer)
        self._loop.add_reader(number, self._serve, number)
        if len(self._connections) == MAX_CONNECTIONS:
            self._loop.remove_reader(self._listener)

    def _serve(self, number: int) -> None:
        connection, process, _ = self._connections[number]
        descriptors: list[int] = []
        try:
            packet, descriptors, _, _ = socket.recv_fds(connection, 4096, MAX_FDS_PER_PACKET)
            if packet:
                self._reply(connection, process, packet, descriptors)
        except OSError:  # the client disconnected; its descriptors are closed below
            pass
        finally:
            for descriptor in descriptors:
                close_received_fd(descriptor)
            self._close_connection(number)

    def _reply(
        self,
        connection: socket.socket,
        process: Credentials,
        packet: bytes,
        descriptors: list[int],
    ) -> None:
        """Handle one request; descriptors that are held are removed from the list."""
        reply: FdReply
        passing: list[int] = []
        try:
            self._admission.check_process(process)
            match decode_descriptor_request(packet):
                case SendFds(session):
                    self._check_session(session, len(descriptors))
                    for place, descriptor in enumerate(descriptors):
                        _check_kind(place, descriptor)
                    kept = tuple(self.hold_fd(session, d) for d in descriptors)
                    descriptors.clear()
                    reply = FdHandles(kept)
                case FetchFd(session, handle):
                    self._check_session(session, 0)
                    passing = list(self.take_fds(session, (handle,)))
                    reply = FdHandles((handle,))
        except KVFerryError as error:
            reply = self._refusal(error)
        try:
            socket.send_fds(connection, [encode(reply)], passing)
        finally:
            for descriptor in passing:
                close_received_fd(descriptor)

    def _check_session(self, session: str, more: int) -> None:
        if session not in self._sessions():
            message = f"session {session!r} is not open; connect to the daemon first"
            raise Refused(Code.NO_SESSION, message, session)
        if (held := len(self._held[session])) + more > self._max_held:
            message = (
                f"{more} descriptors were sent while {held} are held, more than {self._max_held} "
                "in all; register those first"
            )
            raise Refused(Code.BUSY, message, more)
        if more and fds_exhausted():
            raise Refused(Code.BUSY, NONE_LEFT, more)

    def _close_connection(self, number: int) -> None:
        if len(self._connections) == MAX_CONNECTIONS:
            self._listen()
        connection, process, timer = self._connections.pop(number)
        self._per_user[process.uid] -= 1
        if not self._per_user[process.uid]:
            del self._per_user[process.uid]
        timer.cancel()
        self._loop.remove_reader(number)
        close_descriptor_later(connection.detach())  # its queue may contain descriptors


def _check_kind(place: int, descriptor: int) -> None:
    if fd_kind(descriptor) is None:
        raise Refused(
            Code.NOT_SHAREABLE,
            f"descriptor {place} of the packet is not a memfd, a tmpfs file or GPU memory; send "
            "shared memory",
            place,
        )
