"""Every message of the wire, both ways. The codec and its limits are in codec.py.

    client                                     daemon
      Hello                     ->               (first; nothing else is heard before it)
                                <-             Welcome | Error
      RegisterKVCaches          ->
                                <-             Registered | Error
      AllocateKVCaches          ->
                                <-             Allocated | Error
      ReleaseKVCaches           ->
                                <-             Released | Error
      Submit                    ->               (no reply of its own: the outcome is the reply)
      Cancel                    ->               (likewise)
                                <-             Finished, with one JobResult for each Submit,
                                               those that ended together in one message
      Wait                      ->
                                <-             Waited, behind the Finished of all those jobs
      OpenNamespace             ->
                                <-             Opened | Error
      Pin, Unpin, Touch         ->               (no reply)
      Reset                     ->
                                <-             Done | Error
      Subscribe                 ->
                                <-             Snapshot, in parts; then KeyEvents, each numbered
      StatusRequest             ->
                                <-             StatusReport
      NamespacesRequest         ->
                                <-             NamespacesReport
      Goodbye                   ->
                                <-             Goodbye, also unasked when the daemon stops

Requests carry a request_id that their reply repeats. File descriptors (memory shared on a machine
without a GPU, timeline pages) cannot travel over ZeroMQ: they go through a socket beside it, see
fd_passing.py.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvferry.proto.errors import ErrorInfo
from kvferry.proto.keys import EventKind
from kvferry.proto.memory import Allocations, HostRegion, Locations
from kvferry.proto.specs import (
    Count,
    Direction,
    Id,
    Keys,
    KVLayout,
    LoadStoreSpec,
    Name,
    Part,
    Positive,
)
from kvferry.proto.status import DaemonStatus, DeviceInfo, Fingerprint, Limits, NamespaceStatus

# The protocol version that this source speaks. Hello and Welcome never change their shape.
PROTOCOL = 1

Token: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
MAX_JOB_IDS = 65536
JobIds: TypeAlias = Annotated[tuple[Id, ...], Meta(max_length=MAX_JOB_IDS)]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=str.lower):
    """A message is an array: its tag, then its fields in order."""


# Parts of messages


class Outcome(StrEnum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    # Set by clients only: the daemon was lost before it reported the result.
    LOST = "lost"

    __hash__ = str.__hash__


class JobResult(Part):
    """How a job ended. `nbytes` moved, `seconds` on the device; both 0 unless it was done."""

    job_id: Id
    direction: Direction
    outcome: Outcome
    nbytes: Count = 0
    seconds: float = 0.0
    error: ErrorInfo | None = None


class KeyEvent(Part):
    kind: EventKind
    keys: Keys


# Client to daemon


class Hello(Message):
    """The first message: protocol versions spoken, who speaks, and for which engine.

    engine: the name under which KV caches are registered. The processes of one engine (scheduler,
        worker) give the same name, and submit to what one of them registered. Job ids are the
        engine's: no two unfinished jobs of it share one.
    """

    protocol_min: Count
    protocol_max: Count
    client: Name
    engine: Annotated[str, Meta(min_length=1, max_length=256)]


class RegisterKVCaches(Message):
    """Share the engine's own KV tensors. locations[i] is where layout.tensors[i] begins.

    host_bytes: how much of the host pool the engine wants; None: all that is free.
    timeline: handle of the shared page that `wait_for` values are compared with, if any.
    A session that has opened a namespace registers in it: the engine names host blocks by key, and
    has no region of its own (host_bytes is None).
    """

    request_id: Id
    layout: KVLayout
    allocations: Allocations
    locations: Locations
    host_bytes: Positive | None = None
    timeline: Id | None = None


class AllocateKVCaches(Message):
    """Have the daemon allocate the KV tensors, and share them with the engine.

    What was kept for an engine of this name with the same layout is given back, bytes and all.
    keep: do not free the tensors when the engine goes, until it allocates again or somebody asks
        to release them. They take the device's memory as long.
    """

    request_id: Id
    layout: KVLayout
    host_bytes: Positive | None = None
    timeline: Id | None = None
    keep: bool = False


class ReleaseKVCaches(Message):
    """Stop keeping an engine's tensors: free them now, or when the engine disconnects."""

    request_id: Id
    engine: Annotated[str, Meta(min_length=1, max_length=256)]


class Submit(Message):
    """Copy blocks. The copy starts once the engine's timeline has reached `wait_for`."""

    job_id: Id
    src: LoadStoreSpec
    dst: LoadStoreSpec
    wait_for: Id = 0


class Cancel(Message):
    """Cancel jobs. One that has not started copies nothing; a running one stops within a chunk."""

    job_ids: JobIds


class Wait(Message):
    """Request a reply when these jobs have ended. Unknown ids count as ended."""

    request_id: Id
    job_ids: JobIds


class OpenNamespace(Message):
    """Enter the namespace of a fingerprint; it is made where there is none.

    quota_bytes: how much of the pool it takes, None for all that is free. quota_bytes, policy and
    store_threshold count when it is made, or entered with nobody in it; Opened tells what holds.
    """

    request_id: Id
    fingerprint: Fingerprint
    quota_bytes: Count | None = None
    policy: Name = "lru"
    store_threshold: Positive = 1


class Subscribe(Message):
    """Send what is resident in my namespace, and from then on what changes.

    Said again when a number is missing among the KeyEvents.
    """


class Pin(Message):
    """Keep these keys until Unpin, as many times as pinned, or until my session ends."""

    keys: Keys


class Unpin(Message):
    keys: Keys


class Touch(Message):
    """Mark keys as used, the first as the most recent. hits, misses: lookups since the last."""

    keys: Keys
    hits: Count = 0
    misses: Count = 0


class Reset(Message):
    """Make every key of my namespace absent. The KeyEvents of it come before its Done."""

    request_id: Id


class StatusRequest(Message):
    request_id: Id


class NamespacesRequest(Message):
    request_id: Id


class Goodbye(Message):
    """The sender disconnects. A client's unfinished jobs are cancelled."""

    reason: Name = ""


# Daemon to client


class Welcome(Message):
    protocol: Count
    boot_id: str
    session_id: Token
    version: str
    pid: int
    device: DeviceInfo
    limits: Limits


class Registered(Message):
    request_id: Id
    region: HostRegion


class Allocated(Message):
    request_id: Id
    region: HostRegion
    allocations: Allocations
    locations: Locations
    # Whether these are the tensors that were kept for the engine, with their bytes.
    kept: bool = False


class Released(Message):
    """nbytes: bytes of the tensors that are no longer kept."""

    request_id: Id
    nbytes: Count


class Finished(Message):
    results: tuple[JobResult, ...]


class Waited(Message):
    request_id: Id


class Opened(Message):
    """A namespace, as it is.

    unlike: some others of the same model, and the fields that differ, where they are many in part.
    reattached: it was there before, with its keys. name: what the fingerprint is called.
    generation: from 1 on, and one more with each reset.
    """

    request_id: Id
    name: Name
    num_blocks: Count
    block_bytes: Positive
    reattached: bool
    policy: str
    store_threshold: int
    unlike: tuple[str, ...] = ()
    generation: Count = 1


class Done(Message):
    request_id: Id


class Snapshot(Message):
    """A part of what is resident as of KeyEvents number `sequence`: ready keys, or pending ones.

    part: 0 begins anew. last: that was all; KeyEvents from `sequence` + 1 on apply.
    """

    sequence: Count
    part: Count
    pending: bool
    keys: Keys
    last: bool = False
    generation: Count = 1


class KeyEvents(Message):
    """What happened to keys of the namespace, in order. Numbered without gaps.

    With no events: the number of the newest, for one who may have missed it.
    """

    sequence: Count
    events: tuple[KeyEvent, ...]
    generation: Count = 1


class StatusReport(Message):
    request_id: Id
    status: DaemonStatus


class NamespacesReport(Message):
    request_id: Id
    namespaces: tuple[NamespaceStatus, ...]


class Error(Message):
    """The reply to a refused request (request_id), or to bytes that are not a message."""

    request_id: Id | None
    error: ErrorInfo
    boot_id: str = ""


ClientMessage: TypeAlias = (
    Hello
    | RegisterKVCaches
    | AllocateKVCaches
    | ReleaseKVCaches
    | Submit
    | Cancel
    | Wait
    | OpenNamespace
    | Subscribe
    | Pin
    | Unpin
    | Touch
    | Reset
    | StatusRequest
    | NamespacesRequest
    | Goodbye
)
DaemonMessage: TypeAlias = (
    Welcome
    | Registered
    | Allocated
    | Released
    | Finished
    | Waited
    | Opened
    | Done
    | Snapshot
    | KeyEvents
    | StatusReport
    | NamespacesReport
    | Error
    | Goodbye
)
