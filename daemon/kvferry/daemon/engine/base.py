"""What the lane knows of a device: it maps memory, and moves pieces of it on ordered streams.

A piece is some GPU blocks of one group. `submit` takes one and returns at once; pieces of one
direction are done in the order submitted, the two directions overlap. `push` follows every round of
submits: an engine may start some of them together, or later. `poll` tells whether a piece is done.
All calls but `pin` and `unpin` come from the lane's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import Allocation, Location
from kvferry.proto.specs import Direction
from kvferry.proto.status import CopyStatus, DeviceInfo, GroupCopying

Ticket: TypeAlias = object
"""One submitted piece, as its engine knows it."""


@dataclass(slots=True, eq=False)
class Mapping:
    """One registration's tensors, reachable from this process."""

    geometry: BlockLayout
    bases: Int64s
    """(tensors,) address of each canonical tensor's first byte."""
    handles: list[object] = field(default_factory=list)
    """What the engine needs to let the memory go."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors that were allocated here, and how others reach them.

    The descriptors are the caller's. They are all that the memory needs to live: kept open, they
    outlast the mapping, this process and its engine.
    """

    mapping: Mapping
    allocations: tuple[Allocation, ...]
    locations: tuple[Location, ...]
    descriptors: tuple[int, ...]
    """File descriptors that FdAllocations refer to by position."""


class Want(msgspec.Struct, frozen=True):
    """What the lane has to move next: of which group, how many bytes, and whether alone."""

    group: int
    nbytes: int
    contended: bool
    """The other direction has work too."""


class Room(msgspec.Struct, frozen=True):
    """A piece that the engine takes now, at most."""

    nbytes: int
    blocks: int = 1 << 20


NO_ROOM = Room(0)


class CopyEngine(Protocol):
    info: DeviceInfo
    numa_node: int | None
    """That the device is near to, where it is to any."""

    def attach(self, pool_address: int, aside: AbstractContextManager[None]) -> CopyStatus | None:
        """Called once, first, from the lane's thread: make the device usable there.

        Returns what a calibration found, where there is something to choose.

        aside: to be in while the device is given many fragments of stores, which takes it long.
            Whoever has `enter`ed may submit and push loads meanwhile.
        """

    def enter(self) -> None:
        """The calling thread will submit pieces, too, in turns with the lane's."""

    def pin(self, address: int, nbytes: int) -> None:
        """Make a chunk of the host pool fit for copies. From any thread; raises KVFerryError."""

    def unpin(self, address: int) -> None:
        """Take back what `pin` did to the chunk at `address`. From any thread."""

    def open(
        self,
        geometry: BlockLayout,
        allocations: Sequence[Allocation],
        locations: Sequence[Location],
        descriptors: Sequence[int],
    ) -> Mapping:
        """Map an engine's own tensors. Raises KVFerryError, and nothing stays mapped."""

    def allocate(self, geometry: BlockLayout, kept: Sequence[int] = ()) -> Shared:
        """Allocate tensors of a layout here. Raises KVFerryError, and nothing stays allocated.

        kept: the descriptors of tensors of the same layout that were allocated before, by whatever
            daemon: they are mapped again, bytes and all. They stay the caller's. Raises Failed
            (MAP_FAILED) where they are not of such tensors.
        """

    def close(self, mapping: Mapping) -> None:
        """Let a mapping's memory go; no piece of it is in flight any more."""

    def prepare(self, direction: Direction, mapping: Mapping, run: Extent) -> None:
        """Make ready what the pieces of a run will need when it is their turn. From any thread."""

    def full(self, direction: Direction) -> bool:
        """Whether enough is in flight for now, whatever is wanted next."""

    def room(self, direction: Direction, mapping: Mapping, want: Want) -> Room:
        """How much of this to submit next; no bytes where it has to wait until a piece is done."""

    def submit(self, direction: Direction, mapping: Mapping, run: Extent) -> Ticket:
        """Enqueue a piece within `room`. Raises KVFerryError where the device refuses it."""

    def wants_push(self, direction: Direction) -> bool:
        """Whether to `push` before more is submitted, so that the device has something to do
        meanwhile."""

    def push(self, direction: Direction, more: bool) -> bool:
        """Called after each round of submits, also an empty one, while any is in flight or waits,
        and again until it returns False: there was nothing left to do. It does a little each time,
        so that something else may come between.

        more: the round ended because there was no room. What was submitted gets done in any case,
        as long as this is called again whenever a piece of the direction is done.
        """

    def unsent(self, direction: Direction) -> int:
        """How many pieces, the last ones submitted, the link was not given yet."""

    def poll(self, ticket: Ticket) -> bool:
        """Whether a piece is done. Once True or raised, it is not asked for again."""

    def elapsed(self, first: Ticket, last: Ticket, after: Ticket | None) -> float:
        """Seconds on the device from the begin of one piece to the end of another, both done.

        Time in which the piece `after`, submitted before them, still ran is not theirs.
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
