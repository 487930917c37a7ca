"""The client for asyncio: the same calls; those that wait are awaited.

    client = await AsyncOffloadClient.connect(directory, engine="my-engine")

The others (transfer_async, get_finished, cancel, lookup, pin...) never wait and are plain methods,
as in OffloadClient.
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
from kvferry.client.endpoint import LOOK_EVERY, has_daemon
from kvferry.client.nonblocking import KVCaches, NonBlocking
from kvferry.client.operations import AllocatedKVCaches
from kvferry.client.reconnect import TICK
from kvferry.client.timeline import Timeline
from kvferry.client.validation import check_fields
from kvferry.proto.errors import KVFerryError
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import Hello, Opened
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus, Fingerprint, NamespaceStatus

R = TypeVar("R")


class AsyncOffloadClient(NonBlocking):
    """As OffloadClient, for one event loop, which keeps it until it is closed, or the loop is.

    Make one with `connect`.
    """

    def __init__(
        self, directory: Path | str | None, engine: str, client: str, reconnect: bool = True
    ) -> None:
        super().__init__(directory, engine, client, reconnect)
        self.timeout = 10.0
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._ticking = False
        self._attach()

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
        """A session with a daemon; parameters and errors as OffloadClient's.

        When the connection is lost, the event loop reconnects: no call is needed.
        """
        check_fields(Hello, client=client, engine=engine)
        deadline = time.monotonic() + timeout
        while not has_daemon(directory) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_EVERY)
        self = cls(directory, engine, client, reconnect)
        self.timeout = timeout
        try:
            left = max(0.0, deadline - time.monotonic())
            await self._perform(operations.connect(self._session), left)
        except BaseException:
            self._stop_reconnecting()
            self._hang_up()
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
        return await self._perform(operation, timeout)

    async def reset(self, timeout: float | None = None) -> None:
        """As OffloadClient.reset."""
        await self._perform(operations.reset(self._session), timeout)

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
        operation = operations.register(session, kv_caches, host_bytes, timeline, canonical)
        return await self._perform(operation, timeout)

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
        operation = operations.allocate(self._session, layout, host_bytes, timeline, keep)
        return await self._perform(operation, timeout)

    async def release_kv_caches(
        self, engine: str | None = None, timeout: float | None = None
    ) -> int:
        """As OffloadClient.release_kv_caches."""
        operation = operations.release(self._session, self.engine if engine is None else engine)
        return await self._perform(operation, timeout)

    async def wait(self, job_ids: Collection[int], timeout: float | None = None) -> None:
        """As OffloadClient.wait."""
        await self._perform(operations.wait(self._session, job_ids), timeout)

    async def status(self, timeout: float | None = None) -> DaemonStatus:
        """The status of the daemon."""
        return await self._perform(operations.status(self._session), timeout)

    async def namespaces(self, timeout: float | None = None) -> tuple[NamespaceStatus, ...]:
        """The namespaces of the daemon, each with its counters."""
        return await self._perform(operations.namespaces(self._session), timeout)

    async def close(self, timeout: float = 1.0) -> None:
        """Say goodbye and close; jobs in flight are cancelled. No call is allowed afterwards."""
        if self._connection.closed:
            return
        self._stop_reconnecting()
        try:
            if not self._loop.is_closed():
                await self._perform(operations.goodbye(self._session), timeout)
        except KVFerryError:  # the daemon may be gone
            pass
        finally:
            self._hang_up()

    async def __aenter__(self) -> AsyncOffloadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _perform(self, operation: Operation[R], timeout: float | None) -> R:
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

    def _take_in(self) -> bool:
        """Wake all waiting tasks: the messages may be for any of them."""
        news = super()._take_in()
        if news:
            self._announce()
        return news

    def _look(self) -> None:
        """If the connection is lost, wake all waiting tasks."""
        linked = self._session.linked
        super()._look()
        if linked and not self._session.linked:
            self._announce()
            self._advance()

    def _advance(self) -> None:
        """Reconnect as far as it goes now, and go on in the next ticks of the loop."""
        super()._advance()
        if self._session.gone is None:
            self._announce()
        elif not self._ticking and not self._session.closed:
            self._ticking = True
            self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._readable()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _readable(self) -> None:
        """Something may have arrived, or the connection may be lost."""
        if not self._connection.closed:
            self._drain()

    def _send(self, data: bytes) -> None:
        super()._send(data)
        self._loop.call_soon(self._readable)  # a send may swallow the descriptor's edge

    def _reopen(self, directory: Path) -> None:
        self._detach()
        super()._reopen(directory)
        self._attach()

    def abandon(self) -> None:
        super().abandon()
        self._announce()
        self._advance()

    def _attach(self) -> None:
        for descriptor in self._connection.filenos():
            self._loop.add_reader(descriptor, self._readable)

    def _detach(self) -> None:
        if self._loop.is_closed():  # it has no readers then
            return
        for descriptor in self._connection.filenos():
            self._loop.remove_reader(descriptor)

    def _hang_up(self) -> None:
        """Wake all waiting tasks: the client is closed."""
        self._detach()
        super()._hang_up()
        self._announce()
