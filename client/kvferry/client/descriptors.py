"""Passing file descriptors to and from the daemon, over the socket beside ZeroMQ's."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from kvferry.client.conversation import timed_out
from kvferry.proto.codec import decode_descriptor_reply, encode
from kvferry.proto.desk import Collect, Deposit, DescriptorRequest
from kvferry.proto.errors import Code, Gone, error_of
from kvferry.proto.messages import Error

_AT_ONCE = 250


def deposit(
    directory: Path, session: str, descriptors: Sequence[int], timeout: float
) -> tuple[int, ...]:
    """Leave descriptors with the daemon; returns a ticket for each. They stay ours to close."""
    tickets: tuple[int, ...] = ()
    for start in range(0, len(descriptors), _AT_ONCE):
        some = descriptors[start : start + _AT_ONCE]
        tickets += _ask(directory, Deposit(session), some, timeout)[0]
    return tickets


def collect(directory: Path, session: str, ticket: int, timeout: float) -> int:
    """A new descriptor of what the daemon holds under a ticket."""
    _, (descriptor,) = _ask(directory, Collect(session, ticket), (), timeout)
    return descriptor


def _ask(
    directory: Path, request: DescriptorRequest, descriptors: Sequence[int], timeout: float
) -> tuple[tuple[int, ...], list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as desk:
        desk.settimeout(timeout)
        try:
            desk.connect(str(directory / "fds.sock"))
            socket.send_fds(desk, [encode(request)], descriptors)
            packet, received, _, _ = socket.recv_fds(desk, 65536, 1)
        except TimeoutError as error:
            raise timed_out("no descriptors passed", str(directory)) from error
        except OSError as error:
            raise Gone(
                Code.DAEMON_GONE, f"the daemon takes no descriptors: {error}", str(directory)
            ) from error
    for descriptor in received:
        os.set_inheritable(descriptor, False)
    reply = decode_descriptor_reply(packet)
    if isinstance(reply, Error):
        raise error_of(reply.error)
    return reply.tickets, received
