"""The client for asyncio: as OffloadClient, but calls that wait are coroutines.

    client = await AsyncOffloadClient.connect(directory, engine="my-engine")

The others (transfer_async, get_finished, cancel, lookup, pin...) never wait and are plain methods.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Unpack

from kvferry.client import operations, registering
from kvferry.client.link import POLL_INTERVAL, ClientLink, Restore
from kvferry.client.nonblocking import ClientOptions, DaemonDirectory, NonBlockingClient
from kvferry.client.session import ClientSession
from kvferry.proto.errors import KVFerryError


class AsyncOffloadClient(NonBlockingClient):
    """As OffloadClient, for one event loop, which references it until the client or loop is closed.

    Create one with `connect`. All methods are called in the thread of the event loop.
    """

    def __init__(self, directory: DaemonDirectory = None, **options: Unpack[ClientOptions]) -> None:
        super().__init__(AsyncLink, directory, **options)

    @classmethod
    async def connect(
        cls, directory: DaemonDirectory = None, **options: Unpack[ClientOptions]
    ) -> AsyncOffloadClient:
        """Connect to a daemon; arguments and errors as OffloadClient's.

        When the connection is lost, the event loop reconnects: no call is needed.
        """
        self = cls(directory, **options)
        if options.get("state") is None:
            await self._connect()
        return self

    _connect = operations.connect_first
    wait_connected = operations.wait_connected
    open_namespace = operations.open_namespace
    reset = operations.reset
    hold = operations.hold
    register_kv_caches = registering.register_kv_caches
    allocate_kv_caches = registering.allocate_kv_caches
    release_kv_caches = operations.release_kv_caches
    release_retained = operations.release_retained
    wait = operations.wait
    status = operations.status
    namespaces = operations.namespaces
    close = operations.close

    async def __aenter__(self) -> AsyncOffloadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncLink(ClientLink):
    """A link that waits in the event loop, which also polls it."""

    def __init__(
        self, session: ClientSession, locate: Callable[[], Path], restore: Restore
    ) -> None:
        super().__init__(session, locate, restore)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._tick_scheduled = False
        if self.connecting:
            self._schedule_tick()

    @property
    def can_wait(self) -> bool:
        return not self._loop.is_closed()

    async def pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self.poll()

    def send(self, data: bytes) -> None:
        super().send(data)
        self._loop.call_soon(self._on_readable)  # sending may consume the edge of the descriptor

    def receive_messages(self) -> bool:
        """Receive messages, and wake all waiting tasks: they may be for any of them."""
        try:
            received = super().receive_messages()
        except KVFerryError:  # of one message; the descriptor does not signal those behind it again
            self._wake_waiters()
            self._loop.call_soon(self._on_readable)
            raise
        if received:
            self._wake_waiters()
        return received

    def check_connection(self) -> None:
        """Check the connection; if it is lost, wake all waiting tasks."""
        has_socket = self.session.wire.has_socket
        super().check_connection()
        if has_socket and not self.session.wire.has_socket:
            self._wake_waiters()
            self.advance(time.monotonic())

    def advance(self, now: float) -> None:
        """Advance an attempt now, and again after POLL_INTERVAL."""
        super().advance(now)
        if self.connecting:
            self._schedule_tick()
        else:
            self._wake_waiters()

    def open_connection(self, directory: Path) -> None:
        self._remove_readers()
        super().open_connection(directory)
        for descriptor in self.connection.filenos():
            self._loop.add_reader(descriptor, self._on_readable)

    def end_session(self, end: Callable[[], None]) -> None:
        super().end_session(end)
        self._wake_waiters()
        self.advance(time.monotonic())

    def close(self) -> None:
        """Close the connection, and wake all waiting tasks."""
        self._remove_readers()
        super().close()
        self._wake_waiters()

    def _schedule_tick(self) -> None:
        if not self._tick_scheduled:
            self._tick_scheduled = True
            self._loop.call_later(POLL_INTERVAL, self._on_tick)

    def _on_tick(self) -> None:
        self._tick_scheduled = False
        self._on_readable()

    def _on_readable(self) -> None:
        """A message or a disconnect may have arrived."""
        if not self.connection.closed:
            self.poll()

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _remove_readers(self) -> None:
        if self._loop.is_closed():  # a closed loop has no readers
            return
        for descriptor in self.connection.filenos():
            self._loop.remove_reader(descriptor)
