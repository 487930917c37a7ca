"""The client for schedulers and workers that do not run on asyncio.

Submitting and polling never wait and need no thread; the calls that do wait take a timeout and end
by it. A client belongs to one thread at a time, and to the process that made it: a fork's child
makes its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from types import TracebackType
from typing import Any, TypeVar

from kvferry.client import operations
from kvferry.client.effects import Operation
from kvferry.client.endpoint import LOOK_EVERY, has_daemon
from kvferry.client.nonblocking import KVCaches, Locate, NonBlocking
from kvferry.client.operations import AllocatedKVCaches
from kvferry.client.reconnect import TICK
from kvferry.client.session_state import SessionState
from kvferry.client.timeline import Timeline
from kvferry.client.validation import check_fields
from kvferry.proto.errors import KVFerryError
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import Hello, Opened
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus, Fingerprint, NamespaceStatus

R = TypeVar("R")


class OffloadClient(NonBlocking):
    """A session with the daemon in `directory` (by default: the only daemon there is).

    directory: the folder of the daemon's sockets, or one that holds only that; with `state`, also a
        function that returns it, called at each attempt to connect.
    engine: the name under which KV caches are registered; the processes of one engine give the
        same one. client: a name for the daemon's log. timeout: seconds that a waiting call takes
        at most, unless it is given its own; math.inf for as long as it takes. As long, this
        constructor waits for a daemon.
    reconnect: when the connection is lost, reconnect to the daemon that is there next, with the
        same namespace, tensors and pins. Every call advances that, and none waits for it, but
        those that ask the daemon something, within their timeout. False: the client ends with its
        daemon.
    state: what to have of the daemon once it is connected. The constructor returns at once then,
        polling connects, and `gone` says why not yet. For engines that must not wait.
    Raises Gone (TIMEOUT, DAEMON_GONE) if no daemon answers, Refused (BAD_CONFIG) if none can, and
    what the daemon refuses.
    """

    def __init__(
        self,
        directory: Locate = None,
        *,
        engine: str = "default",
        client: str = "OffloadClient",
        timeout: float = 10.0,
        reconnect: bool = True,
        state: SessionState | None = None,
    ) -> None:
        check_fields(Hello, client=client, engine=engine)
        deadline = time.monotonic() + timeout
        if not callable(directory) and state is None:
            while not has_daemon(directory) and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY)
        super().__init__(directory, engine, client, reconnect, state)
        self.timeout = timeout
        if state is not None:
            return
        try:
            left = max(0.0, deadline - time.monotonic())
            self._perform(operations.connect(self._session), left)
        except BaseException:
            self._stop_reconnecting()
            self._hang_up()
            raise

    def wait_connected(self, timeout: float | None = None) -> None:
        """Return once the daemon is there and the session is restored; raises Gone if not in time,
        or if the daemon refuses to restore it (`__cause__` is its error)."""
        self._perform(operations.present(self._session), timeout)

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
        """Open the namespace of a fingerprint, before KV caches are registered.

        From then on host blocks are named by key (KeyLoadStoreSpec), and the daemon decides where
        they lie. Every process of the engine that registers, looks keys up or pins them opens it.
        cpu_bytes_to_use: its quota of the pool in bytes; None for all that is free.
        eviction_policy: "lru" or "arc". store_threshold: a key is stored from its n-th offer on.
            The three apply if this creates the namespace, or no other engine has it open; the
            result tells what applies.
        mirror: keep a copy of what is resident, for `lookup`; this returns once it is complete.
        Raises Refused (NAMESPACE_MISMATCH) if this client has opened another one, else Refused
        (POOL_FULL, BAD_MESSAGE...), or Gone.
        """
        operation = operations.open_namespace(
            self._session,
            fingerprint,
            cpu_bytes_to_use,
            eviction_policy,
            store_threshold,
            mirror,
        )
        return self._perform(operation, timeout)

    def reset(self, timeout: float | None = None) -> None:
        """Make every key of the namespace absent: here at once; returns when the daemon did it.

        If it is not done in time, every key stays a MISS here until it is.
        Raises Refused (UNKNOWN_NAMESPACE) or Gone.
        """
        self._perform(operations.reset(self._session), timeout)

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
        If the call ends before the reply (Gone, TIMEOUT; a task cancelled; ctrl-c), they may be
        registered, now or later. Calling again with the same arguments takes that registration;
        with others it is undone first, by a new session.
        """
        session = self._session
        operation = operations.register(session, kv_caches, host_bytes, timeline, canonical)
        return self._perform(operation, timeout)

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
        keep: have the daemon keep them after this engine ends, until one of its name registers
            again, its part of the pool goes to another, or release_kv_caches. They take the
            device's memory as long.
        The tensors outlive the daemon, and are registered with the next one as the engine's own.
        Raises as register_kv_caches does. If they cannot be mapped here, they are given back, by
        a new session.
        """
        operation = operations.allocate(self._session, layout, host_bytes, timeline, keep)
        return self._perform(operation, timeout)

    def release_kv_caches(self, engine: str | None = None, timeout: float | None = None) -> int:
        """Let the daemon not keep an engine's tensors any longer; returns their size in bytes.

        engine: None for this one. If it is connected, they are freed when it ends. Raises Refused
        (NOT_REGISTERED) if none are kept for an engine of this name.
        """
        operation = operations.release(self._session, self.engine if engine is None else engine)
        return self._perform(operation, timeout)

    def wait(self, job_ids: Collection[int], timeout: float | None = None) -> None:
        """Return when all of these jobs have ended; their results stay for get_finished.

        Ids that are not in flight count as ended; jobs that another process of the engine
        submitted are waited for, too. Raises Gone (TIMEOUT) with our ids that are still in flight.
        """
        self._perform(operations.wait(self._session, job_ids), timeout)

    def status(self, timeout: float | None = None) -> DaemonStatus:
        """The status of the daemon."""
        return self._perform(operations.status(self._session), timeout)

    def namespaces(self, timeout: float | None = None) -> tuple[NamespaceStatus, ...]:
        """The namespaces of the daemon, each with its counters."""
        return self._perform(operations.namespaces(self._session), timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Say goodbye and close; jobs in flight are cancelled. No call is allowed afterwards."""
        if self._connection.closed:
            return
        self._stop_reconnecting()
        try:
            self._perform(operations.goodbye(self._session), timeout)
        except KVFerryError:  # the daemon may be gone
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

    def _perform(self, operation: Operation[R], timeout: float | None) -> R:
        driver = self._drive(operation, self.timeout if timeout is None else timeout)
        try:
            while True:
                seconds = next(driver)
                self._connection.wait(min(seconds, TICK) if self.connecting else seconds)
        except StopIteration as end:
            result: R = end.value
            return result
        finally:
            driver.close()
