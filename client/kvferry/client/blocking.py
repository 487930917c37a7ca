"""The client for schedulers and workers that do not run on asyncio.

Submitting and polling never wait and need no thread. Calls that wait take a timeout. A client is
used by one thread at a time, in the process that created it; a forked child creates its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, TypeVar

from kvferry.client import operations
from kvferry.client.effects import Operation
from kvferry.client.endpoint import FIND_INTERVAL, has_daemon
from kvferry.client.nonblocking import KVCaches, NonBlockingClient
from kvferry.client.operations import AllocatedKVCaches
from kvferry.client.reconnect import POLL_INTERVAL
from kvferry.client.reconnecting_client import DaemonDirectory
from kvferry.client.session_state import SessionState
from kvferry.client.timeline import Timeline
from kvferry.client.validation import check_fields
from kvferry.proto.errors import KVFerryError
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import Hello, Opened
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus, Fingerprint, NamespaceStatus

R = TypeVar("R")


class OffloadClient(NonBlockingClient):
    """A session with the daemon in `directory` (default: the only daemon of this machine).

    directory: the runtime directory of the daemon, or a directory that contains only that; with
        `state`, also a function that returns it, which is called at each attempt to connect.
    engine: the name under which KV caches are registered; the same in all processes of an engine.
    client: a name for the daemon's log.
    timeout: seconds that a call waits at most, unless it is given its own timeout; math.inf for no
        limit. The constructor also waits so long for a daemon.
    reconnect: when the connection is lost, reconnect to the next daemon, with the same namespace,
        tensors and pins. Every call that polls advances that; only calls that need a reply wait for
        it, within their timeout. False: the client is closed when the connection is lost.
    state: the state to restore once connected. The constructor then returns at once, polling
        connects, and `gone` says why it is not connected yet. For engines that must not wait.
    Raises Gone (TIMEOUT, DAEMON_GONE) if no daemon replies, Refused (BAD_CONFIG) if there cannot be
    one, and the error with which the daemon refuses.
    """

    def __init__(
        self,
        directory: DaemonDirectory = None,
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
                time.sleep(FIND_INTERVAL)
        super().__init__(directory, engine, client, reconnect, state)
        self.timeout = timeout
        if state is not None:
            return
        try:
            left = max(0.0, deadline - time.monotonic())
            self._run_operation(operations.connect(self._session), left)
        except BaseException:
            self._stop_reconnecting()
            self._close_connection()
            raise

    def wait_connected(self, timeout: float | None = None) -> None:
        """Return when the session is restored. Raises Gone after the timeout, or if the daemon
        refuses to restore it (`__cause__` is its error)."""
        self._run_operation(operations.wait_connected(self._session), timeout)

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

        Host blocks are then named by key (KeyLoadStoreSpec), and the daemon decides where they are.
        Every process of the engine that registers KV caches, or looks up or pins keys, opens it.
        cpu_bytes_to_use: quota of the host pool in bytes; None for all that is free.
        eviction_policy: "lru", "arc" or "s3fifo".
        store_threshold: a key is stored from its n-th offer on.
            These three apply if this call creates the namespace, or if no other engine has it open;
            the result has the values that apply.
        mirror: mirror the resident keys, for `lookup`; the call returns when it is complete.
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
        return self._run_operation(operation, timeout)

    def reset(self, timeout: float | None = None) -> None:
        """Remove all keys of the namespace. They are a MISS here at once.

        Returns when the daemon has done it; after a timeout, keys stay a MISS here until then.
        Raises Refused (UNKNOWN_NAMESPACE) or Gone.
        """
        self._run_operation(operations.reset_namespace(self._session), timeout)

    def register_kv_caches(
        self,
        kv_caches: KVCaches,
        *,
        host_bytes: int | None = None,
        timeline: Timeline | None = None,
        timeout: float | None = None,
        **canonical: Any,
    ) -> HostRegion:
        """Share the engine's KV tensors with the daemon; returns its region of the host pool.

        kv_caches: canonical form, or the argument of `canonicalize`, with its other arguments in
            `canonical` (num_blocks, groups, block_size_factor...).
        host_bytes: size of the region; None for all that is free, and in a namespace.
        timeline: the timeline that `wait_for` of this engine's transfers refers to.
        Raises Refused (BAD_MESSAGE, BAD_LAYOUT, NOT_SHAREABLE, DEVICE_MISMATCH, POOL_FULL,
        ALREADY_REGISTERED...) or Failed (MAP_FAILED, DRIVER); nothing stays registered.
        If the call ends before the reply (TIMEOUT, a cancelled task, ctrl-c), the tensors may be
        registered, now or later. Calling again with the same arguments uses that registration; with
        other arguments it is undone first, by a new session.
        """
        session = self._session
        operation = operations.register_kv_caches(
            session, kv_caches, host_bytes, timeline, canonical
        )
        return self._run_operation(operation, timeout)

    def allocate_kv_caches(
        self,
        layout: KVLayout,
        *,
        host_bytes: int | None = None,
        timeline: Timeline | None = None,
        keep: bool = False,
        timeout: float | None = None,
    ) -> AllocatedKVCaches:
        """Have the daemon allocate the KV tensors of a layout, and map them in this process.

        Returns (region, tensors, kept): the engine's region of the host pool; int8 tensors of
        (num_blocks, page_size_bytes) in the layout's order; whether they were kept for an engine
        with this name and layout, with their bytes.
        keep: have the daemon keep the tensors after this engine disconnects, until an engine with
            its name registers again, its region is given to another engine, or release_kv_caches is
            called. Until then they occupy device memory.
        The tensors outlive the daemon; reconnecting registers them with the next one.
        Raises as register_kv_caches. If they cannot be mapped here, the allocation is undone, by a
        new session.
        """
        operation = operations.allocate_kv_caches(self._session, layout, host_bytes, timeline, keep)
        return self._run_operation(operation, timeout)

    def release_kv_caches(self, engine: str | None = None, timeout: float | None = None) -> int:
        """Have the daemon stop keeping an engine's tensors; returns their size in bytes.

        engine: its name; None for this engine. If it is connected, the tensors are freed when it
        disconnects. Raises Refused (NOT_REGISTERED) if none are kept for this name.
        """
        operation = operations.release_kv_caches(
            self._session, self.engine if engine is None else engine
        )
        return self._run_operation(operation, timeout)

    def wait(self, job_ids: Collection[int], timeout: float | None = None) -> None:
        """Return when all of these jobs have ended. get_finished still returns their results.

        Unknown ids count as ended. Jobs that another process of the engine has submitted are waited
        for, too. Raises Gone (TIMEOUT) with this client's ids that are still in flight.
        """
        self._run_operation(operations.wait_jobs(self._session, job_ids), timeout)

    def status(self, timeout: float | None = None) -> DaemonStatus:
        """The status of the daemon."""
        return self._run_operation(operations.fetch_status(self._session), timeout)

    def namespaces(self, timeout: float | None = None) -> tuple[NamespaceStatus, ...]:
        """The namespaces of the daemon, each with its counters."""
        return self._run_operation(operations.fetch_namespaces(self._session), timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Disconnect; jobs in flight are cancelled. No call is allowed afterwards."""
        if self._connection.closed:
            return
        self._stop_reconnecting()
        try:
            self._run_operation(operations.disconnect(self._session), timeout)
        except KVFerryError:  # the daemon may be gone
            pass
        finally:
            self._close_connection()

    def __enter__(self) -> OffloadClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_operation(self, operation: Operation[R], timeout: float | None) -> R:
        driver = self._drive(operation, self.timeout if timeout is None else timeout)
        try:
            while True:
                seconds = next(driver)
                if self.connecting:
                    seconds = min(seconds, POLL_INTERVAL)
                self._connection.wait_readable(seconds)
        except StopIteration as end:
            result: R = end.value
            return result
        finally:
            driver.close()
