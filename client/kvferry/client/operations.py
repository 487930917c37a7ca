"""The operations that wait, each written once for all clients.

An operation is a generator: it yields effects (send a request, pass descriptors) and is sent their
outcomes; its return value is the result. Each runs under one deadline, in the client's thread
(effects.interpret). When the connection is lost, `connect` runs in parts, one at each poll
(reconnect.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvferry.client.arrays import address_of, device_kind
from kvferry.client.effects import Operation, PassFds, ReceiveFd, SendOneWay, SendRequest, WaitFor
from kvferry.client.endpoint import no_reply_error
from kvferry.client.namespace import ClientNamespace
from kvferry.client.pending_requests import ResumableRequest
from kvferry.client.session import ClientSession
from kvferry.client.session_state import RegistrationState
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
    order; numpy arrays without torch. kept: whether they were kept for the engine, with their
    bytes."""

    region: HostRegion
    tensors: list[torch.Tensor]
    kept: bool


def connect(session: ClientSession) -> Operation[None]:
    """Send Hello, and restore everything in the SessionState.

    Raises what the daemon refuses, or Gone (TIMEOUT).
    """
    try:
        yield SendOneWay(session.hello(), session.read_welcome)
    except Gone as error:
        if error.code == Code.TIMEOUT:
            raise no_reply_error(Path(error.value)) from None
        raise
    state = session.restore
    if state.opening is not None:
        again = msgspec.structs.replace(state.opening, request_id=session.next_request_id())
        session.namespace_opened(again, (yield SendRequest(again)))
    if state.registration is not None:
        yield from _register(session, state.registration)
    if state.opening is not None:
        yield from _restore_namespace(session, session.namespace)
    session.mark_connected()


def wait_connected(session: ClientSession) -> Operation[None]:
    """Wait until the session is restored. Raises Gone, with the reason, if that takes too long."""
    try:
        yield WaitFor(session.check_connected)
    except Gone as error:
        if session.gone is None or error is session.gone:
            raise
        raise session.gone.with_traceback(None) from session.gone.__cause__


def register_kv_caches(
    session: ClientSession,
    kv_caches: Any,
    host_bytes: int | None,
    timeline: Timeline | None,
    canonical: dict[str, Any],
) -> Operation[HostRegion]:
    from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize

    session.check_region(host_bytes)
    _check_not_registered(session)
    if not isinstance(kv_caches, CanonicalKVCaches):
        kv_caches = canonicalize(kv_caches, **canonical)
    if timeline is not None:
        timeline.check_device(device_kind(kv_caches.tensors[0]))
    check_fields(RegisterKVCaches, layout=kv_caches.layout, host_bytes=host_bytes)
    yield from wait_connected(session)
    return (yield from _register(session, RegistrationState(kv_caches, host_bytes, timeline)))


def allocate_kv_caches(
    session: ClientSession,
    layout: KVLayout,
    host_bytes: int | None,
    timeline: Timeline | None,
    keep: bool = False,
) -> Operation[AllocatedKVCaches]:
    from kvferry.client.tensors.canonical import CanonicalKVCaches
    from kvferry.client.tensors.sharing import check_device_visible, map_tensors

    session.check_region(host_bytes)
    _check_not_registered(session)
    check_fields(AllocateKVCaches, layout=layout, host_bytes=host_bytes, keep=keep)
    yield from wait_connected(session)
    assert session.welcome is not None
    device = session.welcome.device
    check_device_visible(device)  # before the daemon allocates
    if timeline is not None:
        timeline.check_device(device.kind)
    arguments = (layout, host_bytes, timeline, keep, session.restore.opening)
    resumable = yield from _find_resumable(session, arguments)
    if resumable is None:
        handle = yield from _send_timeline(timeline)
        request = AllocateKVCaches(session.next_request_id(), layout, host_bytes, handle, keep)
        resumable = ResumableRequest(request, arguments, timeline)
    with session.pending.resume(resumable):
        reply = yield from _wait_reply(resumable)
        resumable.arguments = ()  # each descriptor can be received once
        try:
            descriptors = yield from _receive_descriptors(reply)
            tensors = map_tensors(layout, reply.allocations, reply.locations, descriptors, device)
        except Gone:  # a timeout, or the daemon has disconnected
            raise
        except Exception:
            yield from _undo_allocation(session, reply, keep)
            raise
        caches = CanonicalKVCaches(layout, tuple(tensors))  # registered with the next daemon
        session.kv_caches_registered(RegistrationState(caches, host_bytes, timeline), reply.region)
    return AllocatedKVCaches(reply.region, tensors, reply.kept)


def release_kv_caches(session: ClientSession, engine: str) -> Operation[int]:
    check_fields(ReleaseKVCaches, engine=engine)
    yield from wait_connected(session)
    reply = yield SendRequest(ReleaseKVCaches(session.next_request_id(), engine))
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
    opened = session.opened_namespace(fingerprint)
    yield from wait_connected(session)
    if opened is not None:
        opened = session.namespace.opened  # it may have been reopened while waiting
    else:
        opening = OpenNamespace(
            session.next_request_id(),
            fingerprint,
            cpu_bytes_to_use,
            eviction_policy,
            store_threshold,
        )
        opened = yield SendRequest(opening)
        session.namespace_opened(opening, opened)
    if mirror and not session.namespace.ensure_mirror().complete:
        yield SendOneWay(Subscribe(), lambda: session.mirror_complete() or None)
    return opened


def reset_namespace(session: ClientSession) -> Operation[None]:
    request = session.reset()
    try:
        yield from wait_connected(session)
        if session.namespace.is_resetting(request.request_id):  # else reconnecting has done it
            yield SendRequest(request)
    except Refused:
        session.namespace.reset_ended(request.request_id)
        raise


def wait_jobs(session: ClientSession, job_ids: Collection[int]) -> Operation[None]:
    """The daemon is asked for other jobs only: it would keep a request beyond its timeout here."""
    request = session.wait(job_ids)
    left = session.in_flight(request.job_ids)
    others = tuple({*request.job_ids}.difference(left))
    if session.gone is not None:  # all jobs have ended, as LOST
        return

    def have_ended() -> bool | None:
        while left and left[-1] not in session.jobs:
            left.pop()
        return not left or None

    try:
        if left:
            yield WaitFor(have_ended)
        if others:
            yield SendRequest(msgspec.structs.replace(request, job_ids=others))
    except Gone as error:
        if error.code != Code.DAEMON_GONE:
            raise Gone(error.code, error.message, session.in_flight(job_ids)) from error


def fetch_status(session: ClientSession) -> Operation[DaemonStatus]:
    yield from wait_connected(session)
    reply = yield SendRequest(StatusRequest(session.next_request_id()))
    report: DaemonStatus = reply.status
    return report


def fetch_namespaces(session: ClientSession) -> Operation[tuple[NamespaceStatus, ...]]:
    yield from wait_connected(session)
    reply = yield SendRequest(NamespacesRequest(session.next_request_id()))
    report: tuple[NamespaceStatus, ...] = reply.namespaces
    return report


def disconnect(session: ClientSession) -> Operation[None]:
    if session.gone is None:
        yield SendOneWay(Goodbye("client closes"), lambda: session.gone)


def _check_not_registered(session: ClientSession) -> None:
    """Raise Refused (ALREADY_REGISTERED) if this client has registered KV caches."""
    if session.restore.registration is not None:
        message = (
            "this client has already registered KV caches; register all of an engine in one call, "
            "and those of another engine with another client"
        )
        raise Refused(Code.ALREADY_REGISTERED, message, session.engine)


def _register(session: ClientSession, registration: RegistrationState) -> Operation[HostRegion]:
    from kvferry.client.tensors.sharing import export_tensors

    caches, host_bytes = registration.kv_caches, registration.host_bytes
    addresses = tuple(address_of(tensor) for tensor in caches.tensors)
    timeline = registration.timeline
    arguments = (caches.layout, addresses, host_bytes, timeline, session.restore.opening)
    resumable = yield from _find_resumable(session, arguments)
    if resumable is None:
        shared = export_tensors(caches)
        handles = yield PassFds(shared.descriptors)
        timeline_handle = yield from _send_timeline(timeline)
        message = RegisterKVCaches(
            session.next_request_id(),
            caches.layout,
            shared.with_handles(handles),
            shared.locations,
            host_bytes,
            timeline_handle,
        )
        resumable = ResumableRequest(message, arguments, registration)
    with session.pending.resume(resumable):
        reply = yield from _wait_reply(resumable)
        region: HostRegion = reply.region
        session.kv_caches_registered(registration, region)
    return region


def _wait_reply(resumable: ResumableRequest) -> Operation[Any]:
    """The reply to this request, or to the one that an earlier call has sent."""
    return resumable.received() or (yield SendOneWay(resumable.message, resumable.received))


def _find_resumable(
    session: ClientSession, arguments: tuple[object, ...]
) -> Operation[ResumableRequest | None]:
    """The abandoned request with the same arguments, if any; others are undone."""
    while (resumable := session.pending.oldest_abandoned()) is not None:
        yield WaitFor(resumable.is_settled)
        if resumable.abandoned and isinstance(resumable.reply, Registered | Allocated):
            if resumable.arguments == arguments:
                return resumable
            yield from _restart_session(session)
    return None


def _receive_descriptors(allocated: Allocated) -> Operation[list[int]]:
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


def _undo_allocation(session: ClientSession, allocated: Allocated, keep: bool) -> Operation[None]:
    """Have the daemon free tensors that cannot be mapped here. Raises nothing: if it fails, the
    next registration undoes the allocation."""
    with suppress(Exception):
        if keep and not allocated.kept:  # those of an earlier engine stay
            yield SendRequest(ReleaseKVCaches(session.next_request_id(), session.engine))
        yield from _restart_session(session)


def _restart_session(session: ClientSession) -> Operation[None]:
    """Begin a new session, in which KV caches can be registered again."""
    incarnation, reconnects = session.incarnation, session.reconnects
    session.reconnects = True
    try:
        goodbye = Goodbye("client registers other KV caches")
        yield SendOneWay(goodbye, lambda: session.gone or session.incarnation > incarnation or None)
        yield from wait_connected(session)
    finally:
        session.reconnects = reconnects


def _restore_namespace(session: ClientSession, namespace: ClientNamespace) -> Operation[None]:
    """Subscribe again, do pending resets, and pin keys again."""
    if namespace.has_mirror:
        yield SendOneWay(Subscribe(), lambda: namespace.mirror.complete or None)
    while pending := namespace.pending_resets():
        yield SendRequest(session.reset())
        for request_id in pending:
            namespace.reset_ended(request_id)
    for (
        keys
    ) in namespace.pinned_batches():  # last, and without a pause, in which more keys may be pinned
        yield SendOneWay(Pin(keys), lambda: True)


def _send_timeline(timeline: Timeline | None) -> Operation[int | None]:
    if timeline is None:
        return None
    if timeline.revoked:
        timeline.renew()
    if timeline.descriptor < 0:
        raise Refused(Code.NO_TIMELINE, "the timeline is closed; register with another one")
    (handle,) = yield PassFds((timeline.descriptor,))
    return int(handle)
