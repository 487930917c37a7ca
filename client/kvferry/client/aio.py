"""The client for asyncio: as OffloadClient, but calls that wait are coroutines.

    client = await AsyncOffloadClient.connect(directory, engine="my-engine")

The others (transfer_async, get_finished, cancel, lookup, pin...) never wait and are plain methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from kvferry.client import operations
from kvferry.client.effects import Operation
from kvferry.client.endpoint import FIND_INTERVAL, has_daemon
from kvferry.client.nonblocking import KVCaches, NonBlockingClient
from kvferry.client.operations import AllocatedKVCaches
from kvferry.client.reconnect import POLL_INTERVAL
from kvferry.client.timeline import Timeline
from kvferry.client.validation import check_fields
from kvferry.proto.errors import KVFerryError
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import Hello, Opened
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus, Fingerprint, NamespaceStatus

R = TypeVar("R")


class AsyncOffloadClient(NonBlockingClient):
    """As OffloadClient, for one event loop, which references it until the client or loop is closed.

    Create one with `connect`. All methods are called in the thread of the event loop.
    """

    def __init__(
        self, directory: Path | str | None, engine: str, client: str, reconnect: bool = True
    ) -> None:
        super().__init__(directory, engine, client, reconnect)
        self.timeout = 10.0
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._tick_scheduled = False
        self._add_readers()

    @classmethod
    async def connect(
        cls,
        directory: Path | str | None = None,
        *,
        engine: str = "default",
        client: str = "AsyncOffloadClient",
        timeout: float = 10.0,
        reconnect: bool = True,
    ) -> AsyncOffloadClient:
        """Connect to a daemon; arguments and errors as OffloadClient's.

        When the connection is lost, the event loop reconnects: no call is needed.
        """
        check_fields(Hello, client=client, engine=engine)
        deadline = time.monotonic() + timeout
        while not has_daemon(directory) and time.monotonic() < deadline:
            await asyncio.sleep(FIND_INTERVAL)
        self = cls(directory, engine, client, reconnect)
        self.timeout = timeout
        try:
            left = max(0.0, deadline - time.monotonic())
            await self._run_operation(operations.connect(self._session), left)
        except BaseException:
            self._stop_reconnecting()
            self._close_connection()
            raise
        return self

    async def open_namespace(
        self,
        fingerprint: Fingerprint,
        *,
        cpu_bytes_to_use: int | None = None,
        eviction_policy: str = "lru",
        store_threshold: int = 1,
        mirror: bool = True,
        timeout: float | None = None,
    ) -> Opened:
        """As OffloadClient.open_namespace."""
        operation = operations.open_namespace(
            self._session,
            fingerprint,
            cpu_bytes_to_use,
            eviction_policy,
            store_threshold,
            mirror,
        )
        return await self._run_operation(operation, timeout)

    async def reset(self, timeout: float | None = None) -> None:
        """As OffloadClient.reset."""
        await self._run_operation(operations.reset_namespace(self._session), timeout)

    async def register_kv_caches(
        self,
        kv_caches: KVCaches,
        *,
        host_bytes: int | None = None,
        timeline: Timeline | None = None,
        timeout: float | None = None,
        **canonical: Any,
    ) -> HostRegion:
        """As OffloadClient.register_kv_caches."""
        session = self._session
        operation = operations.register_kv_caches(
            session, kv_caches, host_bytes, timeline, canonical
        )
        return await self._run_operation(operation, timeout)

    async def allocate_kv_caches(
        self,
        layout: KVLayout,
        *,
        host_bytes: int | None = None,
        timeline: Timeline | None = None,
        keep: bool = False,
        timeout: float | None = None,
    ) -> AllocatedKVCaches:
        """As OffloadClient.allocate_kv_caches."""
        operation = operations.allocate_kv_caches(self._session, layout, host_bytes, timeline, keep)
        return await self._run_operation(operation, timeout)

    async def release_kv_caches(
        self, engine: str | None = None, timeout: float | None = None
    ) -> int:
        """As OffloadClient.release_kv_caches."""
        operation = operations.release_kv_caches(
            self._session, self.engine if engine is None else engine
        )
        return await self._run_operation(operation, timeout)

    async def wait(self, job_ids: Collection[int], timeout: float | None = None) -> None:
        """As OffloadClient.wait."""
        await self._run_operation(operations.wait_jobs(self._session, job_ids), timeout)

    async def status(self, timeout: float | None = None) -> DaemonStatus:
        """The status of the daemon."""
        return await self._run_operation(operations.fetch_status(self._session), timeout)

    async def namespaces(self, timeout: float | None = None) -> tuple[NamespaceStatus, ...]:
        """The namespaces of the daemon, each with its counters."""
        return await self._run_operation(operations.fetch_namespaces(self._session), timeout)

    async def close(self, timeout: float = 1.0) -> None:
        """Disconnect; jobs in flight are cancelled. No call is allowed afterwards."""
        if self._connection.closed:
            return
        self._stop_reconnecting()
        try:
            if not self._loop.is_closed():
                await self._run_operation(operations.disconnect(self._session), timeout)
        except KVFerryError:  # the daemon may be gone
            pass
        finally:
            self._close_connection()

    async def __aenter__(self) -> AsyncOffloadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run_operation(self, operation: Operation[R], timeout: float | None) -> R:
        driver = self._drive(operation, self.timeout if timeout is None else timeout)
        try:
            while True:
                seconds = next(driver)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._changed.wait()
        except StopIteration as end:
            result: R = end.value
            return result
        finally:
            driver.close()

    def _receive_messages(self) -> bool:
        """Receive messages, and wake all waiting tasks: they may be for any of them."""
        try:
            received = super()._receive_messages()
        except KVFerryError:  # of one message; the descriptor does not signal those behind it again
            self._wake_waiters()
            self._loop.call_soon(self._on_readable)
            raise
        if received:
            self._wake_waiters()
        return received

    def _check_connection(self) -> None:
        """Check the connection; if it is lost, wake all waiting tasks."""
        has_socket = self._session.has_socket
        super()._check_connection()
        if has_socket and not self._session.has_socket:
            self._wake_waiters()
            self._advance_reconnect()

    def _advance_reconnect(self) -> None:
        """Advance a reconnect now, and again after POLL_INTERVAL."""
        super()._advance_reconnect()
        if self._session.gone is None:
            self._wake_waiters()
        elif not self._tick_scheduled and not self._session.closed:
            self._tick_scheduled = True
            self._loop.call_later(POLL_INTERVAL, self._on_tick)

    def _on_tick(self) -> None:
        self._tick_scheduled = False
        self._on_readable()

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _on_readable(self) -> None:
        """A message or a disconnect may have arrived."""
        if not self._connection.closed:
            self._poll_connection()

    def _send(self, data: bytes) -> None:
        super()._send(data)
        self._loop.call_soon(self._on_readable)  # sending may consume the edge of the descriptor

    def _reopen_connection(self, directory: Path) -> None:
        self._remove_readers()
        super()._reopen_connection(directory)
        self._add_readers()

    def abandon(self) -> None:
        super().abandon()
        self._wake_waiters()
        self._advance_reconnect()

    def _add_readers(self) -> None:
        for descriptor in self._connection.filenos():
            self._loop.add_reader(descriptor, self._on_readable)

    def _remove_readers(self) -> None:
        if self._loop.is_closed():  # a closed loop has no readers
            return
        for descriptor in self._connection.filenos():
            self._loop.remove_reader(descriptor)

    def _close_connection(self) -> None:
        """Close the connection, and wake all waiting tasks."""
        self._remove_readers()
        super()._close_connection()
        self._wake_waiters()
