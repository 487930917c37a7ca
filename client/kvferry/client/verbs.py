"""The verbs that wait, each written once for both clients.

A verb is a generator: it yields what has to be done (ask the daemon, pass descriptors) and is sent
the outcome; its return value is the verb's. The blocking client performs the steps by polling, the
asyncio client by awaiting, both under one deadline for the whole verb.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvferry.client.conversation import Conversation, Request
from kvferry.client.timeline import Timeline
from kvferry.proto.bulletin import Bulletin, new_page
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused
from kvferry.proto.messages import (
    AllocateKVCaches,
    FdAllocation,
    Follow,
    Goodbye,
    HostRegion,
    NamespacesRequest,
    Opened,
    OpenNamespace,
    PostResults,
    RegisterKVCaches,
    StatusRequest,
)
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus, Fingerprint, NamespaceStatus

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request; the outcome is its reply, or its error is thrown in."""

    request: Request


@dataclass(frozen=True, slots=True)
class Leave:
    """Deposit descriptors; the outcome is a tuple of tickets."""

    descriptors: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Collect a descriptor; the outcome is the descriptor."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message that is no request; the outcome is what `until` answers, if not None."""

    message: Follow | Goodbye | PostResults
    until: Callable[[], object]


Step: TypeAlias = Ask | Leave | Fetch | Tell
R = TypeVar("R")
Verb: TypeAlias = Generator[Step, Any, R]


def post_results(talk: Conversation) -> Verb[None]:
    """Have results posted in a shared page, too; where that cannot be, the socket tells them."""
    page = new_page()
    try:
        (ticket,) = yield Leave((page,))
        yield Tell(PostResults(ticket), lambda: True)
        talk.jobs.bulletin = Bulletin(page)
    except KVFerryError:
        pass
    finally:
        os.close(page)


def register(
    talk: Conversation,
    kv_caches: Any,
    host_bytes: int | None,
    timeline: Timeline | None,
    canonical: dict[str, Any],
) -> Verb[HostRegion]:
    from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize
    from kvferry.client.tensors.sharing import export

    talk.check_region(host_bytes)
    if not isinstance(kv_caches, CanonicalKVCaches):
        kv_caches = canonicalize(kv_caches, **canonical)
    shared = export(kv_caches)
    tickets = yield Leave(shared.descriptors)
    clock = yield from _leave_timeline(timeline)
    message = RegisterKVCaches(
        talk.next_request_id(),
        kv_caches.layout,
        shared.with_tickets(tickets),
        shared.locations,
        host_bytes,
        clock,
    )
    reply = yield Ask(message)
    region: HostRegion = reply.region
    return region


def allocate(
    talk: Conversation, layout: KVLayout, host_bytes: int | None, timeline: Timeline | None
) -> Verb[tuple[HostRegion, list[torch.Tensor]]]:
    from kvferry.client.tensors.sharing import attach

    talk.check_region(host_bytes)
    clock = yield from _leave_timeline(timeline)
    reply = yield Ask(AllocateKVCaches(talk.next_request_id(), layout, host_bytes, clock))
    descriptors: list[int] = []
    for allocation in reply.allocations:
        if isinstance(allocation, FdAllocation):
            descriptors.append((yield Fetch(allocation.ticket)))
    return reply.region, attach(layout, reply.allocations, reply.locations, descriptors)


def open_namespace(
    talk: Conversation,
    fingerprint: Fingerprint,
    cpu_bytes_to_use: int | None,
    eviction_policy: str,
    store_threshold: int,
    mirror: bool,
) -> Verb[Opened]:
    opened = talk.entered(fingerprint)
    if opened is None:
        number = talk.next_request_id()
        opened = yield Ask(
            OpenNamespace(number, fingerprint, cpu_bytes_to_use, eviction_policy, store_threshold)
        )
        talk.enter(fingerprint, opened)
    if mirror and not talk.namespace.follow().whole:
        yield Tell(Follow(), lambda: talk.mirrored() or None)
    return opened


def reset(talk: Conversation) -> Verb[None]:
    request = talk.reset()
    try:
        yield Ask(request)
    except Refused:
        talk.namespace.refused(request.request_id)
        raise


def wait(talk: Conversation, job_ids: Collection[int]) -> Verb[None]:
    try:
        yield Ask(talk.wait(job_ids))
    except Gone as error:
        if error.code != Code.DAEMON_GONE:  # then they have ended, as lost
            raise Gone(error.code, error.message, talk.under_way(job_ids)) from error


def status(talk: Conversation) -> Verb[DaemonStatus]:
    reply = yield Ask(StatusRequest(talk.next_request_id()))
    report: DaemonStatus = reply.status
    return report


def namespaces(talk: Conversation) -> Verb[tuple[NamespaceStatus, ...]]:
    reply = yield Ask(NamespacesRequest(talk.next_request_id()))
    report: tuple[NamespaceStatus, ...] = reply.namespaces
    return report


def goodbye(talk: Conversation) -> Verb[None]:
    if talk.ended is None:
        yield Tell(Goodbye("client closes"), lambda: talk.ended)


def _leave_timeline(timeline: Timeline | None) -> Verb[int | None]:
    if timeline is None:
        return None
    (ticket,) = yield Leave((timeline.descriptor,))
    return int(ticket)
