"""The methods that wait, written once for all clients.

Each is a coroutine and a method of both clients: AsyncOffloadClient has it as it is, OffloadClient
runs it to its end (blocking.py). It waits within one deadline (call.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Unpack

import msgspec

from kvferry.client.endpoint import FIND_INTERVAL, has_daemon
from kvferry.client.nonblocking import NonBlockingClient
from kvferry.client.restoring import connect
from kvferry.client.session_state import NamespaceOptions, opening_message
from kvferry.client.splitting import key_batches
from kvferry.client.validation import check_fields
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.hints import ReleaseRetained
from kvferry.proto.keys import OffloadKey
from kvferry.proto.messages import (
    Done,
    Goodbye,
    NamespacesRequest,
    Opened,
    Pin,
    Pinned,
    ReleaseKVCaches,
    StatusRequest,
    Subscribe,
)
from kvferry.proto.status import DaemonStatus, NamespaceStatus


async def connect_first(self: NonBlockingClient, /) -> None:
    """Wait for a daemon, and open the first session; if that fails, close the client."""
    call, link = self._begin_call(self.timeout), self._link
    try:
        while self._named is not None and not has_daemon(self._named):
            try:
                await call.sleep(FIND_INTERVAL)
            except Gone:  # connecting raises the error that says what the directory lacks
                break
        link.open_connection(link.locate())
        await connect(call)
    except BaseException:
        link.stop_reconnecting()
        link.close()
        raise


async def wait_connected(self: NonBlockingClient, /, timeout: float | None = None) -> None:
    """Return when the session is restored. Raises Gone after the timeout, or if the daemon refuses
    to restore it (`__cause__` is its error)."""
    await self._begin_call(timeout).connected()


async def open_namespace(
    self: NonBlockingClient,
    /,
    fingerprint: Fingerprint,
    *,
    mirror: bool = True,
    timeout: float | None = None,
    **options: Unpack[NamespaceOptions],
) -> Opened:
    """Open the namespace of a fingerprint, before KV caches are registered.

    Host blocks are then named by key (KeyLoadStoreSpec), and the daemon decides where they are.
    Every process of the engine that registers KV caches, or looks up or pins keys, opens it.
    options: NamespaceOptions. They apply if this call creates the namespace, or if no other engine
        has it open; the result has the values that apply.
    mirror: mirror the resident keys, for `lookup`; the call returns when it is complete.
    Raises Refused (NAMESPACE_MISMATCH) if this client has opened another one, else Refused
    (POOL_FULL, BAD_MESSAGE...), or Gone.
    """
    session, call = self._session, self._begin_call(timeout)
    opening = opening_message(fingerprint, **options)
    opened = session.opened.find(fingerprint)
    await call.connected()
    if opened is not None:
        opened = session.namespace.opened  # it may have been reopened while waiting
    else:
        opening = msgspec.structs.replace(opening, request_id=session.wire.next_request_id())
        opened = await call.ask(opening)
        session.opened.daemon_opened(opening, opened)
    if mirror and not session.namespace.ensure_mirror().complete:
        await call.send_until(Subscribe(), lambda: session.opened.mirror_complete() or None)
    return opened


async def reset(
    self: NonBlockingClient, /, label: str = "", timeout: float | None = None
) -> tuple[str, ...]:
    """Remove all keys of the namespace. They are a MISS here at once.

    When it returns, no load that is submitted at any daemon of this host and user returns a block
    of before. After a timeout, keys stay a MISS here until then.

    label: why, for example a version of the weights. If several engines reset their common
    namespace with the same label, the first of these resets is the only one.

    Returns the tiers, shared with other hosts, that the reset has not reached yet: this host does
    not use them for the namespace until it has.

    Raises Refused (UNKNOWN_NAMESPACE, BAD_MESSAGE) or Gone.
    """
    session, call = self._session, self._begin_call(timeout)
    request = session.opened.reset(label)
    try:
        await call.connected()
        if session.namespace.is_resetting(request.request_id):  # else reconnecting has done it
            done: Done = await call.ask(request)
            return done.unpublished
    except Refused:
        session.namespace.reset_ended(request.request_id)
        raise
    return session.namespace.unpublished


async def hold(
    self: NonBlockingClient, /, keys: Iterable[OffloadKey], timeout: float | None = None
) -> int:
    """Pin keys; returns how many of them, from the first on, are loadable until they are unpinned.

    Unpin all of them, as after `pin`. What a sibling has is not held there: a load may fail. Raises
    Gone (TIMEOUT, DAEMON_GONE) or Refused (BAD_KEY, BUSY, UNKNOWN_NAMESPACE), and pins none.
    """
    session, call = self._session, self._begin_call(timeout)
    keys, held = session.namespace.checked_keys(keys), 0
    if session.wire.gone is not None:
        raise session.wire.gone.with_traceback(None)
    pinned = 0
    try:
        for batch in key_batches(keys):
            request = Pin(batch, session.wire.next_request_id())
            session.namespace.pin(batch)
            try:
                reply: Pinned = await call.ask(request)
            except Refused:
                session.namespace.unpin(batch)
                raise
            except BaseException:
                self.unpin(batch)
                raise
            held += reply.held if held == pinned else 0
            pinned += len(batch)
    except BaseException:
        if pinned:
            self.unpin(keys[:pinned])
        raise
    return held


async def release_kv_caches(
    self: NonBlockingClient,
    /,
    engine: str | None = None,
    timeout: float | None = None,
    *,
    host_memory: bool = False,
) -> int:
    """Have the daemon stop keeping an engine's tensors; returns the bytes that are freed.

    engine: its name; None for this engine. If it is connected, they are freed when it disconnects.
    host_memory: free its host blocks, too. `engine` may then also be the name of a namespace that
        no engine has open. Without this they stay until another engine needs the memory.

    Raises Refused: NOT_REGISTERED if nothing is kept for this name, ALREADY_REGISTERED if the
    namespace is in use.
    """
    session, call = self._session, self._begin_call(timeout)
    engine = session.wire.engine if engine is None else engine
    check_fields(ReleaseKVCaches, engine=engine)
    await call.connected()
    request = ReleaseKVCaches(session.wire.next_request_id(), engine, host_memory)
    nbytes: int = (await call.ask(request)).nbytes
    return nbytes


async def release_retained(
    self: NonBlockingClient,
    /,
    namespace: str,
    label: str | None = None,
    timeout: float | None = None,
) -> int:
    """End what all clients have retained in a namespace; returns the bytes that can be evicted.

    namespace: its name, as in `Opened.name`. label: frees only the blocks with this label; None
    frees all.
    Raises Refused (UNKNOWN_NAMESPACE, BAD_MESSAGE) or Gone.
    """
    session, call = self._session, self._begin_call(timeout)
    check_fields(ReleaseRetained, namespace=namespace, label=label)
    await call.connected()
    request = ReleaseRetained(session.wire.next_request_id(), namespace, label)
    nbytes: int = (await call.ask(request)).nbytes
    return nbytes


async def wait(
    self: NonBlockingClient, /, job_ids: Collection[int], timeout: float | None = None
) -> None:
    """Return when all of these jobs have ended. get_finished still returns their results.

    Unknown ids count as ended. Jobs that another process of the engine has submitted are waited
    for, too. Raises Gone (TIMEOUT) with this client's ids that are still in flight.
    """
    session, call = self._session, self._begin_call(timeout)
    request = session.jobs.wait(job_ids)
    left = session.jobs.in_flight(request.job_ids)
    others = tuple({*request.job_ids}.difference(left))
    if session.wire.gone is not None:  # all jobs have ended, as LOST
        return

    def have_ended() -> bool | None:
        while left and not session.jobs.in_flight(left[-1:]):
            left.pop()
        return not left or None

    try:
        self._link.poll()
        await call.until(have_ended)
        # Only for other jobs: the daemon would keep the request beyond its timeout here.
        if others:
            await call.ask(msgspec.structs.replace(request, job_ids=others))
    except Gone as error:
        if error.code != Code.DAEMON_GONE:
            raise Gone(error.code, error.message, session.jobs.in_flight(job_ids)) from error


async def status(self: NonBlockingClient, /, timeout: float | None = None) -> DaemonStatus:
    """The status of the daemon."""
    call = self._begin_call(timeout)
    await call.connected()
    request = StatusRequest(self._session.wire.next_request_id())
    report: DaemonStatus = (await call.ask(request)).status
    return report


async def namespaces(
    self: NonBlockingClient, /, timeout: float | None = None
) -> tuple[NamespaceStatus, ...]:
    """The namespaces of the daemon, each with its counters."""
    call = self._begin_call(timeout)
    await call.connected()
    report: tuple[NamespaceStatus, ...] = (
        await call.ask(NamespacesRequest(self._session.wire.next_request_id()))
    ).namespaces
    return report


async def close(self: NonBlockingClient, /, timeout: float = 1.0) -> None:
    """Disconnect; jobs in flight are cancelled. No call is allowed afterwards."""
    session, link = self._session, self._link
    if link.connection.closed:
        return
    link.stop_reconnecting()
    try:
        if session.wire.gone is None and link.can_wait:
            goodbye = Goodbye("client closes")
            await self._begin_call(timeout).send_until(goodbye, lambda: session.wire.gone)
    except KVFerryError:  # the daemon may be gone
        pass
    finally:
        link.close()
