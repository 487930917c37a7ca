"""The methods that wait, written once for all clients.

Each is a coroutine and a method of both clients: AsyncOffloadClient has it as it is, OffloadClient
runs it to its end (blocking.py). It waits within one deadline (call.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import msgspec

from kvferry.client.arrays import device_kind
from kvferry.client.call import Call
from kvferry.client.endpoint import FIND_INTERVAL, has_daemon
from kvferry.client.nonblocking import KVCaches, NonBlockingClient
from kvferry.client.restoring import connect, registration_request, share_timeline
from kvferry.client.session import ClientSession
from kvferry.client.session_state import NamespaceOptions, RegistrationState, opening_message
from kvferry.client.splitting import key_batches
from kvferry.client.timeline import Timeline
from kvferry.client.validation import check_fields
from kvferry.proto.errors import Code, Failed, Gone, KVFerryError, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.hints import ReleaseRetained
from kvferry.proto.keys import OffloadKey
from kvferry.proto.memory import FdAllocation, HostRegion
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    Done,
    Goodbye,
    NamespacesRequest,
    Opened,
    Pin,
    Pinned,
    Registered,
    RegisterKVCaches,
    ReleaseKVCaches,
    StatusRequest,
    Subscribe,
)
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus, NamespaceStatus

if TYPE_CHECKING:
    import torch

# Seconds until a registration is requested again that the daemon has refused because it has not
# noticed the end of this client's last session.
RETRY_INTERVAL = 0.05


class AllocatedKVCaches(NamedTuple):
    """KV tensors that the daemon allocated: int8, (num_blocks, page_size_bytes), in the layout's
    order; numpy arrays without torch. kept: whether they were kept for the engine, with their
    bytes."""

    region: HostRegion
    tensors: list[torch.Tensor]
    kept: bool


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


async def register_kv_caches(
    self: NonBlockingClient,
    /,
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
    host_bytes: size of the region; None for the region that the engine had before, or the largest
        that no other engine uses; and in a namespace.
    timeline: the timeline that `wait_for` of this engine's transfers refers to.
    Raises Refused (BAD_MESSAGE, BAD_LAYOUT, NOT_SHAREABLE, DEVICE_MISMATCH, POOL_FULL,
    ALREADY_REGISTERED...) or Failed (MAP_FAILED, DRIVER); nothing stays registered.
    If the call ends before the reply (TIMEOUT, a cancelled task, ctrl-c), the session ends with it,
    as with `abandon`: nothing stays registered, and the client reconnects. Then call again.
    """
    from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize

    session, call = self._session, self._begin_call(timeout)
    _check_new_registration(session, host_bytes, timeline)
    if not isinstance(kv_caches, CanonicalKVCaches):
        kv_caches = canonicalize(kv_caches, **canonical)
    if timeline is not None:
        timeline.check_device(device_kind(kv_caches.tensors[0]))
    check_fields(RegisterKVCaches, layout=kv_caches.layout, host_bytes=host_bytes)
    await call.connected()
    registration = RegistrationState(kv_caches, host_bytes, timeline)
    with _ends_session(call, timeline, unless=(Refused, Failed)):
        request = await registration_request(call, registration)
        reply: Registered = await _ask_registration(call, request)
        session.kv_caches_registered(registration, reply.region)
    return reply.region


async def allocate_kv_caches(
    self: NonBlockingClient,
    /,
    layout: KVLayout,
    *,
    host_bytes: int | None = None,
    timeline: Timeline | None = None,
    keep: bool = False,
    timeout: float | None = None,
) -> AllocatedKVCaches:
    """Have the daemon allocate the KV tensors of a layout, and map them in this process.

    Returns (region, tensors, kept): the engine's region of the host pool; int8 tensors of
    (num_blocks, page_size_bytes) in the layout's order; whether they were kept for an engine with
    this name and layout, with their bytes. After a call that timed out, the next one returns False.
    keep: have the daemon keep the tensors after this engine disconnects, until an engine with its
        name registers again, its region is given to another engine, or release_kv_caches is called.
        Until then they occupy device memory.
    The tensors outlive the daemon; reconnecting registers them with the next one.
    Raises as register_kv_caches, and ends the session as that does, also if the tensors cannot be
    mapped here.
    """
    from kvferry.client.tensors.canonical import CanonicalKVCaches
    from kvferry.client.tensors.sharing import check_device_visible, map_tensors

    session, call = self._session, self._begin_call(timeout)
    _check_new_registration(session, host_bytes, timeline)
    check_fields(AllocateKVCaches, layout=layout, host_bytes=host_bytes, keep=keep)
    await call.connected()
    assert session.wire.welcome is not None
    device = session.wire.welcome.device
    check_device_visible(device)  # before the daemon allocates
    if timeline is not None:
        timeline.check_device(device.kind)
    with _ends_session(call, timeline, unless=(Refused, Failed)):
        handle = await share_timeline(call, timeline)
        request = AllocateKVCaches(session.wire.next_request_id(), layout, host_bytes, handle, keep)
        reply: Allocated = await _ask_registration(call, request)
    kept = reply.kept and not session.unwritten_left
    with _ends_session(call, timeline, kept=kept):
        try:
            descriptors = await _receive_descriptors(call, reply)
            tensors = map_tensors(layout, reply.allocations, reply.locations, descriptors, device)
        except Exception:
            if keep and not reply.kept:  # those of an earlier engine stay
                with suppress(Exception):
                    number = session.wire.next_request_id()
                    await call.ask(ReleaseKVCaches(number, session.wire.engine))
            raise
        caches = CanonicalKVCaches(layout, tuple(tensors))  # registered with the next daemon
        session.kv_caches_registered(RegistrationState(caches, host_bytes, timeline), reply.region)
    return AllocatedKVCaches(reply.region, tensors, kept)


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


def _check_new_registration(
    session: ClientSession, host_bytes: int | None, timeline: Timeline | None
) -> None:
    """Raise Refused (BAD_LAYOUT, BAD_MESSAGE, ALREADY_REGISTERED) if this client cannot register
    KV caches."""
    session.opened.check_region(host_bytes)
    if timeline is not None and not isinstance(timeline, Timeline):
        message = "timeline must be a Timeline or None; create one with Timeline.create"
        raise Refused(Code.BAD_MESSAGE, message, timeline)
    if session.restore.registration is not None:
        message = (
            "this client has already registered KV caches; register all of an engine in one call, "
            "and those of another engine with another client"
        )
        raise Refused(Code.ALREADY_REGISTERED, message, session.wire.engine)


@contextmanager
def _ends_session(
    call: Call,
    timeline: Timeline | None,
    unless: tuple[type[Exception], ...] = (),
    *,
    kept: bool = False,
) -> Iterator[None]:
    """A registration belongs to its session: if it fails in this context, the session ends.

    unless: errors with which the daemon replies, so that it has registered nothing. kept: whether
        the tensors are those of an earlier engine.
    """
    try:
        yield
    except unless:
        raise
    except BaseException:
        call.link.end_session(lambda: call.session.registration_failed(timeline, kept=kept))
        raise


async def _ask_registration(call: Call, request: RegisterKVCaches | AllocateKVCaches) -> Any:
    """The reply to a registration. It is requested again while the daemon may not have noticed the
    end of this client's last session, which still has the engine's name then."""
    while True:
        try:
            return await call.ask(request)
        except Refused as refused:
            if refused.code != Code.ALREADY_REGISTERED or not call.session.registration_left:
                raise
            try:
                await call.sleep(RETRY_INTERVAL)
            except Gone:
                raise refused from None
        request = msgspec.structs.replace(request, request_id=call.session.wire.next_request_id())


async def _receive_descriptors(call: Call, allocated: Allocated) -> list[int]:
    descriptors: list[int] = []
    try:
        for allocation in allocated.allocations:
            if isinstance(allocation, FdAllocation):
                descriptors.append(await call.receive_fd(allocation.handle))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors
