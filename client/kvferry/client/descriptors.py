"""Passing file descriptors to and from the daemon, over the socket beside ZeroMQ's."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.client.conversation import timed_out
from kvferry.proto.codec import decode_descriptor_reply, encode
from kvferry.proto.errors import Code, Gone, error_of
from kvferry.proto.fd_passing import FdRequest, FetchFd, SendFds
from kvferry.proto.messages import Error

AT_ONCE = 250
"""Descriptors in one packet."""


# Seconds, at most, between two attempts at a socket that has no room at the moment.
RETRY = 0.1


class Busy(Gone):
    """The daemon's descriptor socket has no room at the moment, or its daemon is restarting."""


class Visit:
    """One request to the desk, said at once; the reply is taken when it is there.

    timeout: seconds that each of the two takes at most; with 0, neither waits. Raises Gone.
    """

    def __init__(
        self,
        directory: Path,
        request: FdRequest,
        descriptors: Sequence[int] = (),
        timeout: float = 0.0,
    ) -> None:
        self._directory = directory
        self._desk = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._desk.settimeout(timeout)
        try:
            with self._translating():
                self._desk.connect(str(directory / "fds.sock"))
                socket.send_fds(self._desk, [encode(request)], descriptors)
        except BaseException:
            self._desk.close()
            raise

    def answer(self) -> tuple[tuple[int, ...], list[int]] | None:
        """Tickets, and descriptors that came along; None while there is no reply."""
        with self._translating():
            try:
                packet, received, _, _ = socket.recv_fds(self._desk, 65536, 1)
            except BlockingIOError:
                return None
            if not packet:
                raise ConnectionResetError("it closed the connection")
        for descriptor in received:
            os.set_inheritable(descriptor, False)
        reply = decode_descriptor_reply(packet)
        if isinstance(reply, Error):
            error = error_of(reply.error)
            if error.code == Code.NO_SESSION:  # another daemon is at the desk already
                message = "the daemon was restarted, or has let us go"
                raise Gone(Code.DAEMON_GONE, message, str(self._directory)) from error
            raise error
        return reply.tickets, received

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self._desk.close()

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise timed_out("no descriptors passed", str(self._directory)) from error
        except (ConnectionError, BlockingIOError) as error:
            message = f"the daemon's descriptor socket does not answer: {error}"
            raise Busy(Code.DAEMON_GONE, message, str(self._directory)) from error
        except OSError as error:
            message = f"the daemon takes no descriptors: {error}"
            raise Gone(Code.DAEMON_GONE, message, str(self._directory)) from error


def deposit(
    directory: Path, session: str, descriptors: Sequence[int], timeout: float
) -> tuple[int, ...]:
    """Leave descriptors with the daemon; returns a ticket for each. They stay ours to close."""
    tickets: tuple[int, ...] = ()
    for start in range(0, len(descriptors), AT_ONCE):
        some = descriptors[start : start + AT_ONCE]
        tickets += _ask(directory, SendFds(session), some, timeout)[0]
    return tickets


def collect(directory: Path, session: str, ticket: int, timeout: float) -> int:
    """A new descriptor of what the daemon holds under a ticket."""
    _, (descriptor,) = _ask(directory, FetchFd(session, ticket), (), timeout)
    return descriptor


def _ask(
    directory: Path, request: FdRequest, descriptors: Sequence[int], timeout: float
) -> tuple[tuple[int, ...], list[int]]:
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            with Visit(directory, request, descriptors, left) as visit:
                answer = visit.answer()
        except Busy:  # nothing was handed over
            if left <= 0:
                raise
            time.sleep(min(left, random.uniform(RETRY / 2, RETRY)))
            continue
        if answer is None:
            raise timed_out("no descriptors passed", str(directory))
        return answer
