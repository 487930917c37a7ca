"""What the device worker needs of a device: map memory, and copy chunks on ordered streams.

A chunk is some GPU blocks of one group. `submit` enqueues one and returns at once. Chunks of one
direction are done in the order submitted; the two directions overlap. `poll` says whether a chunk
is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s
from kvferry.proto.errors import Code, Failed, KVFerryError
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import Allocation, Location
from kvferry.proto.specs import Direction
from kvferry.proto.status import CopyStatus, DeviceInfo, GroupCopying

# One submitted chunk, as its engine knows it.
Ticket: TypeAlias = object


def _never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class Mapping:
    """One registration's tensors, reachable from this process.

    bases: (tensors,) address of each canonical tensor's first byte. handles: what the engine needs
    to unmap them. revoked: whether the engine that owns the tensors has given up all transfers. It
    is called right before a chunk is copied, or its kernel launched, from any thread; such a chunk
    fails instead (CANCELLED), because its GPU blocks may have another owner.
    """

    layout: BlockLayout
    bases: Int64s
    handles: list[object] = field(default_factory=list)
    revoked: Callable[[], bool] = _never


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors that were allocated here, and how others reach them.

    descriptors: file descriptors that FdAllocations refer to by position. They are the caller's,
    and all that the memory needs to live: kept open, they outlast the mapping and this process.
    """

    mapping: Mapping
    allocations: tuple[Allocation, ...]
    locations: tuple[Location, ...]
    descriptors: tuple[int, ...]


def revoked_error() -> KVFerryError:
    """The error of a chunk whose engine has given up all transfers."""
    return Failed(Code.CANCELLED, "the engine has abandoned its transfers: submit them again")


class ChunkRequest(msgspec.Struct, frozen=True):
    """What is to be copied next: bytes of a group; contended: the other direction has work too."""

    group: int
    nbytes: int
    contended: bool


class ChunkBudget(msgspec.Struct, frozen=True):
    """The largest chunk that the engine takes now, in bytes and in GPU blocks."""

    nbytes: int
    blocks: int = 1 << 20


NO_ROOM = ChunkBudget(0)


class OwnerThread:
    """The one thread that may call an object. Checked unless Python runs with -O."""

    def __init__(self) -> None:
        self._ident: int | None = None

    def bind(self) -> None:
        """The calling thread is the owner from now on."""
        assert self._ident is None, "the engine is attached already"
        self._ident = threading.get_ident()

    def assert_owner(self) -> None:
        assert threading.get_ident() == self._ident, (
            f"called in thread {threading.current_thread().name!r}; only the one that attached may"
        )


class CopyEngine(Protocol):
    """A device.

    Threads: `attach` is the first call, and binds the engine to the calling thread, the device
    worker's. All other methods must be called in that thread, and assert it (OwnerThread); only
    `pin` and `unpin` may be called from any thread at any time.

    numa_node: the NUMA node that the device is near; None if there is none.
    """

    info: DeviceInfo
    numa_node: int | None

    def attach(self, pool_address: int) -> CopyStatus | None:
        """Make the device usable in this thread. Raises KVFerryError.

        pool_address: of the host pool's first byte. Returns the result of the calibration, if the
        engine has one.
        """

    def pin(self, address: int, nbytes: int) -> None:
        """Register a chunk of the host pool with the device. From any thread; raises Failed."""

    def unpin(self, address: int) -> None:
        """Undo `pin` of the chunk at `address`. From any thread."""

    def map_tensors(
        self,
        layout: BlockLayout,
        allocations: Sequence[Allocation],
        locations: Sequence[Location],
        descriptors: Sequence[int],
    ) -> Mapping:
        """Map an engine's own tensors. Raises KVFerryError, and nothing stays mapped."""

    def allocate_tensors(self, layout: BlockLayout, kept: Sequence[int] = ()) -> Shared:
        """Allocate tensors of a layout here. Raises KVFerryError, and nothing stays allocated.

        kept: the descriptors of tensors of the same layout that a daemon allocated before. They are
            mapped again with their bytes, and stay the caller's. Raises Failed (MAP_FAILED) if they
            are not of such tensors.
        """

    def unmap_tensors(self, mapping: Mapping) -> None:
        """Unmap a mapping's memory; no chunk of it is in flight."""

    def chunk_budget(
        self, direction: Direction, mapping: Mapping, request: ChunkRequest
    ) -> ChunkBudget:
        """The largest chunk to submit now; NO_ROOM until a chunk in flight is done.

        An engine bounds the bytes and chunks in flight here. It has room if nothing is in flight.
        """

    def submit(self, direction: Direction, mapping: Mapping, extent: Extent) -> Ticket:
        """Enqueue a chunk within `room`. Raises KVFerryError if the device refuses it."""

    def flush(self, direction: Direction, more: bool) -> None:
        """Start what was submitted and is held back to be started together.

        Called whenever nothing more of a direction can be submitted at the moment, and again after
        each poll while chunks are in flight. more: other chunks wait for room. All chunks get done
        if this is called again whenever one is done.
        """

    def poll(self, ticket: Ticket) -> bool:
        """Whether a chunk is done. Raises KVFerryError if it failed.

        After True or an error the ticket is not polled again.
        """

    def elapsed(self, first: Ticket, last: Ticket, before: Ticket | None) -> float:
        """Seconds on the device from the start of one chunk to the end of another, both done.

        before: a chunk submitted before `first`; the time in which it still ran does not count.
        """

    def copying(self, mapping: Mapping) -> tuple[GroupCopying, ...]:
        """How each group of a mapping is copied, for the status."""

    def shutdown(self) -> None:
        """Stop; nothing is in flight."""


def packed_locations(layout: LayoutArrays, alignment: int = 256) -> tuple[list[int], int]:
    """Where tensors of a layout lie in one allocation, one after another; and its size."""
    offsets, at = [], 0
    for span in layout.span_bytes:
        offsets.append(at)
        at = -(-(at + span) // alignment) * alignment
    return offsets, at
