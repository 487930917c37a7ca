"""The operations that wait, each written once for all clients.

An operation is a generator: it yields effects (send a request, pass descriptors) and is sent their
outcomes; its return value is the operation's. Each runs under one deadline, in the client's thread
(effects.interpret). `connect` also runs behind the caller's back, a bit at each poll, when the
connection is lost (reconnect.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvferry.client.effects import Operation, PassFds, ReceiveFd, Request, Send, WaitFor
from kvferry.client.endpoint import unanswered
from kvferry.client.namespace import Namespace
from kvferry.client.pending_requests import ResumableRequest
from kvferry.client.session import ClientSession
from kvferry.client.session_state import Registration
from kvferry.client.timeline import Timeline
from kvferry.client.validation import check_fields
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.memory import FdAllocation, HostRegion
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    Goodbye,
    NamespacesRequest,
    Opened,
    OpenNamespace,
    Pin,
    Registered,
    RegisterKVCaches,
    ReleaseKVCaches,
    StatusRequest,
    Subscribe,
)
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus, Fingerprint, NamespaceStatus

if TYPE_CHECKING:
    import torch


class AllocatedKVCaches(NamedTuple):
    """KV tensors that the daemon allocated: int8, (num_blocks, page_size_bytes), in the layout's
    order. kept: they are those that were kept for the engine, with their bytes."""

    region: HostRegion
    tensors: list[torch.Tensor]
    kept: bool


def connect(session: ClientSession) -> Operation[None]:
    """Send Hello, and restore everything in the SessionState.

    Raises what the daemon refuses, or Gone (TIMEOUT).
    """
    try:
        yield Send(session.hello(), session.greeted)
    except Gone as error:
        if error.code == Code.TIMEOUT:
            raise unanswered(Path(error.value)) from None
        raise
    state = session.restore
    if state.opening is not None:
        again = msgspec.structs.replace(state.opening, request_id=session.next_request_id())
        session.namespace_opened(again, (yield Request(again)))
    if state.registration is not None:
        yield from _register(session, state.registration)
    if state.opening is not None:
        yield from _catch_up(session, session.namespace)
    session.restored()


def present(session: ClientSession) -> Operation[None]:
    """Wait for a daemon that is away. Raises Gone, with why it is, where it is not back in time."""
    try:
        yield WaitFor(session.present)
    except Gone as error:
        if session.gone is None or error is session.gone:
            raise
        raise session.gone.with_traceback(None) from session.gone.__cause__


def register(
    session: ClientSession,
    kv_caches: Any,
    host_bytes: int | None,
    timeline: Timeline | None,
    canonical: dict[str, Any],
) -> Operation[HostRegion]:
    from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize

    session.check_region(host_bytes)
    _check_first(session)
    if not isinstance(kv_caches, CanonicalKVCaches):
        kv_caches = canonicalize(kv_caches, **canonical)
    if timeline is not None:
        timeline.check_follows(kv_caches.tensors[0].device.type)
    check_fields(RegisterKVCaches, layout=kv_caches.layout, host_bytes=host_bytes)
    yield from present(session)
    return (yield from _register(session, Registration(kv_caches, host_bytes, timeline)))


def allocate(
    session: ClientSession,
    layout: KVLayout,
    host_bytes: int | None,
    timeline: Timeline | None,
    keep: bool = False,
) -> Operation[AllocatedKVCaches]:
    from kvferry.client.tensors.canonical import CanonicalKVCaches
    from kvferry.client.tensors.sharing import attach, check_reachable

    session.check_region(host_bytes)
    _check_first(session)
    check_fields(AllocateKVCaches, layout=layout, host_bytes=host_bytes, keep=keep)
    yield from present(session)
    assert session.welcome is not None
    device = session.welcome.device
    check_reachable(device)  # before there is anything
    if timeline is not None:
        timeline.check_follows(device.kind)
    what = (layout, host_bytes, timeline, keep, session.restore.opening)
    resumable = yield from _resumable(session, what)
    if resumable is None:
        clock = yield from _send_timeline(timeline)
        request = AllocateKVCaches(session.next_request_id(), layout, host_bytes, clock, keep)
        resumable = ResumableRequest(request, what, timeline)
    with session.pending.resuming(resumable):
        reply = yield from _answer(resumable)
        resumable.what = ()  # each descriptor is given once
        try:
            descriptors = yield from _fetch(reply)
            tensors = attach(layout, reply.allocations, reply.locations, descriptors, device)
        except Gone:  # nobody waits for them, or the daemon went
            raise
        except Exception:
            yield from _give_back(session, reply, keep)
            raise
        ours = CanonicalKVCaches(layout, tuple(tensors))  # to the next daemon they are our own
        session.registered(Registration(ours, host_bytes, timeline), reply.region)
    return AllocatedKVCaches(reply.region, tensors, reply.kept)


def release(session: ClientSession, engine: str) -> Operation[int]:
    check_fields(ReleaseKVCaches, engine=engine)
    yield from present(session)
    reply = yield Request(ReleaseKVCaches(session.next_request_id(), engine))
    nbytes: int = reply.nbytes
    return nbytes


def open_namespace(
    session: ClientSession,
    fingerprint: Fingerprint,
    cpu_bytes_to_use: int | None,
    eviction_policy: str,
    store_threshold: int,
    mirror: bool,
) -> Operation[Opened]:
    check_fields(
        OpenNamespace,
        fingerprint=fingerprint,
        quota_bytes=cpu_bytes_to_use,
        policy=eviction_policy,
        store_threshold=store_threshold,
    )
    opened = session.opened_before(fingerprint)
    yield from present(session)
    if opened is not None:
        opened = session.namespace.opened  # it may have been opened again meanwhile
    else:
        opening = OpenNamespace(
            session.next_request_id(),
            fingerprint,
            cpu_bytes_to_use,
            eviction_policy,
            store_threshold,
        )
        opened = yield Request(opening)
        session.namespace_opened(opening, opened)
    if mirror and not session.namespace.follow().whole:
        yield Send(Subscribe(), lambda: session.mirrored() or None)
    return opened


def reset(session: ClientSession) -> Operation[None]:
    request = session.reset()
    try:
        yield from present(session)
        if session.namespace.resetting(request.request_id):  # else it was done on reconnecting
            yield Request(request)
    except Refused:
        session.namespace.refused(request.request_id)
        raise


def wait(session: ClientSession, job_ids: Collection[int]) -> Operation[None]:
    request = session.wait(job_ids)
    if session.gone is not None:  # they have ended, as lost
        return
    try:
        yield Request(request)
    except Gone as error:
        if error.code != Code.DAEMON_GONE:
            raise Gone(error.code, error.message, session.under_way(job_ids)) from error


def status(session: ClientSession) -> Operation[DaemonStatus]:
    yield from present(session)
    reply = yield Request(StatusRequest(session.next_request_id()))
    report: DaemonStatus = reply.status
    return report


def namespaces(session: ClientSession) -> Operation[tuple[NamespaceStatus, ...]]:
    yield from present(session)
    reply = yield Request(NamespacesRequest(session.next_request_id()))
    report: tuple[NamespaceStatus, ...] = reply.namespaces
    return report


def goodbye(session: ClientSession) -> Operation[None]:
    if session.gone is None:
        yield Send(Goodbye("client closes"), lambda: session.gone)


def _check_first(session: ClientSession) -> None:
    """Raise Refused (ALREADY_REGISTERED) where this client has registered KV caches before."""
    if session.restore.registration is not None:
        message = (
            "this client has registered KV caches: register all of an engine at once, and another "
            "engine's by a client of its name"
        )
        raise Refused(Code.ALREADY_REGISTERED, message, session.engine)


def _register(session: ClientSession, wanted: Registration) -> Operation[HostRegion]:
    from kvferry.client.tensors.sharing import export

    caches = wanted.kv_caches
    places = tuple(tensor.data_ptr() for tensor in caches.tensors)
    what = (caches.layout, places, wanted.host_bytes, wanted.timeline, session.restore.opening)
    resumable = yield from _resumable(session, what)
    if resumable is None:
        shared = export(caches)
        handles = yield PassFds(shared.descriptors)
        clock = yield from _send_timeline(wanted.timeline)
        message = RegisterKVCaches(
            session.next_request_id(),
            caches.layout,
            shared.with_tickets(handles),
            shared.locations,
            wanted.host_bytes,
            clock,
        )
        resumable = ResumableRequest(message, what, wanted)
    with session.pending.resuming(resumable):
        reply = yield from _answer(resumable)
        region: HostRegion = reply.region
        session.registered(wanted, region)
    return region


def _answer(resumable: ResumableRequest) -> Operation[Any]:
    """The reply, requested now or by the caller before."""
    return resumable.received() or (yield Send(resumable.message, resumable.received))


def _resumable(
    session: ClientSession, what: tuple[object, ...]
) -> Operation[ResumableRequest | None]:
    """The request with the same arguments that was left; any other is undone."""
    while (resumable := session.pending.oldest_left()) is not None:
        yield WaitFor(resumable.settled)
        if resumable.left and isinstance(resumable.reply, Registered | Allocated):
            if resumable.what == what:
                return resumable
            yield from _new_session(session)
    return None


def _fetch(allocated: Allocated) -> Operation[list[int]]:
    descriptors: list[int] = []
    try:
        for allocation in allocated.allocations:
            if isinstance(allocation, FdAllocation):
                descriptors.append((yield ReceiveFd(allocation.handle)))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors


def _give_back(session: ClientSession, allocated: Allocated, keep: bool) -> Operation[None]:
    """Have the daemon free what cannot be had here. Raises nothing: whoever asks it for KV caches
    next has done what could not be now."""
    with suppress(Exception):
        if keep and not allocated.kept:  # what an earlier engine left in them stays
            yield Request(ReleaseKVCaches(session.next_request_id(), session.engine))
        yield from _new_session(session)


def _new_session(session: ClientSession) -> Operation[None]:
    """End this session, in which KV caches are registered once, and begin another."""
    before, reconnects, session.reconnects = session.incarnation, session.reconnects, True
    try:
        bye = Goodbye("client registers others")
        yield Send(bye, lambda: session.gone or session.incarnation > before or None)
        yield from present(session)
    finally:
        session.reconnects = reconnects


def _catch_up(session: ClientSession, namespace: Namespace) -> Operation[None]:
    """Follow the namespace again; do the resets that were not done; keep what was kept."""
    if namespace.followed:
        yield Send(Subscribe(), lambda: namespace.mirror.whole or None)
    while undone := namespace.undone():
        yield Request(session.reset())
        for request_id in undone:
            namespace.refused(request_id)
    for keys in namespace.pins():  # last, and without a pause: more may be pinned in any
        yield Send(Pin(keys), lambda: True)


def _send_timeline(timeline: Timeline | None) -> Operation[int | None]:
    if timeline is None:
        return None
    if timeline.revoked:
        timeline.renew()
    if timeline.descriptor < 0:
        raise Refused(Code.NO_TIMELINE, "this timeline was closed: register with another one")
    (handle,) = yield PassFds((timeline.descriptor,))
    return int(handle)
