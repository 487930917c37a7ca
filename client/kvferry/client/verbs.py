"""The verbs that wait, each written once for both clients.

A verb is a generator: it yields what has to be done (ask the daemon, pass descriptors) and is sent
the outcome; its return value is the verb's. The blocking client performs the steps by polling, the
asyncio client by awaiting, both under one deadline for the whole verb.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvferry.client.conversation import Conversation, Request
from kvferry.client.timeline import Timeline
from kvferry.proto.errors import Code, Gone
from kvferry.proto.messages import (
    AllocateKVCaches,
    FdAllocation,
    Goodbye,
    HostRegion,
    RegisterKVCaches,
    StatusRequest,
)
from kvferry.proto.specs import KVLayout
from kvferry.proto.status import DaemonStatus

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
class Part:
    """Send a goodbye; the outcome is None, once it was answered or the daemon is gone."""

    message: Goodbye


Step: TypeAlias = Ask | Leave | Fetch | Part
R = TypeVar("R")
Verb: TypeAlias = Generator[Step, Any, R]


def register(
    talk: Conversation,
    kv_caches: Any,
    host_bytes: int | None,
    timeline: Timeline | None,
    canonical: dict[str, Any],
) -> Verb[HostRegion]:
    from kvferry.client.tensors.canonical import CanonicalKVCaches, canonicalize
    from kvferry.client.tensors.sharing import export

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

    clock = yield from _leave_timeline(timeline)
    reply = yield Ask(AllocateKVCaches(talk.next_request_id(), layout, host_bytes, clock))
    descriptors: list[int] = []
    for allocation in reply.allocations:
        if isinstance(allocation, FdAllocation):
            descriptors.append((yield Fetch(allocation.ticket)))
    return reply.region, attach(layout, reply.allocations, reply.locations, descriptors)


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


def goodbye(talk: Conversation) -> Verb[None]:
    if talk.ended is None:
        yield Part(Goodbye("client closes"))


def _leave_timeline(timeline: Timeline | None) -> Verb[int | None]:
    if timeline is None:
        return None
    (ticket,) = yield Leave((timeline.descriptor,))
    return int(ticket)
