"""The verbs that wait, each written once for both clients.

A verb is a generator: it yields what has to be done (ask the daemon, pass descriptors) and is sent
the outcome; its return value is the verb's. The blocking client performs the steps by polling, the
asyncio client by awaiting, both under one deadline for the whole verb. `join` is also performed
behind the caller's back, a bit at a time, when a daemon comes back (comeback.py).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvferry.client.answers import Claim
from kvferry.client.bounds import check_fields
from kvferry.client.conversation import Conversation
from kvferry.client.endpoint import unanswered
from kvferry.client.namespace import Namespace
from kvferry.client.standing import Registration
from kvferry.client.steps import Ask, Fetch, Leave, Tell, Until, Verb
from kvferry.client.timeline import Timeline
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


def join(talk: Conversation) -> Verb[None]:
    """Be greeted, and have all again that was had of the daemon before.

    Raises what the daemon says against it, or Gone (TIMEOUT).
    """
    try:
        yield Tell(talk.hello(), talk.greeted)
    except Gone as error:
        if error.code == Code.TIMEOUT:
            raise unanswered(Path(error.value)) from None
        raise
    standing = talk.standing
    if standing.opening is not None:
        again = msgspec.structs.replace(standing.opening, request_id=talk.next_request_id())
        talk.enter(again, (yield Ask(again)))
    if standing.registration is not None:
        yield from _register(talk, standing.registration)
    if standing.opening is not None:
        yield from _catch_up(talk, talk.namespace)
    talk.joined()


def present(talk: Conversation) -> Verb[None]:
    """Wait for a daemon that is away. Raises Gone, with why it is, where it is not back in time."""
    try:
        yield Until(talk.present)
    except Gone as error:
        if talk.gone is None or error is talk.gone:
            raise
        raise talk.gone.with_traceback(None) from talk.gone.__cause__


def register(
    talk: Conversation,
    kv_caches: Any,
    host_bytes: int | None,
    timeline: Timeline | None,
    canonical: dict[str, Any],
) -> Verb[HostRegion]:
    from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize

    talk.check_region(host_bytes)
    _check_first(talk)
    if not isinstance(kv_caches, CanonicalKVCaches):
        kv_caches = canonicalize(kv_caches, **canonical)
    if timeline is not None:
        timeline.check_follows(kv_caches.tensors[0].device.type)
    check_fields(RegisterKVCaches, layout=kv_caches.layout, host_bytes=host_bytes)
    yield from present(talk)
    return (yield from _register(talk, Registration(kv_caches, host_bytes, timeline)))


def allocate(
    talk: Conversation,
    layout: KVLayout,
    host_bytes: int | None,
    timeline: Timeline | None,
    keep: bool = False,
) -> Verb[AllocatedKVCaches]:
    from kvferry.client.tensors.canonical import CanonicalKVCaches
    from kvferry.client.tensors.sharing import attach, check_reachable

    talk.check_region(host_bytes)
    _check_first(talk)
    check_fields(AllocateKVCaches, layout=layout, host_bytes=host_bytes, keep=keep)
    yield from present(talk)
    assert talk.welcome is not None
    device = talk.welcome.device
    check_reachable(device)  # before there is anything
    if timeline is not None:
        timeline.check_follows(device.kind)
    what = (layout, host_bytes, timeline, keep, talk.standing.opening)
    claim = yield from _left(talk, what)
    if claim is None:
        clock = yield from _leave_timeline(timeline)
        request = AllocateKVCaches(talk.next_request_id(), layout, host_bytes, clock, keep)
        claim = Claim(request, what, timeline)
    with talk.answers.claiming(claim):
        reply = yield from _answer(claim)
        claim.what = ()  # each descriptor is given once
        try:
            descriptors = yield from _fetch(reply)
            tensors = attach(layout, reply.allocations, reply.locations, descriptors, device)
        except Gone:  # nobody waits for them, or the daemon went
            raise
        except Exception:
            yield from _give_back(talk, reply, keep)
            raise
        ours = CanonicalKVCaches(layout, tuple(tensors))  # to the next daemon they are our own
        talk.registered(Registration(ours, host_bytes, timeline), reply.region)
    return AllocatedKVCaches(reply.region, tensors, reply.kept)


def release(talk: Conversation, engine: str) -> Verb[int]:
    check_fields(ReleaseKVCaches, engine=engine)
    yield from present(talk)
    reply = yield Ask(ReleaseKVCaches(talk.next_request_id(), engine))
    nbytes: int = reply.nbytes
    return nbytes


def open_namespace(
    talk: Conversation,
    fingerprint: Fingerprint,
    cpu_bytes_to_use: int | None,
    eviction_policy: str,
    store_threshold: int,
    mirror: bool,
) -> Verb[Opened]:
    check_fields(
        OpenNamespace,
        fingerprint=fingerprint,
        quota_bytes=cpu_bytes_to_use,
        policy=eviction_policy,
        store_threshold=store_threshold,
    )
    opened = talk.entered(fingerprint)
    yield from present(talk)
    if opened is None:
        opening = OpenNamespace(
            talk.next_request_id(), fingerprint, cpu_bytes_to_use, eviction_policy, store_threshold
        )
        opened = yield Ask(opening)
        talk.enter(opening, opened)
    if mirror and not talk.namespace.follow().whole:
        yield Tell(Subscribe(), lambda: talk.mirrored() or None)
    return opened


def reset(talk: Conversation) -> Verb[None]:
    request = talk.reset()
    try:
        yield from present(talk)
        if talk.namespace.resetting(request.request_id):  # else it was done on coming back
            yield Ask(request)
    except Refused:
        talk.namespace.refused(request.request_id)
        raise


def wait(talk: Conversation, job_ids: Collection[int]) -> Verb[None]:
    request = talk.wait(job_ids)
    if talk.gone is not None:  # they have ended, as lost
        return
    try:
        yield Ask(request)
    except Gone as error:
        if error.code != Code.DAEMON_GONE:
            raise Gone(error.code, error.message, talk.under_way(job_ids)) from error


def status(talk: Conversation) -> Verb[DaemonStatus]:
    yield from present(talk)
    reply = yield Ask(StatusRequest(talk.next_request_id()))
    report: DaemonStatus = reply.status
    return report


def namespaces(talk: Conversation) -> Verb[tuple[NamespaceStatus, ...]]:
    yield from present(talk)
    reply = yield Ask(NamespacesRequest(talk.next_request_id()))
    report: tuple[NamespaceStatus, ...] = reply.namespaces
    return report


def goodbye(talk: Conversation) -> Verb[None]:
    if talk.gone is None:
        yield Tell(Goodbye("client closes"), lambda: talk.gone)


def _check_first(talk: Conversation) -> None:
    """Raise Refused (ALREADY_REGISTERED) where this client has registered KV caches before."""
    if talk.standing.registration is not None:
        message = (
            "this client has registered KV caches: register all of an engine at once, and another "
            "engine's by a client of its name"
        )
        raise Refused(Code.ALREADY_REGISTERED, message, talk.engine)


def _register(talk: Conversation, wanted: Registration) -> Verb[HostRegion]:
    from kvferry.client.tensors.sharing import export

    caches = wanted.kv_caches
    places = tuple(tensor.data_ptr() for tensor in caches.tensors)
    what = (caches.layout, places, wanted.host_bytes, wanted.timeline, talk.standing.opening)
    claim = yield from _left(talk, what)
    if claim is None:
        shared = export(caches)
        tickets = yield Leave(shared.descriptors)
        clock = yield from _leave_timeline(wanted.timeline)
        message = RegisterKVCaches(
            talk.next_request_id(),
            caches.layout,
            shared.with_tickets(tickets),
            shared.locations,
            wanted.host_bytes,
            clock,
        )
        claim = Claim(message, what, wanted)
    with talk.answers.claiming(claim):
        reply = yield from _answer(claim)
        region: HostRegion = reply.region
        talk.registered(wanted, region)
    return region


def _answer(claim: Claim) -> Verb[Any]:
    """What the daemon gave, asked for it or long since."""
    return claim.answered() or (yield Tell(claim.request, claim.answered))


def _left(talk: Conversation, what: tuple[object, ...]) -> Verb[Claim | None]:
    """The claim to the same that was left, and is to be taken up; any other is given back."""
    while (claim := talk.answers.left()) is not None:
        yield Until(claim.settled)
        if claim.left and isinstance(claim.answer, Registered | Allocated):
            if claim.what == what:
                return claim
            yield from _anew(talk)
    return None


def _fetch(allocated: Allocated) -> Verb[list[int]]:
    descriptors: list[int] = []
    try:
        for allocation in allocated.allocations:
            if isinstance(allocation, FdAllocation):
                descriptors.append((yield Fetch(allocation.ticket)))
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors


def _give_back(talk: Conversation, allocated: Allocated, keep: bool) -> Verb[None]:
    """Have the daemon free what cannot be had here. Raises nothing: whoever asks it for KV caches
    next has done what could not be now."""
    with suppress(Exception):
        if keep and not allocated.kept:  # what an earlier engine left in them stays
            yield Ask(ReleaseKVCaches(talk.next_request_id(), talk.engine))
        yield from _anew(talk)


def _anew(talk: Conversation) -> Verb[None]:
    """End this session, in which KV caches are registered once, and begin another."""
    before, lasting, talk.lasting = talk.incarnation, talk.lasting, True
    try:
        bye = Goodbye("client registers others")
        yield Tell(bye, lambda: talk.gone or talk.incarnation > before or None)
        yield from present(talk)
    finally:
        talk.lasting = lasting


def _catch_up(talk: Conversation, namespace: Namespace) -> Verb[None]:
    """Follow the namespace again; do the resets that were not done; keep what was kept."""
    if namespace.followed:
        yield Tell(Subscribe(), lambda: namespace.mirror.whole or None)
    while undone := namespace.undone():
        yield Ask(talk.reset())
        for request_id in undone:
            namespace.refused(request_id)
    for keys in namespace.pins():  # last, and without a pause: more may be pinned in any
        yield Tell(Pin(keys), lambda: True)


def _leave_timeline(timeline: Timeline | None) -> Verb[int | None]:
    if timeline is None:
        return None
    if timeline.descriptor < 0:
        raise Refused(Code.NO_TIMELINE, "this timeline was closed: register with another one")
    (ticket,) = yield Leave((timeline.descriptor,))
    return int(ticket)
