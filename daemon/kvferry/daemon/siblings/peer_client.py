"""The session of this daemon at one sibling: an ordinary asyncio client that opens no namespace.

A sibling may be stopped, or send anything: few messages of limited size are handled in one turn of
the event loop, a wrong one ends the session, and closing never waits.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from kvferry.client import operations
from kvferry.client.aio import AsyncLink
from kvferry.client.nonblocking import NonBlockingClient
from kvferry.client.transport.connection import Connection
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.proto.errors import Code, Gone, KVFerryError
from kvferry.proto.lending import BorrowMemory, MemoryLent, Uses

# Seconds for one reply of the sibling.
ANSWER_SECONDS = 5.0


class PeerConnection(Connection):
    """Decodes 512 KiB at once at most."""

    max_message_bytes, receives_at_once = 64 << 10, 8


class PeerLink(AsyncLink):
    def make_connection(self, directory: Path) -> PeerConnection:
        return PeerConnection(directory)

    def receive_messages(self) -> bool:
        received = super().receive_messages()
        if received:  # others may be there, which the descriptor does not signal again
            asyncio.get_running_loop().call_soon(self._on_readable)
        return received

    def close(self) -> None:
        """Close the connection. Nothing that is queued is sent: that would wait."""
        self.session.connection_lost(Gone(Code.DAEMON_GONE, "the session has ended"))
        super().close()

    def _on_readable(self) -> None:
        try:
            super()._on_readable()
        except KVFerryError as error:
            self.session.connection_lost(Gone(Code.DAEMON_GONE, str(error)))


class PeerClient(NonBlockingClient):
    """One session; the client is closed when that ends. Open it with `open`."""

    def __init__(self, directory: Path) -> None:
        name = f"sibling-{os.getpid()}"
        super().__init__(
            PeerLink,
            directory,
            engine=name,
            client=name,
            timeout=ANSWER_SECONDS,
            reconnect=False,
        )

    @classmethod
    async def open(cls, directory: Path) -> PeerClient:
        """Raises KVFerryError."""
        self = cls(directory)
        await operations.connect_first(self)
        return self

    async def borrow_memory(
        self, contents: NamespaceContents, first: int | None = None
    ) -> MemoryLent:
        """See BorrowMemory. Raises an error reply, or Gone."""
        call, number = self._begin_call(None), self._session.wire.next_request_id()
        await call.connected()
        names = contents.namespace, contents.composition
        reply: MemoryLent = await call.ask(BorrowMemory(number, *names, first))
        return reply

    async def receive_fd(self, handle: int) -> int:
        """Receive a descriptor of MemoryLent. Raises KVFerryError."""
        return await self._begin_call(None).receive_fd(handle)

    def send_uses(self, uses: Uses) -> None:
        self._send_if_connected([uses])

    async def wait_changed(self, seconds: float) -> None:
        """Wait until the connection may be lost, at most `seconds`. Raises Gone if it is."""
        await self._link.pause(seconds)
        self._session.wire.check_connected()

    def disconnect(self) -> None:
        """End the session at once. The client must not be used again."""
        self._link.close()
