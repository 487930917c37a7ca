"""Passing file descriptors to and from the daemon, over its Unix socket (fds.sock).

Used by effects.exchange_fds, in the client's thread. Never waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.proto.codec import decode_descriptor_reply, encode
from kvferry.proto.errors import Code, Gone, KVFerryError, error_of
from kvferry.proto.fd_passing import FdRequest, FetchFd
from kvferry.proto.messages import Error

# The kernel passes 253 descriptors in one packet at most (SCM_MAX_FD).
FDS_PER_PACKET = 250


class SocketBusy(Gone):
    """The daemon's descriptor socket is full, or the daemon is restarting; try again."""


class FdExchange:
    """One request, which is sent by the constructor. Poll `read_reply` for its reply.

    Both raise SocketBusy if nothing was passed, and Gone if the daemon is gone.
    """

    def __init__(
        self, directory: Path, request: FdRequest, descriptors: Sequence[int] = ()
    ) -> None:
        self._directory, self._is_fetch = directory, isinstance(request, FetchFd)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            with self._translated_errors():
                self._socket.connect(str(directory / "fds.sock"))
                socket.send_fds(self._socket, [encode(request)], descriptors)
        except BaseException:
            self._socket.close()
            raise

    def read_reply(self) -> tuple[tuple[int, ...], list[int]] | None:
        """(handles, received descriptors); None if there is no reply yet. Raises an error reply."""
        with self._translated_errors():
            try:
                packet, received, _, _ = socket.recv_fds(self._socket, 65536, 1)
            except BlockingIOError:
                return None
            if not packet:
                raise ConnectionResetError("the daemon closed the connection")
        for descriptor in received:
            os.set_inheritable(descriptor, False)
        try:
            handles = self._decode_handles(packet)
            if self._is_fetch and not received:  # a sibling may answer anything
                message = (
                    f"the daemon in {self._directory} replied without a descriptor; restart it"
                )
                raise Gone(Code.DAEMON_GONE, message, list(handles))
            return handles, received
        except KVFerryError:
            for descriptor in received:
                os.close(descriptor)
            raise

    def _decode_handles(self, packet: bytes) -> tuple[int, ...]:
        """Raises an error reply."""
        reply = decode_descriptor_reply(packet)
        if isinstance(reply, Error):
            error = error_of(reply.error)
            if error.code == Code.NO_SESSION:  # the socket is already that of the next daemon
                message = "the daemon has restarted, or has closed this session"
                raise Gone(Code.DAEMON_GONE, message, str(self._directory)) from error
            raise error
        return reply.handles

    def __enter__(self) -> FdExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, BlockingIOError) as error:
            message = f"the daemon's descriptor socket does not reply: {error}"
            raise SocketBusy(Code.DAEMON_GONE, message, str(self._directory)) from error
        except OSError as error:
            message = f"cannot pass file descriptors to the daemon: {error}"
            raise Gone(Code.DAEMON_GONE, message, str(self._directory)) from error
