"""What the core asks for, and what it is told: the whole vocabulary between bookkeeping and bytes.

The core answers every message with actions and calls nobody. Sends go to the server's socket, the
rest to the lane; the lane's reports come back and are answered with actions again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvferry.daemon.core.deeds import Deed, Owner, Tenancy
from kvferry.daemon.core.geometry import Geometry, Int64s, Run
from kvferry.daemon.core.residency.rubble import Rubble
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.keys import OffloadKey
from kvferry.proto.memory import Allocation, Location
from kvferry.proto.messages import DaemonMessage, News, Outcome
from kvferry.proto.specs import Direction
from kvferry.proto.status import CopyStatus, GroupCopying, HealthStatus, VerificationStatus


class CopyPlan(msgspec.Struct, frozen=True):
    """One transfer, resolved. The one data type between the planner and the engines."""

    serial: int
    registration: int
    direction: Direction
    runs: tuple[Run, ...]
    nbytes: int
    wait_for: int
    """Begin once the engine's timeline has reached this value."""
    after: int
    """Begin once the other direction has ended every transfer up to this serial."""
    host_end: int
    """Begin once the host pool is registered up to this byte."""
    accepted: float = 0.0
    """When it was accepted; 0 for the daemon's own."""
    requires: tuple[int, ...] = ()
    """Stores, by serial, whose blocks this load reads. If one of them does not complete, the load
    fails (STALE) and copies nothing. `after` has it wait for their ends."""


# Actions


class Send(msgspec.Struct, frozen=True):
    session: str
    message: DaemonMessage


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages made one at a time, each between what else there is to do."""

    session: str
    messages: Iterator[DaemonMessage]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The same to many; one that does not take its messages misses it, and will notice."""

    sessions: tuple[str, ...]
    message: News


@dataclass(frozen=True, slots=True)
class Publish:
    """What happened in a namespace, for anybody who listens. block_size: tokens in a block."""

    namespace: str
    block_size: int
    news: News


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Forget a session: no more messages come from it or go to it.

    unfinished: jobs of it that were under way; nbytes: what its other jobs moved. For the log.
    """

    session: str
    unfinished: int = field(default=0, compare=False)
    nbytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Free what nobody has any more, some at a time, between what else there is to do."""

    rubble: Rubble


@dataclass(frozen=True, slots=True)
class Map:
    """Make an engine's tensors reachable; the lane reports Mapped.

    locations: where each tensor lies in `allocations`; None: allocate the tensors here.
    keep: hold what is allocated, until Drop. reuse: the registration whose memory is held, to be
        mapped instead of new memory where that can be.
    """

    registration: int
    session: str
    geometry: Geometry
    allocations: tuple[Allocation, ...]
    locations: tuple[Location, ...] | None
    timeline: int | None
    keep: bool = False
    reuse: int | None = None


@dataclass(frozen=True, slots=True)
class Shelve:
    """Hold the memory allocated for a registration for another daemon too, until Drop.

    descriptors: those that the lane holds until then.
    """

    registration: int
    tenancy: Tenancy
    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Hold the memory allocated for a registration no longer; what is mapped stays mapped."""

    registration: int


@dataclass(frozen=True, slots=True)
class Unmap:
    """End every transfer of a registration and let its memory go; the lane reports Unmapped."""

    registration: int


class Cargo(msgspec.Struct, frozen=True):
    """The host blocks of a transfer, and in a namespace the key that a store gives each.

    parts: of blocks that are not stored whole, the sub-blocks (from, to).
    """

    owner: Owner
    blocks: Int64s
    keys: tuple[OffloadKey, ...] = ()
    parts: dict[int, tuple[int, int]] = {}


class Start(msgspec.Struct, frozen=True):
    """Set a plan on its way. session, job_id: whose it is, and what they call it."""

    plan: CopyPlan
    session: str
    job_id: int
    cargo: Cargo


@dataclass(frozen=True, slots=True)
class Enter:
    """Keep books of a region from now on; nothing in it is resident."""

    deed: Deed


@dataclass(frozen=True, slots=True)
class Amend:
    """A region is what this deed says from now on. wipe: and nothing in it is resident."""

    deed: Deed
    wipe: bool = False


@dataclass(frozen=True, slots=True)
class Strike:
    """A region is no more: nothing in it is anybody's."""

    owner: Owner


class Commit(msgspec.Struct, frozen=True):
    """A store completed: record its blocks as good as soon as their checksums are computed.

    cargo: its host blocks, and for each the key or the sub-blocks (from, to) that are loadable.
    """

    serial: int
    cargo: Cargo


@dataclass(frozen=True, slots=True)
class ForgetStores:
    """No load that is started from now on requires these stores, which did not complete."""

    registration: int
    serials: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """Cancel transfers: at once where they wait, within a chunk where they run."""

    registration: int
    serials: tuple[int, ...]


Action: TypeAlias = (
    Send
    | Stream
    | Broadcast
    | Publish
    | Dismiss
    | Sweep
    | Map
    | Shelve
    | Drop
    | Unmap
    | Start
    | Commit
    | Abandon
    | ForgetStores
    | Enter
    | Amend
    | Strike
)
Record: TypeAlias = Enter | Amend | Strike


# Reports


@dataclass(frozen=True, slots=True)
class Mapped:
    """The tensors are reachable, or why not; where they were allocated here, how to share them.

    reused: they are those of the registration that Map named.
    """

    registration: int
    session: str
    error: ErrorInfo | None = None
    allocations: tuple[Allocation, ...] = ()
    locations: tuple[Location, ...] = ()
    copying: tuple[GroupCopying, ...] = ()
    descriptors: tuple[int, ...] = ()
    """What FdAllocations refer to by position, until the server has made tickets of them."""
    reused: bool = False
    held: tuple[int, ...] = ()
    """Descriptors that the lane holds from now on, where that was asked."""


@dataclass(frozen=True, slots=True)
class Unmapped:
    registration: int


class Ended(msgspec.Struct, frozen=True):
    """The one end of a plan that was started."""

    serial: int
    outcome: Outcome
    seconds: float = 0.0
    error: ErrorInfo | None = None
    queued: float = 0.0
    """Seconds from when it was accepted until its first piece was submitted."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Host blocks that an earlier daemon stored match their checksums.

    keys: in a namespace the key of each block; otherwise none.
    """

    owner: Owner
    blocks: Int64s
    keys: tuple[OffloadKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Corrupted:
    """Host blocks do not match their checksums: their bytes are lost.

    keys: in a namespace the key of each block; otherwise none.
    """

    owner: Owner
    blocks: Int64s
    keys: tuple[OffloadKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Pinned:
    """The host pool is registered up to this byte."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The device was measured; this is how it copies."""

    copying: CopyStatus


@dataclass(frozen=True, slots=True)
class Checked:
    """How the daemon is, and how far the verification of its blocks, found out just now."""

    health: HealthStatus
    verification: VerificationStatus | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """The lane went round. posted: when it was asked to.

    oldest: when the oldest job was accepted that has not ended and is not held by its engine's
        timeline; held: the same of those that are. None: there is none.
    """

    posted: float
    oldest: float | None
    held: float | None


@dataclass(frozen=True, slots=True)
class Again:
    """Of an order something is left to do, in its turn."""

    order: Abandon | ForgetStores


Report: TypeAlias = (
    Mapped | Unmapped | Ended | Verified | Corrupted | Pinned | Calibrated | Checked | Beat | Again
)
