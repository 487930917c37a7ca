"""Messages of the descriptor socket, where memory is handed over that ZeroMQ cannot carry.

It is a SOCK_SEQPACKET, one packet a message: one request, one reply, closed.
"""

from __future__ import annotations

from typing import TypeAlias

from kvferry.proto.messages import Error, Message, Token
from kvferry.proto.specs import Id

# Bytes of the path of any socket here: what unix(7) has room for.
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
