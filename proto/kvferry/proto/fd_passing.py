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
    """Sent with file descriptors, which the daemon then holds for the session."""

    session_id: Token


class FetchFd(Message):
    """Requests the descriptor that the daemon holds for the session under this handle."""

    session_id: Token
    handle: Id


class FdHandles(Message):
    """Handles of the descriptors that were sent, in order; or of the one sent with this reply."""

    handles: tuple[Id, ...]


FdRequest: TypeAlias = SendFds | FetchFd
FdReply: TypeAlias = FdHandles | Error
