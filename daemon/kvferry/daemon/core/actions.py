"""What the core asks for, and what it is told: the whole vocabulary between bookkeeping and bytes.

The core answers every message with actions and calls nobody. Sends go to the server's socket, the
rest to the device worker; its reports come back and are answered with actions again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s
from kvferry.daemon.core.records import KeptTensorsRecord, RegionOwner, RegionRecord
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.keys import OffloadKey
from kvferry.proto.memory import Allocation, Location
from kvferry.proto.messages import DaemonMessage, KeyEvents, Outcome
from kvferry.proto.specs import Direction
from kvferry.proto.status import CopyStatus, GroupCopying, HealthStatus, VerificationStatus


class CopyPlan(msgspec.Struct, frozen=True):
    """One transfer, resolved. The one data type between the planner and the engines."""

    serial: int
    registration: int
    direction: Direction
    runs: tuple[Extent, ...]
    nbytes: int
    # Begin once the engine's timeline has reached this value.
    wait_for: int
    # Begin once the other direction has ended every transfer up to this serial.
    after: int
    # Begin once the host pool is registered up to this byte.
    host_end: int
    # When it was accepted; 0 for the daemon's own.
    accepted: float = 0.0
    # Stores, by serial, whose blocks this load reads. If one of them does not complete, the load
    # fails (STALE) and copies nothing. `after` has it wait for their ends.
    requires: tuple[int, ...] = ()


# Actions


class Send(msgspec.Struct, frozen=True):
    session: str
    message: DaemonMessage


@dataclass(frozen=True, slots=True)
class SendStream:
    """Messages made one at a time, each between what else there is to do."""

    session: str
    messages: Iterator[DaemonMessage]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The same to many; one that does not take its messages misses it, and will notice."""

    sessions: tuple[str, ...]
    message: KeyEvents


@dataclass(frozen=True, slots=True)
class PublishKVEvents:
    """What happened in a namespace, for anybody who listens. block_size: tokens in a block."""

    namespace: str
    block_size: int
    news: KeyEvents


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Forget a session: no more messages come from it or go to it.

    unfinished: jobs of it that were under way; nbytes: what its other jobs moved. For the log.
    """

    session: str
    unfinished: int = field(default=0, compare=False)
    nbytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class FreeDeferred:
    """Free what nobody has any more, some at a time, between what else there is to do."""

    rubble: DeferredFree


@dataclass(frozen=True, slots=True)
class MapTensors:
    """Make an engine's tensors reachable; the device worker reports TensorsMapped.

    locations: where each tensor lies in `allocations`; None: allocate the tensors here.
    keep: hold what is allocated, until Drop. reuse: the registration whose memory is held, to be
        mapped instead of new memory where that can be.
    """

    registration: int
    session: str
    geometry: BlockLayout
    allocations: tuple[Allocation, ...]
    locations: tuple[Location, ...] | None
    timeline: int | None
    keep: bool = False
    reuse: int | None = None


@dataclass(frozen=True, slots=True)
class KeepTensors:
    """Hold the memory allocated for a registration for another daemon too, until Drop.

    descriptors: those that the device worker holds until then.
    """

    registration: int
    tenancy: KeptTensorsRecord
    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseTensors:
    """Hold the memory allocated for a registration no longer; what is mapped stays mapped."""

    registration: int


@dataclass(frozen=True, slots=True)
class UnmapTensors:
    """End all transfers of a registration and unmap it; reported as TensorsUnmapped."""

    registration: int


class BlockSet(msgspec.Struct, frozen=True):
    """The host blocks of a transfer, and in a namespace the key that a store gives each.

    parts: of blocks that are not stored whole, the sub-blocks (from, to).
    """

    owner: RegionOwner
    blocks: Int64s
    keys: tuple[OffloadKey, ...] = ()
    parts: dict[int, tuple[int, int]] = {}


class StartTransfer(msgspec.Struct, frozen=True):
    """Set a plan on its way. session, job_id: whose it is, and what they call it."""

    plan: CopyPlan
    session: str
    job_id: int
    cargo: BlockSet


@dataclass(frozen=True, slots=True)
class RegionCreated:
    """Keep books of a region from now on; nothing in it is resident."""

    deed: RegionRecord


@dataclass(frozen=True, slots=True)
class RegionUpdated:
    """A region is what this deed says from now on. wipe: and nothing in it is resident."""

    deed: RegionRecord
    wipe: bool = False


@dataclass(frozen=True, slots=True)
class RegionFreed:
    """A region is no more: nothing in it is anybody's."""

    owner: RegionOwner


class CommitBlocks(msgspec.Struct, frozen=True):
    """A store completed: record its blocks as good as soon as their checksums are computed.

    cargo: its host blocks, and for each the key or the sub-blocks (from, to) that are loadable.
    """

    serial: int
    cargo: BlockSet


@dataclass(frozen=True, slots=True)
class ForgetStores:
    """No load that is started from now on requires these stores, which did not complete."""

    registration: int
    serials: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelTransfers:
    """Cancel transfers: at once where they wait, within a chunk where they run."""

    registration: int
    serials: tuple[int, ...]


Action: TypeAlias = (
    Send
    | SendStream
    | Broadcast
    | PublishKVEvents
    | CloseSession
    | FreeDeferred
    | MapTensors
    | KeepTensors
    | ReleaseTensors
    | UnmapTensors
    | StartTransfer
    | CommitBlocks
    | CancelTransfers
    | ForgetStores
    | RegionCreated
    | RegionUpdated
    | RegionFreed
)
RegionChange: TypeAlias = RegionCreated | RegionUpdated | RegionFreed


# Reports


@dataclass(frozen=True, slots=True)
class TensorsMapped:
    """The tensors are reachable, or why not; where they were allocated here, how to share them.

    reused: they are those of the registration that Map named.
    """

    registration: int
    session: str
    error: ErrorInfo | None = None
    allocations: tuple[Allocation, ...] = ()
    locations: tuple[Location, ...] = ()
    copying: tuple[GroupCopying, ...] = ()
    # What FdAllocations refer to by position, until the server has made tickets of them.
    descriptors: tuple[int, ...] = ()
    reused: bool = False
    # Descriptors that the device worker holds from now on, if that was asked.
    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorsUnmapped:
    registration: int


class TransferCompleted(msgspec.Struct, frozen=True):
    """The one end of a plan that was started."""

    serial: int
    outcome: Outcome
    seconds: float = 0.0
    error: ErrorInfo | None = None
    # Seconds from when it was accepted until its first chunk was submitted.
    queued: float = 0.0


@dataclass(frozen=True, slots=True)
class BlocksVerified:
    """Host blocks that an earlier daemon stored match their checksums.

    keys: in a namespace the key of each block; otherwise none.
    """

    owner: RegionOwner
    blocks: Int64s
    keys: tuple[OffloadKey, ...] = ()


@dataclass(frozen=True, slots=True)
class BlocksCorrupted:
    """Host blocks do not match their checksums: their bytes are lost.

    keys: in a namespace the key of each block; otherwise none.
    """

    owner: RegionOwner
    blocks: Int64s
    keys: tuple[OffloadKey, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolRegistered:
    """The host pool is registered up to this byte."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class CopyCalibrated:
    """The device was measured; this is how it copies."""

    copying: CopyStatus


@dataclass(frozen=True, slots=True)
class HealthChecked:
    """How the daemon is, and how far the verification of its blocks, found out just now."""

    health: HealthStatus
    verification: VerificationStatus | None = None


@dataclass(frozen=True, slots=True)
class Pong:
    """The device worker responds to a Ping. posted: when that was sent.

    oldest: when the oldest job was accepted that has not ended and is not held by its engine's
        timeline; held: the same of those that are. None: there is none.
    """

    posted: float
    oldest: float | None
    held: float | None


@dataclass(frozen=True, slots=True)
class Continue:
    """A command has more to do: post this one, behind what was posted meanwhile."""

    command: CancelTransfers | ForgetStores


Report: TypeAlias = (
    TensorsMapped
    | TensorsUnmapped
    | TransferCompleted
    | BlocksVerified
    | BlocksCorrupted
    | PoolRegistered
    | CopyCalibrated
    | HealthChecked
    | Pong
    | Continue
)
