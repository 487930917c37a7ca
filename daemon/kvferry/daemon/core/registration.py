"""One registration: an engine's mapped tensors and what belongs to them.

`check_layout` checks a request before anything is created for it. Called by registrations.py, on
the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvferry.daemon.core.aliasing import sharers_of, slot_bases
from kvferry.daemon.core.hazards import HazardTracker
from kvferry.daemon.core.layout import BlockLayout, Extent
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.region import Region
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import AllocateKVCaches, RegisterKVCaches
from kvferry.proto.specs import MAX_COUNT, Direction
from kvferry.proto.status import GroupCopying

RegistrationRequest: TypeAlias = RegisterKVCaches | AllocateKVCaches

# The name of the daemon's own engine, whose region is the front of the pool. No client has it.
OWN = ""
# The daemon's own session.
OWN_SESSION = "own"


@dataclass(frozen=True, slots=True)
class RegistrationTerms:
    """The parts of a request that are needed later, without its large handles and layout.

    allocated: the daemon allocates the tensors. keep: they must outlive the registration.
    """

    request_id: int
    allocated: bool
    keep: bool
    has_timeline: bool


@dataclass(slots=True, eq=False)
class Registration:
    """host: as reported to the client. was_open: whether its tensors were ever mapped."""

    number: int
    engine: str
    session: str
    terms: RegistrationTerms
    layout: BlockLayout
    host: HostRegion
    region: Region
    hazards: HazardTracker
    namespace: Namespace | None = None
    was_open: bool = False
    copying: tuple[GroupCopying, ...] = ()
    # Owner's uid.
    uid: int | None = None
    # Bytes of its tensors that are kept when it ends.
    kept_bytes: int = 0
    # Whether its region is freed when it ends.
    frees_region: bool = False

    @property
    def has_timeline(self) -> bool:
        return self.terms.has_timeline

    def mode(self, direction: Direction, extents: tuple[Extent, ...]) -> str:
        """The copy mode of a transfer: that of its first group."""
        group = extents[0].group if extents else 0
        if group >= len(self.copying):
            return "unknown"
        copying = self.copying[group]
        return copying.store if direction is Direction.STORE else copying.load


def check_layout(request: RegistrationRequest) -> LayoutArrays:
    """Return the layout of a request. Raises Refused (BAD_LAYOUT).

    Every tensor must lie in its allocation, and tensors to be allocated must have a possible size.
    """
    layout_arrays = LayoutArrays.from_layout(request.layout)
    slot_bases(layout_arrays)
    sharers_of(layout_arrays)
    if isinstance(request, AllocateKVCaches):
        nbytes = sum(layout_arrays.span_bytes)
        if nbytes >= MAX_COUNT:
            message = (
                f"the tensors take {nbytes} bytes, more than any device; allocate fewer blocks"
            )
            raise Refused(Code.BAD_LAYOUT, message, nbytes)
        return layout_arrays
    tensors, allocations = layout_arrays.num_tensors, request.allocations
    if len(request.locations) != tensors:
        raise Refused(
            Code.BAD_LAYOUT,
            f"{len(request.locations)} locations were given for {tensors} tensors; give one "
            "location per tensor",
            len(request.locations),
        )
    for index, (span, location) in enumerate(
        zip(layout_arrays.span_bytes, request.locations, strict=True)
    ):
        if location.allocation >= len(allocations):
            raise Refused(
                Code.BAD_LAYOUT,
                f"tensor {index} lies in allocation {location.allocation}, but {len(allocations)} "
                "allocations were given; use indices from 0",
                location.allocation,
            )
        end, size = location.offset + span, allocations[location.allocation].size
        if end > size:
            raise Refused(
                Code.BAD_LAYOUT,
                f"tensor {index} ends at byte {end}, beyond its {size}-byte allocation; correct "
                "its offset or its layout",
                end,
            )
    return layout_arrays
