"""Messages of the descriptor socket, which passes the file descriptors that ZeroMQ cannot carry.

A SOCK_SEQPACKET connection carries one request and one reply, one packet each, and is closed.
"""

from __future__ import annotations

from typing import TypeAlias

from kvferry.proto.message import Message
from kvferry.proto.messages import Error, Token
from kvferry.proto.specs import Id

# Maximum length in bytes of a socket's path in sockaddr_un (unix(7)).
MAX_SOCKET_PATH = 107


class SendFds(Message):
    """Pass file descriptors to the daemon, which holds them for the session."""

    session_id: Token


class FetchFd(Message):
    """Request the descriptor that the daemon holds for the session under this handle."""

    session_id: Token
    handle: Id


class FdHandles(Message):
    """The handles of the passed descriptors, in order; or of the one passed with this reply."""

    handles: tuple[Id, ...]


FdRequest: TypeAlias = SendFds | FetchFd
FdReply: TypeAlias = FdHandles | Error
