"""The descriptor socket: clients send file descriptors before they name them, and fetch others.

A SOCK_SEQPACKET connection carries one request and one reply. The descriptors of a session are
bounded in number and kind, and closed when it ends. Event loop only.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Container
from itertools import count

from kvferry.daemon.access.admission import Credentials, credentials_of
from kvferry.daemon.access.endpoint import Endpoint
from kvferry.daemon.transport.accept_gate import NONE_LEFT, crowded
from kvferry.daemon.transport.received_fds import MAX_AT_ONCE, close, close_aside, kind_of
from kvferry.proto.codec import decode_descriptor_request, encode
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.fd_passing import FdHandles, FdReply, FetchFd, SendFds
from kvferry.proto.messages import Error

# Descriptors that one session may have sent and not yet used.
MAX_HELD = 4096
# Connections of one user served at a time: 64 engines that start together have one each. One too
# many is closed at once, and its client tries again.
MAX_VISITORS_PER_USER = 64
# Of all users; more of them wait in the kernel.
MAX_VISITORS = 256
# Seconds until the first byte. A client sends its request right after it connected.
PATIENCE = 1.0


class FdServer:
    """Holds descriptors by session and ticket.

    refusal: makes, and counts, the answer to what cannot be done.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        sessions: Callable[[], Container[str]],
        refusal: Callable[[KVFerryError], Error],
    ) -> None:
        self._admission, self._sessions, self._refusal = endpoint.admission, sessions, refusal
        self._held: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._tickets = count(1)
        self._loop = asyncio.get_running_loop()
        self._visitors: dict[int, tuple[socket.socket, Credentials, asyncio.TimerHandle]] = {}
        self._of_user = Counter[int]()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(endpoint.descriptors))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._listen()

    def keep(self, session: str, descriptor: int) -> int:
        """Hold a descriptor for a session and return its ticket; close it if the session ended."""
        ticket = next(self._tickets)
        if session not in self._sessions():
            close(descriptor)
            return ticket
        self._held[session][ticket] = descriptor
        return ticket

    def take(self, session: str, tickets: tuple[int, ...]) -> tuple[int, ...]:
        """Pass descriptors to the caller. Raises Refused (UNKNOWN_TICKET) and passes none."""
        held = self._held[session]
        for ticket in tickets:
            if ticket not in held:
                message = f"unknown ticket {ticket}; send its descriptor first, and use it once"
                raise Refused(Code.UNKNOWN_TICKET, message, ticket)
        if len(set(tickets)) != len(tickets):
            message = f"tickets {list(tickets)} contain one twice; use each ticket once"
            raise Refused(Code.UNKNOWN_TICKET, message, list(tickets))
        return tuple(held.pop(ticket) for ticket in tickets)

    def forget(self, session: str) -> None:
        for descriptor in self._held.pop(session, {}).values():
            close(descriptor)

    def close(self) -> None:
        for number in tuple(self._visitors):
            self._dismiss(number)
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for session in tuple(self._held):
            self.forget(session)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            visitor, _ = self._listener.accept()
        except OSError:  # gone again
            return
        visitor.setblocking(False)
        try:
            process = credentials_of(visitor)
        except OSError:
            close_aside(visitor.detach())
            return
        if self._of_user[process.uid] >= MAX_VISITORS_PER_USER:
            close_aside(visitor.detach())  # what it sent may still be in it
            return
        self._of_user[process.uid] += 1
        number = visitor.fileno()
        timer = self._loop.call_later(PATIENCE, self._dismiss, number)
        self._visitors[number] = (visitor, process, timer)
        self._loop.add_reader(number, self._serve, number)
        if len(self._visitors) == MAX_VISITORS:
            self._loop.remove_reader(self._listener)

    def _serve(self, number: int) -> None:
        visitor, process, _ = self._visitors[number]
        descriptors: list[int] = []
        try:
            packet, descriptors, _, _ = socket.recv_fds(visitor, 4096, MAX_AT_ONCE)
            if packet:
                self._reply(visitor, process, packet, descriptors)
        except OSError:  # the visitor went; what it sent is closed below
            pass
        finally:
            for descriptor in descriptors:
                close(descriptor)
            self._dismiss(number)

    def _reply(
        self,
        visitor: socket.socket,
        process: Credentials,
        packet: bytes,
        descriptors: list[int],
    ) -> None:
        """Handle one request; descriptors that are held are removed from the list."""
        answer: FdReply
        passing: list[int] = []
        try:
            self._admission.check(process)
            match decode_descriptor_request(packet):
                case SendFds(session):
                    self._check(session, len(descriptors))
                    for place, descriptor in enumerate(descriptors):
                        _check_kind(place, descriptor)
                    kept = tuple(self.keep(session, d) for d in descriptors)
                    descriptors.clear()
                    answer = FdHandles(kept)
                case FetchFd(session, ticket):
                    self._check(session, 0)
                    passing = list(self.take(session, (ticket,)))
                    answer = FdHandles((ticket,))
        except KVFerryError as error:
            answer = self._refusal(error)
        try:
            socket.send_fds(visitor, [encode(answer)], passing)
        finally:
            for descriptor in passing:
                close(descriptor)

    def _check(self, session: str, more: int) -> None:
        if session not in self._sessions():
            message = f"session {session!r} is not open; connect to the daemon first"
            raise Refused(Code.NO_SESSION, message, session)
        if (held := len(self._held[session])) + more > MAX_HELD:
            message = (
                f"{more} descriptors were sent while {held} are held, more than {MAX_HELD} in all; "
                "register those first"
            )
            raise Refused(Code.BUSY, message, more)
        if more and crowded():
            raise Refused(Code.BUSY, NONE_LEFT, more)

    def _dismiss(self, number: int) -> None:
        if len(self._visitors) == MAX_VISITORS:
            self._listen()
        visitor, process, timer = self._visitors.pop(number)
        self._of_user[process.uid] -= 1
        if not self._of_user[process.uid]:
            del self._of_user[process.uid]
        timer.cancel()
        self._loop.remove_reader(number)
        close_aside(visitor.detach())  # descriptors that nobody took may still be in it


def _check_kind(place: int, descriptor: int) -> None:
    if kind_of(descriptor) is None:
        raise Refused(
            Code.NOT_SHAREABLE,
            f"descriptor {place} of the packet is no memfd, no tmpfs file and no GPU memory; send "
            "shared memory",
            place,
        )
