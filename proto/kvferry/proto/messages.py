"""All messages between client and daemon. The codec and its limits are in codec.py.

    client                                     daemon
      Hello                     ->               (first; all others are refused before it)
                                <-             Welcome | Error
      RegisterKVCaches          ->
                                <-             Registered | Error
      AllocateKVCaches          ->
                                <-             Allocated | Error
      ReleaseKVCaches           ->
                                <-             Released | Error
      Submit                    ->               (no other reply than Finished)
      Cancel                    ->               (likewise)
                                <-             Finished, with one JobResult for each Submit;
                                               jobs that end together share a message
      Wait                      ->
                                <-             Waited, after the Finished of all those jobs
      OpenNamespace             ->
                                <-             Opened | Error
      Pin, Unpin, Touch, Spare  ->               (no reply)
      Reset                     ->
                                <-             Done | Error
      FindInTiers               ->
                                <-             TiersFound | Error
      Subscribe                 ->
                                <-             Snapshot, in parts; then KeyEvents, each numbered
      StatusRequest             ->
                                <-             StatusReport
      NamespacesRequest         ->
                                <-             NamespacesReport
      Goodbye                   ->
                                <-             Goodbye, also when the daemon stops

A request has a request_id, which its reply repeats. ZeroMQ cannot pass file descriptors (shared
memory, timeline pages); a second socket does (fd_passing.py). Siblings also send the messages of
lending.py. What applications know of their keys is in hints.py.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from kvferry.proto.errors import ErrorInfo
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.hints import HintMessage, Retained
from kvferry.proto.keys import EventKind
from kvferry.proto.lending import LendingMessage, LendingReply
from kvferry.proto.memory import Allocations, HostRegion, Locations
from kvferry.proto.message import Message
from kvferry.proto.results import JobResult
from kvferry.proto.specs import (
    Count,
    Epoch,
    Id,
    Keys,
    KVLayout,
    LoadStoreSpec,
    Name,
    Part,
    Positive,
)
from kvferry.proto.status import DaemonStatus, DeviceInfo, Limits, NamespaceStatus

Token: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
MAX_JOB_IDS = 65536
# Of a namespace without another one.
DEFAULT_POLICY = "lru"
JobIds: TypeAlias = Annotated[tuple[Id, ...], Meta(max_length=MAX_JOB_IDS)]


class KeyEvent(Part):
    """The new state of some keys."""

    kind: EventKind
    keys: Keys


# Client to daemon


class Hello(Message):
    """The first message of a connection: the protocol's numbers (protocol.py), and names.

    The fields of Hello and Error never change, so that builds can tell each other that they differ.
    client: for the daemon's log. engine: the name under which KV caches are registered. The
        processes of one engine (scheduler, worker) use the same name, and submit to the
        registration of one of them. No two unfinished jobs of an engine may have one id.
    """

    protocol_min: Count
    protocol_max: Count
    client: Name
    engine: Annotated[str, Meta(min_length=1, max_length=256)]


class RegisterKVCaches(Message):
    """Share the KV tensors that the engine has allocated. locations[i] is of layout.tensors[i].

    host_bytes: requested bytes of the host pool; None: as in OpenNamespace.
    timeline: handle of the page that `wait_for` values are compared with, if any.
    If the session has opened a namespace, the engine registers in it: it names host blocks by key,
    and has no region of its own (host_bytes is None).
    """

    request_id: Id
    layout: KVLayout
    allocations: Allocations
    locations: Locations
    host_bytes: Positive | None = None
    timeline: Id | None = None


class AllocateKVCaches(Message):
    """Have the daemon allocate the KV tensors, and share them with the engine.

    If tensors of this layout are kept for the engine, it gets those, with their bytes.
    keep: do not free the tensors when the engine disconnects, but when it registers again or a
        client releases them. Until then they occupy device memory.
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
    # Also free its region of the pool. Then `engine` may name a namespace that nobody uses.
    host_memory: bool = False


class Submit(Message):
    """Copy blocks. The copy starts once the engine's timeline has reached `wait_for`.

    part: from 0. A job that is too large for a message is sent in parts, one after the other. Each
    part has a result of its own; Cancel and Wait are for all parts of a job.
    """

    job_id: Id
    src: LoadStoreSpec
    dst: LoadStoreSpec
    wait_for: Id = 0
    part: Count = 0


class Cancel(Message):
    """Cancel jobs. One that has not started copies nothing; a running one stops within a chunk."""

    job_ids: JobIds


class Wait(Message):
    """Request a reply when these jobs have ended. Unknown ids count as ended."""

    request_id: Id
    job_ids: JobIds


class OpenNamespace(Message):
    """Open the namespace of a fingerprint, and create it if there is none.

    quota_bytes: its size in the host pool; None: the size it had, or all that nobody uses, in one
    piece. quota_bytes, policy and store_threshold apply if the namespace is created, or if no other
    session has it open. Opened has the values in effect.
    """

    request_id: Id
    fingerprint: Fingerprint
    quota_bytes: Count | None = None
    policy: Name = DEFAULT_POLICY
    store_threshold: Positive = 1


class Subscribe(Message):
    """Request a Snapshot of the session's namespace, and KeyEvents from then on.

    Sent again if the number of a KeyEvents is missing.
    """


class Pin(Message):
    """Do not evict these keys until they are unpinned as often, or until the session ends.

    request_id: if given, the reply is Pinned.
    """

    keys: Keys
    request_id: Id | None = None


class Unpin(Message):
    keys: Keys


class Touch(Message):
    """Mark keys as used; the first becomes the most recent.

    by_prompt: whether a prompt has used them, which the statistics count; else their blocks in the
    engine's GPU are about to be overwritten. Since the last Touch: hits, misses: of lookups. new:
    keys that no lookup was for. saved_tokens, saved_seconds: tokens whose KV was loaded, and the
    time in which the engine computes so many, by its own measurement.
    """

    keys: Keys
    hits: Count = 0
    misses: Count = 0
    new: Count = 0
    saved_tokens: Count = 0
    saved_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    by_prompt: bool = True


class Spare(Message):
    """Evict the blocks of these keys first, until they are touched: the engine's GPU has them.
    Ignored while another engine is in the namespace. Those that are retained stay."""

    keys: Keys


class Reset(Message):
    """Remove all keys of the session's namespace, in all daemons of this host and user.

    Its KeyEvents is sent before its Done. label: a reset with the label of the last one does
    nothing more; so engines that share a namespace can each reset it for the same reason, such as a
    version of the weights.
    """

    request_id: Id
    label: Name = ""


class FindInTiers(Message):
    """Find keys at siblings and in tiers. Those of tiers are promoted: copied to the host pool.

    keys: of one request, in prefix order. compute_seconds: the time in which the engine computes
    the tokens of one key, by its own measurement; keys are promoted only if that is slower. 0: not
    known, and all keys that tiers have are promoted.
    """

    request_id: Id
    keys: Keys
    compute_seconds: Annotated[float, Meta(ge=0)] = 0.0


class StatusRequest(Message):
    request_id: Id


class NamespacesRequest(Message):
    request_id: Id


class Goodbye(Message):
    """The sender disconnects. A client's unfinished jobs are cancelled."""

    reason: Name = ""


# Daemon to client


class Welcome(Message):
    """The session is open. boot_id: random, another one after each start of the daemon."""

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
    """The reply to ReleaseKVCaches. nbytes: bytes that are no longer kept."""

    request_id: Id
    nbytes: Count


class Finished(Message):
    results: tuple[JobResult, ...]


class Waited(Message):
    request_id: Id


# In Opened.tiers: stands for the daemon's siblings.
SIBLINGS = "siblings"


class Opened(Message):
    """The opened namespace. Host blocks have `block_bytes` each.

    unlike: other namespaces of the same model, with the fields that differ; shortened.
    reattached: the namespace existed before, with its keys. name: a hash of the fingerprint.
    epoch: of its contents, see KeyLoadStoreSpec. stores_once: whether a store leaves out what
    siblings have.
    tiers: what FindInTiers searches, in this order: SIBLINGS if blocks are exchanged, then the
    names of tiers, fastest first. Empty: FindInTiers finds nothing.
    shortfall: why it has less host memory than its quota (without one: than the pool), or empty.
    """

    request_id: Id
    name: Name
    num_blocks: Count
    block_bytes: Positive
    reattached: bool
    policy: str
    store_threshold: int
    unlike: tuple[str, ...] = ()
    epoch: Epoch = 0
    tiers: tuple[str, ...] = ()
    stores_once: bool = False
    shortfall: str = ""


class Done(Message):
    """A reset is done: no load that is submitted from now on, at any daemon of this host and user,
    returns a block that was stored before it.

    epoch: of the namespace now. unpublished: the tiers, shared with other hosts, that could not be
    reached. This host does not use them for the namespace until they have the reset, too.
    """

    request_id: Id
    epoch: Epoch = 0
    unpublished: tuple[str, ...] = ()


class Snapshot(Message):
    """A part of the resident keys after KeyEvents number `sequence`: ready or pending keys.

    part: from 0. last: the snapshot is complete; KeyEvents from `sequence` + 1 on apply to it.
    """

    sequence: Count
    part: Count
    pending: bool
    keys: Keys
    last: bool = False
    epoch: Epoch = 0


class KeyEvents(Message):
    """Changes of the keys of the namespace, in order. `sequence` grows by one.

    Without events: the newest number, for a client that may have missed it.
    """

    sequence: Count
    events: tuple[KeyEvent, ...]
    epoch: Epoch = 0


class TiersFound(Message):
    """The first `prefix` keys of a FindInTiers are loadable, pending, or being promoted.

    promoted: how many of them this request began to promote. They are pending until they are
    loadable; a key whose promotion fails or is late becomes absent. All of this is in KeyEvents;
    those of the promoted keys are sent before this message. is_shared: whether others wait for what
    the engine stores: a sibling has the namespace, too, or a tier is shared with other hosts.
    """

    request_id: Id
    prefix: Count
    promoted: Count = 0
    is_shared: bool = False


class Pinned(Message):
    """The first `held` keys of a Pin are loadable, and stay so until they are unpinned.

    Those that are read from a sibling are not held there: a load fails if it evicts them meanwhile.
    """

    request_id: Id
    held: Count


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
    | Spare
    | Reset
    | FindInTiers
    | HintMessage
    | LendingMessage
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
    | TiersFound
    | Pinned
    | Snapshot
    | KeyEvents
    | Retained
    | LendingReply
    | StatusReport
    | NamespacesReport
    | Error
    | Goodbye
)
