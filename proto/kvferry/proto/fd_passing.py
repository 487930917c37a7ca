"""Messages of the descriptor socket, which passes the file descriptors that ZeroMQ cannot carry.

A SOCK_SEQPACKET connection carries one request and one reply, one packet each, and is closed.
"""

from __future__ import annotations

from typing import TypeAlias

from kvferry.proto.messages import Error, Message, Token
from kvferry.proto.specs import Id

# Bytes of a socket's path that fit into sockaddr_un, see unix(7).
MAX_SOCKET_PATH = 107


class SendFds(Message):
    """Sent along with file descriptors: keep them for my session."""

    session_id: Token


class FetchFd(Message):
    """Give me the descriptor behind a ticket of mine."""

    session_id: Token
    ticket: Id


class FdHandles(Message):
    """Tickets of what was deposited, in order; or of the descriptor that comes along."""

    tickets: tuple[Id, ...]


FdRequest: TypeAlias = SendFds | FetchFd
FdReply: TypeAlias = FdHandles | Error
