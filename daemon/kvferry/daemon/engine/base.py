"""The interface of a device for the device worker: map memory, and copy chunks on ordered streams.

A chunk is a number of GPU blocks of one group. `submit` enqueues one and returns at once. Chunks of
one direction complete in the order of submission; the two directions overlap. `poll` returns
whether a chunk is done.
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

# A submitted chunk. Its type is the engine's own.
Submission: TypeAlias = object
# Bytes. Each tensor in an allocation begins at a multiple, as memory from cudaMalloc does.
ALIGNMENT = 256


def _never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class Mapping:
    """The tensors of one registration, mapped in this process.

    bases: (tensors,) the address of the first byte of each canonical tensor. handles: objects that
    the copy engine needs to unmap them. revoked: returns whether the inference engine has abandoned
    all transfers. It is called right before a chunk is copied or its kernel is launched, on any
    thread. Such a chunk fails (CANCELLED), because its GPU blocks may have another owner.
    """

    layout: BlockLayout
    bases: Int64s
    handles: list[object] = field(default_factory=list)
    revoked: Callable[[], bool] = _never


@dataclass(frozen=True, slots=True)
class AllocatedTensors:
    """Tensors that this process allocated, and how the client can map them.

    descriptors: file descriptors that FdAllocations refer to by position. The caller owns them. The
    memory exists while one is open, also after it was unmapped and after the end of this process.
    """

    mapping: Mapping
    allocations: tuple[Allocation, ...]
    locations: tuple[Location, ...]
    descriptors: tuple[int, ...]


def revoked_error() -> KVFerryError:
    """The error of a chunk whose engine has abandoned all transfers."""
    return Failed(Code.CANCELLED, "the engine has abandoned its transfers; submit them again")


class ChunkRequest(msgspec.Struct, frozen=True):
    """The rest of the next transfer.

    group: of its next block. nbytes: all that remains. contended: the other direction has work,
    too.
    """

    group: int
    nbytes: int
    contended: bool


class ChunkBudget(msgspec.Struct, frozen=True):
    """The largest chunk that the engine accepts now, in bytes and in GPU blocks."""

    nbytes: int
    blocks: int = 1 << 20


NO_ROOM = ChunkBudget(0)


class OwnerThread:
    """The only thread that may call an object. Checked unless Python runs with -O."""

    def __init__(self) -> None:
        self._ident: int | None = None

    def bind(self) -> None:
        """The calling thread is the owner from now on."""
        assert self._ident is None, "the engine is already attached"
        self._ident = threading.get_ident()

    def assert_owner(self) -> None:
        assert threading.get_ident() == self._ident, (
            f"called on thread {threading.current_thread().name!r}, not on the attached one"
        )


class CopyEngine(Protocol):
    """A device.

    Threads: `attach` is the first call. It binds the engine to the calling thread, which is the
    device worker's. All other methods must be called on that thread, and assert it (OwnerThread),
    except `pin` and `unpin`, which may be called on any thread at any time.

    numa_node: the NUMA node of the device; None if it is unknown.
    """

    info: DeviceInfo
    numa_node: int | None

    def attach(self, pool_address: int) -> CopyStatus | None:
        """Bind the engine to this thread and initialize the device. Raises KVFerryError.

        pool_address: the address of the first byte of the host pool. Returns the result of the
        calibration; None if the engine has none.
        """

    def pin(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        """Register a chunk of host memory with the device. Any thread. Raises Failed.

        writable: whether the device may write it; False for memory that is mapped read-only.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin` of the chunk at `address`. Any thread."""

    def map_tensors(
        self,
        layout: BlockLayout,
        allocations: Sequence[Allocation],
        locations: Sequence[Location],
        descriptors: Sequence[int],
    ) -> Mapping:
        """Map tensors that an engine has allocated. If it raises KVFerryError, none stays mapped.

        locations: of each tensor in `allocations`. descriptors: of the FdAllocations, in order; the
        caller closes them.
        """

    def allocate_tensors(self, layout: BlockLayout, kept: Sequence[int] = ()) -> AllocatedTensors:
        """Allocate and map tensors. If it raises KVFerryError, none stays allocated.

        kept: descriptors of tensors of the same layout that a daemon allocated before. They are
            mapped with their bytes; the caller still owns the descriptors. Raises Failed
            (MAP_FAILED) if they belong to other memory.
        """

    def unmap_tensors(self, mapping: Mapping) -> None:
        """Unmap tensors. No chunk of the mapping may be in flight."""

    def chunk_budget(
        self, direction: Direction, mapping: Mapping, request: ChunkRequest
    ) -> ChunkBudget:
        """The largest chunk to submit now. NO_ROOM: not before a chunk in flight is done.

        This limits the bytes and chunks in flight. It is never NO_ROOM if nothing is in flight.
        """

    def submit(self, direction: Direction, mapping: Mapping, extent: Extent) -> Submission:
        """Enqueue a chunk within `chunk_budget`. Raises KVFerryError if the device refuses it."""

    def flush(self, direction: Direction, more: bool) -> None:
        """Start submitted chunks that were held back to be started together.

        The device worker calls this in two cases: it cannot submit more chunks of a direction now,
        or it has polled while chunks are in flight. more: other chunks wait until the engine has
        room (NO_ROOM). The caller must call this after each chunk that ends, or chunks may hang.
        """

    def poll(self, submission: Submission) -> bool:
        """Whether a chunk is done. Raises KVFerryError if it failed.

        It must not be polled again after True or an error.
        """

    def unpackable_blocks(self, submission: Submission) -> Int64s:
        """The positions in a chunk's extent of GPU blocks that could not be packed: what is in host
        memory are not their bytes. For a store of a packed layout that is done."""

    def elapsed(self, first: Submission, last: Submission, before: Submission | None) -> float:
        """Seconds on the device from the start of chunk `first` to the end of chunk `last`.

        Both must be done. before: a chunk that was submitted before `first`; the time until its end
        is not counted.
        """

    def copying(self, mapping: Mapping) -> tuple[GroupCopying, ...]:
        """The copy mode of each group of a mapping, for the status report."""

    def shutdown(self) -> None:
        """Release the device. No chunk may be in flight."""


def packed_locations(layout: LayoutArrays) -> tuple[list[int], int]:
    """The byte offset of each tensor in one allocation that holds all of them, and its size."""
    offsets, at = [], 0
    for span in layout.span_bytes:
        offsets.append(at)
        at = -(-(at + span) // ALIGNMENT) * ALIGNMENT
    return offsets, at
