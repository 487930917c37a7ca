"""One exchange of file descriptors with the daemon, over the Unix socket beside ZeroMQ's.

Used by the interpreter of operations (effects.py), in the client's thread. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.proto.codec import decode_descriptor_reply, encode
from kvferry.proto.errors import Code, Gone, error_of
from kvferry.proto.fd_passing import FdRequest
from kvferry.proto.messages import Error

# The kernel passes 253 descriptors in one packet at most (SCM_MAX_FD).
FDS_PER_PACKET = 250


class SocketBusy(Gone):
    """The daemon's descriptor socket has no room at the moment, or its daemon is restarting."""


class FdExchange:
    """One request, sent at once; `reply` is asked until it is there.

    Raises SocketBusy if nothing could be handed over yet, Gone if the daemon is gone, and what the
    daemon replies.
    """

    def __init__(
        self, directory: Path, request: FdRequest, descriptors: Sequence[int] = ()
    ) -> None:
        self._directory = directory
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            with self._translated():
                self._socket.connect(str(directory / "fds.sock"))
                socket.send_fds(self._socket, [encode(request)], descriptors)
        except BaseException:
            self._socket.close()
            raise

    def reply(self) -> tuple[tuple[int, ...], list[int]] | None:
        """Handles, and descriptors that came along; None while there is no reply."""
        with self._translated():
            try:
                packet, received, _, _ = socket.recv_fds(self._socket, 65536, 1)
            except BlockingIOError:
                return None
            if not packet:
                raise ConnectionResetError("it closed the connection")
        for descriptor in received:
            os.set_inheritable(descriptor, False)
        reply = decode_descriptor_reply(packet)
        if isinstance(reply, Error):
            error = error_of(reply.error)
            if error.code == Code.NO_SESSION:  # the next daemon has the socket already
                message = "the daemon was restarted, or has let us go"
                raise Gone(Code.DAEMON_GONE, message, str(self._directory)) from error
            raise error
        return reply.handles, received

    def __enter__(self) -> FdExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, BlockingIOError) as error:
            message = f"the daemon's descriptor socket does not answer: {error}"
            raise SocketBusy(Code.DAEMON_GONE, message, str(self._directory)) from error
        except OSError as error:
            message = f"the daemon takes no descriptors: {error}"
            raise Gone(Code.DAEMON_GONE, message, str(self._directory)) from error
