"""Registering KV caches: operations that wait, as those of operations.py.

A registration belongs to its session, which ends if the registration fails on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvferry.client.arrays import device_kind
from kvferry.client.call import Call
from kvferry.client.nonblocking import KVCaches, NonBlockingClient
from kvferry.client.restoring import registration_request, share_timeline
from kvferry.client.session import ClientSession
from kvferry.client.session_state import RegistrationState
from kvferry.client.timeline import Timeline
from kvferry.client.validation import check_fields
from kvferry.proto.errors import Code, Failed, Gone, Refused
from kvferry.proto.memory import FdAllocation, HostRegion
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    Registered,
    RegisterKVCaches,
    ReleaseKVCaches,
)
from kvferry.proto.specs import KVLayout

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
