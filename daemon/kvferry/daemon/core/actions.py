"""The output of the core (actions), and its input in addition to messages (reports).

The core returns a list of actions for each message and each report. The server passes each action
to its owner: transport, the device worker, persistence, the tiers or observability. All reports
reach the core on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvferry.daemon.core.cache.deferred_free import FreedInSteps
from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s
from kvferry.daemon.core.records import KeptTensorsRecord, RegionOwner, RegionRecord
from kvferry.daemon.core.region import Region
from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    BlocksWritten,
    DropStore,
    EpochsSettled,
    EpochsSynced,
    FetchBlocks,
    FetchReleased,
    FindKeys,
    KeysFound,
    LendMemory,
    SettleEpochs,
    StoresFound,
    SyncEpochs,
)
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.events import HOST_POOL, Place
from kvferry.proto.memory import Allocation, Location
from kvferry.proto.messages import ClientMessage, DaemonMessage, KeyEvents
from kvferry.proto.results import Outcome
from kvferry.proto.specs import Direction
from kvferry.proto.status import CopyStatus, GroupCopying


class CopyPlan(msgspec.Struct, frozen=True):
    """A resolved transfer, as the core passes it to the device worker."""

    serial: int
    registration: int
    direction: Direction
    extents: tuple[Extent, ...]
    nbytes: int
    # Start once the engine's timeline has reached this value.
    wait_for: int
    # Start once all transfers of the other direction up to this serial have ended.
    after: int
    # Start once the host pool is registered up to this byte.
    host_end: int
    # Time of acceptance in seconds (monotonic); 0 for the daemon's own transfers.
    accepted: float = 0.0
    # Serials of the stores whose blocks this load reads. If one of them does not complete, the load
    # fails (STALE) and copies nothing. `after` makes it wait for their ends.
    requires: tuple[int, ...] = ()


# Actions


class SendMessage(msgspec.Struct, frozen=True):
    """Send a message to a session."""

    session: str
    message: DaemonMessage


@dataclass(frozen=True, slots=True)
class SendStatus:
    """Send the status of the daemon, in reply to a request."""

    session: str
    request_id: int


@dataclass(frozen=True, slots=True)
class SendStream:
    """A long reply: its messages are created one at a time, between other work."""

    session: str
    messages: Iterator[DaemonMessage]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One message to several sessions. A session with a full outbox misses it, and notices."""

    sessions: tuple[str, ...]
    message: KeyEvents


@dataclass(frozen=True, slots=True)
class PublishKVEvents:
    """KV events of a namespace for external subscribers. block_size: tokens in a block. place:
    where the blocks are."""

    namespace: str
    block_size: int
    key_events: KeyEvents
    place: Place = HOST_POOL


@dataclass(frozen=True, slots=True)
class CloseSession:
    """A session ended: remove it. No message is sent to it from now on.

    unfinished: its jobs that were in flight; nbytes: bytes that its completed jobs moved. Both are
    for the log.
    """

    session: str
    unfinished: int = field(default=0, compare=False)
    nbytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class FreeDeferred:
    """Free the keys of a cache that was reset, or the pins of an ended session, in steps, between
    other work."""

    deferred: FreedInSteps


@dataclass(frozen=True, slots=True)
class MapTensors:
    """Map an engine's tensors; the device worker reports TensorsMapped.

    locations: of each tensor in `allocations`; None: the daemon allocates the tensors.
    timeline: handle of the timeline page, if any.
    keep: hold the allocated memory until ReleaseTensors. reuse: the registration whose held memory
        is mapped instead of new memory, if possible.
    """

    registration: int
    session: str
    layout: BlockLayout
    allocations: tuple[Allocation, ...]
    locations: tuple[Location, ...] | None
    timeline: int | None
    keep: bool = False
    reuse: int | None = None


@dataclass(frozen=True, slots=True)
class KeepTensors:
    """Keep the memory allocated for a registration beyond this daemon, until ReleaseTensors.

    descriptors: of the memory; the device worker holds them until then.
    """

    registration: int
    record: KeptTensorsRecord
    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseTensors:
    """Release the held memory of a registration; what is mapped stays mapped."""

    registration: int


@dataclass(frozen=True, slots=True)
class UnmapTensors:
    """End all transfers of a registration and unmap its memory; the reply is TensorsUnmapped."""

    registration: int


class StartTransfer(msgspec.Struct, frozen=True):
    """Start a transfer. session, job_id: its session, and its id there."""

    plan: CopyPlan
    session: str
    job_id: int


@dataclass(frozen=True, slots=True)
class RegionCreated:
    """A region was created; none of its blocks was used."""

    record: RegionRecord
    region: Region


@dataclass(frozen=True, slots=True)
class RegionUpdated:
    """The record of a region changed."""

    record: RegionRecord


@dataclass(frozen=True, slots=True)
class RegionFreed:
    """A region was freed."""

    owner: RegionOwner


@dataclass(frozen=True, slots=True)
class ForgetStores:
    """These stores did not complete; no load started from now on requires them."""

    registration: int
    serials: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelTransfers:
    """Cancel transfers: waiting ones at once, running ones after their chunks in flight."""

    registration: int
    serials: tuple[int, ...]


# Performed by the device worker, persistence, the tiers or observability. SendMessage: to the
# daemon's own session.
OwnersAction: TypeAlias = (
    SendMessage
    | PublishKVEvents
    | FreeDeferred
    | KeepTensors
    | ReleaseTensors
    | UnmapTensors
    | StartTransfer
    | CancelTransfers
    | ForgetStores
    | RegionCreated
    | RegionUpdated
    | RegionFreed
    | FindKeys
    | FetchBlocks
    | DropStore
    | SyncEpochs
    | SettleEpochs
)
Action: TypeAlias = (
    SendStatus | SendStream | Broadcast | CloseSession | MapTensors | LendMemory | OwnersAction
)
RegionChange: TypeAlias = RegionCreated | RegionUpdated | RegionFreed


# Reports


@dataclass(frozen=True, slots=True)
class TensorsMapped:
    """The tensors were mapped, or the error. If allocated here: how the client can map them.

    reused: the memory is that of the registration that MapTensors named in `reuse`.
    """

    registration: int
    session: str
    error: ErrorInfo | None = None
    allocations: tuple[Allocation, ...] = ()
    locations: tuple[Location, ...] = ()
    copying: tuple[GroupCopying, ...] = ()
    # FdAllocations refer to these by position, until fd_server.py replaces them by handles.
    descriptors: tuple[int, ...] = ()
    reused: bool = False
    # Descriptors that the device worker holds from now on, if tensors are to be kept.
    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorsUnmapped:
    """No transfer of the registration is left, and its memory is unmapped."""

    registration: int


class TransferCompleted(msgspec.Struct, frozen=True):
    """A started transfer has ended. Reported exactly once per transfer.

    unpackable: byte offsets in the pool of GPU blocks that a store could not pack.
    """

    serial: int
    outcome: Outcome
    seconds: float = 0.0
    error: ErrorInfo | None = None
    # Seconds from acceptance until the first chunk was submitted.
    queued: float = 0.0
    unpackable: Int64s | None = None


@dataclass(frozen=True, slots=True)
class BlocksVerified:
    """Host blocks that an earlier daemon stored match their checksums."""

    owner: RegionOwner
    blocks: Int64s


@dataclass(frozen=True, slots=True)
class BlocksCorrupted:
    """Host blocks do not match their checksums: their bytes are lost.

    Reports are handled in order, and before later messages. So no store that began after the
    comparison has completed, and those of the blocks that have contents still have these.
    """

    owner: RegionOwner
    blocks: Int64s


@dataclass(frozen=True, slots=True)
class CopyCalibrated:
    """The calibration ended with this result."""

    copying: CopyStatus


@dataclass(frozen=True, slots=True)
class Pong:
    """The reply of the device worker to a Ping. All times: time.monotonic() in seconds.

    posted: when the Ping was sent. oldest: when the oldest job in flight was accepted that does not
        wait for its engine's timeline; held: the same for jobs that wait. None if there is none.
    """

    posted: float
    oldest: float | None
    held: float | None


@dataclass(frozen=True, slots=True)
class PoolRegistered:
    """The host pool is registered with the device up to this byte."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class OwnRequest:
    """A request of the daemon's own session; the reply is sent to OWN_SESSION."""

    message: ClientMessage


@dataclass(frozen=True, slots=True)
class Continue:
    """A command is not finished: the server posts its rest, when the core has handled the reports
    before this one."""

    command: CancelTransfers | ForgetStores


Report: TypeAlias = (
    TensorsMapped
    | TensorsUnmapped
    | TransferCompleted
    | BlocksVerified
    | BlocksCorrupted
    | CopyCalibrated
    | Pong
    | PoolRegistered
    | OwnRequest
    | KeysFound
    | BlocksFetched
    | FetchReleased
    | BlocksWritten
    | EpochsSynced
    | EpochsSettled
    | StoresFound
    | Continue
)
