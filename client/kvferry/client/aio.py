"""The client for asyncio: the same verbs; those that wait are awaited.

    client = await AsyncOffloadClient.connect(directory, engine="my-engine")

The others (transfer_async, get_finished, cancel, lookup, pin...) never wait and are plain methods,
as in OffloadClient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from kvferry.client import verbs
from kvferry.client.conversation import timed_out
from kvferry.client.descriptors import collect, deposit
from kvferry.client.nonblocking import KVCaches, NonBlocking
from kvferry.client.timeline import Timeline
from kvferry.client.verbs import Ask, Fetch, Leave, Step, Tell, Verb
from kvferry.proto.errors import KVFerryError
from kvferry.proto.messages import HostRegion, Opened
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus, Fingerprint, NamespaceStatus

if TYPE_CHECKING:
    import torch

R = TypeVar("R")


class AsyncOffloadClient(NonBlocking):
    """As OffloadClient, for one event loop; make one with `connect`."""

    def __init__(self, directory: Path | str | None, engine: str, client: str) -> None:
        super().__init__(directory, engine, client)
        self.timeout = 10.0
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        for socket in (self._connection.socket, self._connection.monitor):
            self._loop.add_reader(int(socket.get(zmq.FD)), self._readable)

    @classmethod
    async def connect(
        cls,
        directory: Path | str | None = None,
        *,
        engine: str = "default",
        client: str = "AsyncOffloadClient",
        timeout: float = 10.0,
    ) -> AsyncOffloadClient:
        """A session with a daemon; parameters and errors as OffloadClient's."""
        self = cls(directory, engine, client)
        self.timeout = timeout
        try:
            self._send(self._conversation.hello())
            async with asyncio.timeout(timeout):
                await self._until(self._conversation.greeted)
        except TimeoutError:
            self._detach()
            raise timed_out("no daemon answered", str(self.directory)) from None
        except BaseException:
            self._detach()
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
        verb = verbs.open_namespace(
            self._conversation,
            fingerprint,
            cpu_bytes_to_use,
            eviction_policy,
            store_threshold,
            mirror,
        )
        return await self._perform(verb, timeout)

    async def reset(self, timeout: float | None = None) -> None:
        """As OffloadClient.reset."""
        await self._perform(verbs.reset(self._conversation), timeout)

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
        talk = self._conversation
        verb = verbs.register(talk, kv_caches, host_bytes, timeline, canonical)
        return await self._perform(verb, timeout)

    async def allocate_kv_caches(
        self,
        layout: KVLayout,
        *,
        host_bytes: int | None = None,
        timeline: Timeline | None = None,
        timeout: float | None = None,
    ) -> tuple[HostRegion, list[torch.Tensor]]:
        """As OffloadClient.allocate_kv_caches."""
        verb = verbs.allocate(self._conversation, layout, host_bytes, timeline)
        return await self._perform(verb, timeout)

    async def wait(self, job_ids: Collection[int], timeout: float | None = None) -> None:
        """As OffloadClient.wait."""
        await self._perform(verbs.wait(self._conversation, job_ids), timeout)

    async def status(self, timeout: float | None = None) -> DaemonStatus:
        """What the daemon says of itself."""
        return await self._perform(verbs.status(self._conversation), timeout)

    async def namespaces(self, timeout: float | None = None) -> tuple[NamespaceStatus, ...]:
        """The namespaces of the daemon, each with its counters."""
        return await self._perform(verbs.namespaces(self._conversation), timeout)

    async def close(self, timeout: float = 1.0) -> None:
        """Say goodbye; jobs under way are given up. The client is of no use afterwards."""
        if self._connection.closed:
            return
        try:
            await self._perform(verbs.goodbye(self._conversation), timeout)
        except KVFerryError:  # it need not hear us
            pass
        finally:
            self._detach()

    async def __aenter__(self) -> AsyncOffloadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _perform(self, verb: Verb[R], timeout: float | None) -> R:
        """Do a verb's steps, all within one timeout."""
        seconds = self.timeout if timeout is None else timeout
        deadline = self._loop.time() + seconds
        try:
            step = next(verb)
            while True:
                try:
                    outcome = await self._do(step, deadline)
                except KVFerryError as error:
                    step = verb.throw(error)
                else:
                    step = verb.send(outcome)
        except StopIteration as end:
            result: R = end.value
            return result

    async def _do(self, step: Step, deadline: float) -> Any:
        talk, session = self._conversation, self.daemon.session_id
        left = max(0.0, deadline - self._loop.time())
        try:
            async with asyncio.timeout_at(deadline):
                match step:
                    case Ask(request):
                        with talk.asking(request) as data:
                            self._send(data)
                            return await self._until(lambda: talk.reply(request.request_id))
                    case Leave(fds):
                        return await asyncio.to_thread(deposit, self.directory, session, fds, left)
                    case Fetch(ticket):
                        return await asyncio.to_thread(
                            collect, self.directory, session, ticket, left
                        )
                    case Tell(message, until):
                        self._send(talk.request(message))
                        return await self._until(until)
        except TimeoutError:
            raise timed_out("no answer", str(self.directory)) from None

    async def _until(self, ready: Callable[[], R | None]) -> R:
        while True:
            changed = self._changed
            self._drain()
            answer = ready()
            if answer is not None:
                return answer
            await changed.wait()

    def _take_in(self) -> bool:
        """Whoever takes messages in wakes everybody who waits: they may be anybody's."""
        news = super()._take_in()
        if news:
            self._announce()
        return news

    def _look(self) -> None:
        """Whoever finds the daemon gone tells everybody who waits."""
        known = self._conversation.ended is not None
        super()._look()
        if not known and self._conversation.ended is not None:
            self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _readable(self) -> None:
        """Something may have arrived, or the daemon may have gone."""
        if not self._connection.closed:
            self._drain()

    def _send(self, data: bytes) -> None:
        super()._send(data)
        self._loop.call_soon(self._readable)  # a send may swallow the descriptor's edge

    def _detach(self) -> None:
        for socket in (self._connection.socket, self._connection.monitor):
            self._loop.remove_reader(int(socket.get(zmq.FD)))
        self._connection.close(heard=self._conversation.ended is None)
