"""The client for schedulers and workers that do not run on asyncio.

Submitting and polling never wait and need no thread; the verbs that do wait take a timeout and end
by it. A client belongs to one thread at a time, and to the process that made it: a fork's child
makes its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from kvferry.client import verbs
from kvferry.client.bounds import check_fields
from kvferry.client.comeback import TICK
from kvferry.client.conversation import LONGEST, timed_out
from kvferry.client.descriptors import collect, deposit
from kvferry.client.endpoint import LOOK_EVERY, has_daemon
from kvferry.client.nonblocking import KVCaches, NonBlocking
from kvferry.client.steps import Ask, Fetch, Leave, Step, Tell, Until, Verb
from kvferry.client.timeline import Timeline
from kvferry.client.verbs import AllocatedKVCaches
from kvferry.proto.errors import KVFerryError
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import Hello, Opened
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus, Fingerprint, NamespaceStatus

R = TypeVar("R")


class OffloadClient(NonBlocking):
    """A session with the daemon in `directory` (by default: the only daemon there is).

    directory: the folder of the daemon's sockets, or one that holds only that. Where there is no
        daemon yet, one may come as long as `timeout` lasts.
    engine: the name under which KV caches are registered; the processes of one engine give the
        same one. client: who speaks, for the daemon's log. timeout: seconds that a waiting verb
        takes at most, unless it is given its own; math.inf for as long as it takes.
    reconnect: when the daemon goes, come back by itself to the one that is there next, in the same
        namespace, with the same tensors and pins. Whatever is called drives it on and none waits
        for it, but those that ask the daemon something: they have their timeout for it. False: it
        ends with its daemon.
    Raises Gone (TIMEOUT, DAEMON_GONE) where no daemon answers, Refused (BAD_CONFIG) where none can,
    and where it will not have us.
    """

    def __init__(
        self,
        directory: Path | str | None = None,
        *,
        engine: str = "default",
        client: str = "OffloadClient",
        timeout: float = 10.0,
        reconnect: bool = True,
    ) -> None:
        check_fields(Hello, client=client, engine=engine)
        deadline = time.monotonic() + timeout
        while not has_daemon(directory) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)
        super().__init__(directory, engine, client, reconnect)
        self.timeout = timeout
        try:
            left = max(0.0, deadline - time.monotonic())
            self._perform(verbs.join(self._conversation), left)
        except BaseException:
            self._leave()
            self._hang_up()
            raise

    def open_namespace(
        self,
        fingerprint: Fingerprint,
        *,
        cpu_bytes_to_use: int | None = None,
        eviction_policy: str = "lru",
        store_threshold: int = 1,
        mirror: bool = True,
        timeout: float | None = None,
    ) -> Opened:
        """Enter the namespace of a fingerprint, before KV caches are registered.

        From then on host blocks are named by key (KeyLoadStoreSpec), and the daemon decides where
        they lie. Every process of the engine that registers, looks keys up or pins them opens it.
        cpu_bytes_to_use: how much of the pool it takes; None for all that is free.
        eviction_policy: "lru" or "arc". store_threshold: a key is stored from so many offers on.
            The three count where the namespace is made, or nobody else is in it; what holds is
            in the answer.
        mirror: keep a copy of what is resident, for `lookup`; this returns once it is whole.
        Raises Refused (NAMESPACE_MISMATCH) where this client has opened another one; opened again,
        it is as it was. Else Refused (POOL_FULL, BAD_MESSAGE...), or Gone.
        """
        verb = verbs.open_namespace(
            self._conversation,
            fingerprint,
            cpu_bytes_to_use,
            eviction_policy,
            store_threshold,
            mirror,
        )
        return self._perform(verb, timeout)

    def reset(self, timeout: float | None = None) -> None:
        """Make every key of the namespace absent; here it is so at once, and returns when done.

        Where it is not done in time, everything stays absent here until it is.
        Raises Refused (UNKNOWN_NAMESPACE) or Gone.
        """
        self._perform(verbs.reset(self._conversation), timeout)

    def register_kv_caches(
        self,
        kv_caches: KVCaches,
        *,
        host_bytes: int | None = None,
        timeline: Timeline | None = None,
        timeout: float | None = None,
        **canonical: Any,
    ) -> HostRegion:
        """Share the engine's KV tensors with the daemon; returns its part of the host pool.

        kv_caches: canonical form, or what `canonicalize` takes, with its arguments in `canonical`
            (num_blocks, groups, block_size_factor...).
        host_bytes: how much of the pool to take; None for all that is free, and in a namespace.
        timeline: what `wait_for` of this engine's transfers is compared with.
        Raises Refused (BAD_MESSAGE, BAD_LAYOUT, NOT_SHAREABLE, DEVICE_MISMATCH, POOL_FULL,
        ALREADY_REGISTERED...) or Failed (MAP_FAILED, DRIVER); nothing stays registered.
        Where nobody waits for the answer (Gone, TIMEOUT; a task cancelled; ctrl-c) they may be
        registered, now or later: who calls again gets that where the arguments are the same, and
        has it undone else, by a session of a new incarnation.
        """
        talk = self._conversation
        verb = verbs.register(talk, kv_caches, host_bytes, timeline, canonical)
        return self._perform(verb, timeout)

    def allocate_kv_caches(
        self,
        layout: KVLayout,
        *,
        host_bytes: int | None = None,
        timeline: Timeline | None = None,
        keep: bool = False,
        timeout: float | None = None,
    ) -> AllocatedKVCaches:
        """Have the daemon allocate the KV tensors of a layout, and map them here.

        Returns (region, tensors, kept): the engine's part of the host pool; int8 tensors of
        (num_blocks, page_size_bytes) in the layout's order; whether they are those that were kept
        for an engine of this name and layout, with their bytes.
        keep: have the daemon keep them when this engine goes, until one of its name registers
            again, its part of the pool goes to another, or release_kv_caches. They take the
            device's memory as long.
        The tensors live on when the daemon dies, and are registered with the next one as our own.
        Raises as register_kv_caches does. Where they cannot be mapped here, the daemon has them
        back, by a session of a new incarnation.
        """
        verb = verbs.allocate(self._conversation, layout, host_bytes, timeline, keep)
        return self._perform(verb, timeout)

    def release_kv_caches(self, engine: str | None = None, timeout: float | None = None) -> int:
        """Have an engine's tensors, by default ours, kept no longer; returns their bytes.

        Where the engine is away they are freed, where it is here that is when it goes. Raises
        Refused (NOT_REGISTERED) where none are kept for an engine of this name.
        """
        verb = verbs.release(self._conversation, self.engine if engine is None else engine)
        return self._perform(verb, timeout)

    def wait(self, job_ids: Collection[int], timeout: float | None = None) -> None:
        """Return when all of these jobs have ended; their results stay for get_finished.

        Ids that are not under way count as ended; jobs that another process of the engine
        submitted are waited for too. Raises Gone (TIMEOUT) with our ids that are still under way.
        """
        self._perform(verbs.wait(self._conversation, job_ids), timeout)

    def status(self, timeout: float | None = None) -> DaemonStatus:
        """What the daemon says of itself."""
        return self._perform(verbs.status(self._conversation), timeout)

    def namespaces(self, timeout: float | None = None) -> tuple[NamespaceStatus, ...]:
        """The namespaces of the daemon, each with its counters."""
        return self._perform(verbs.namespaces(self._conversation), timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Say goodbye; jobs under way are given up. The client is of no use afterwards."""
        if self._connection.closed:
            return
        self._leave()
        try:
            self._perform(verbs.goodbye(self._conversation), timeout)
        except KVFerryError:  # it need not hear us
            pass
        finally:
            self._hang_up()

    def __enter__(self) -> OffloadClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _perform(self, verb: Verb[R], timeout: float | None) -> R:
        """Do a verb's steps, all within one timeout."""
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + min(LONGEST, seconds)
        try:
            step = next(verb)
            while True:
                try:
                    outcome = self._do(step, deadline)
                except Exception as error:  # of ours or not: a verb may have to tidy up
                    step = verb.throw(error)
                else:
                    step = verb.send(outcome)
        except StopIteration as end:
            result: R = end.value
            return result
        finally:
            verb.close()

    def _do(self, step: Step, deadline: float) -> Any:
        talk, left = self._conversation, max(0.0, deadline - time.monotonic())
        match step:
            case Ask(request):
                with talk.asking(request):
                    self._send(talk.request(request))
                    return self._until(lambda: talk.reply(request.request_id), deadline)
            case Leave(descriptors):
                return deposit(self.directory, talk.session, descriptors, left)
            case Fetch(ticket):
                return collect(self.directory, talk.session, ticket, left)
            case Tell(message, until):
                self._send(talk.request(message))
                return self._until(until, deadline)
            case Until(ready):
                return self._until(ready, deadline)

    def _until(self, ready: Callable[[], R | None], deadline: float) -> R:
        """Take messages in until `ready` answers; Gone (TIMEOUT) where it does not in time."""
        while True:
            self._drain()
            answer = ready()
            if answer is not None:
                return answer
            left = deadline - time.monotonic()
            if left <= 0:
                raise timed_out("no answer", str(self.directory))
            self._connection.wait(min(left, TICK) if self.connecting else left)
