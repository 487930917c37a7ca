"""Registrations: an engine's mapped tensors, its region of the host pool, its order of transfers.

A registration is in exactly one of three states:

    opening  --TensorsMapped-->  open  --session closed-->  closing  --TensorsUnmapped-->  removed
       \\______________ session closed ______________/

Only an open one accepts transfers. A closing one still holds its engine's name and host blocks, so
that no late copy of it writes into blocks of the next owner. Tensors that must outlive their
registration become kept tensors (kept_tensors.py) when it is unmapped. Called by the core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from kvferry.daemon.core.actions import (
    Action,
    KeepTensors,
    MapTensors,
    ReleaseTensors,
    SendMessage,
    TensorsMapped,
    UnmapTensors,
)
from kvferry.daemon.core.aliasing import sharers_of, slot_bases
from kvferry.daemon.core.engine_owners import EngineOwners
from kvferry.daemon.core.hazards import HazardTracker
from kvferry.daemon.core.kept_tensors import KeptTensors, KeptTensorsTable
from kvferry.daemon.core.layout import BlockLayout, Extent
from kvferry.daemon.core.namespace import Namespace
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.records import KeptTensorsRecord, RegionRecord, engine_owner
from kvferry.daemon.core.regions import Region, Regions
from kvferry.proto.errors import Code, ErrorInfo, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import FdAllocation, HostRegion
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    DaemonMessage,
    Error,
    Registered,
    RegisterKVCaches,
    Released,
    ReleaseKVCaches,
)
from kvferry.proto.specs import MAX_COUNT, Direction
from kvferry.proto.status import GroupCopying

RegistrationRequest: TypeAlias = RegisterKVCaches | AllocateKVCaches

# The name of the daemon's own engine, whose region is the front of the pool. No client has it.
OWN = ""


@dataclass(frozen=True, slots=True)
class RegistrationTerms:
    """The parts of a request that are needed later; its handles and layout are large.

    allocated: the daemon allocates the tensors. keep: they must outlast the registration.
    """

    request_id: int
    allocated: bool
    keep: bool
    has_timeline: bool


@dataclass(slots=True, eq=False)
class Registration:
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

    @property
    def has_timeline(self) -> bool:
        return self.terms.has_timeline

    def mode(self, direction: Direction, extents: tuple[Extent, ...]) -> str:
        """How a transfer is copied: as its first group is."""
        group = extents[0].group if extents else 0
        if group >= len(self.copying):
            return "unknown"
        way = self.copying[group]
        return way.store if direction is Direction.STORE else way.load


class Registrations:
    """All registrations, by state."""

    def __init__(
        self, regions: Regions, namespaces: Namespaces, owners: EngineOwners | None = None
    ) -> None:
        self._regions = regions
        self._owners = owners or EngineOwners()
        self._namespaces = namespaces
        self._kept_tensors = KeptTensorsTable(regions)
        self._opening: dict[int, Registration] = {}
        self._open: dict[int, Registration] = {}
        self._closing: dict[int, Registration] = {}
        self._by_engine: dict[str, Registration] = {}
        self._numbers = count(1)

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._by_engine.values())

    @property
    def is_mapping(self) -> bool:
        """Whether memory of a registration is being mapped or unmapped."""
        return bool(self._opening or self._closing)

    @property
    def is_closing(self) -> bool:
        """Whether a closing registration will free a name or host blocks."""
        return bool(self._closing)

    def require_open(self, engine: str) -> Registration:
        """The open registration of an engine. Raises Refused (NOT_REGISTERED)."""
        registration = self._by_engine.get(engine)
        if registration is None or registration.number not in self._open:
            message = f"engine {engine!r} has no KV caches registered; register them first"
            raise Refused(Code.NOT_REGISTERED, message, engine)
        return registration

    def copying_of(self, engine: str) -> tuple[GroupCopying, ...]:
        current = self._by_engine.get(engine)
        return () if current is None else current.copying

    def kept_bytes_by_engine(self) -> dict[str, int]:
        """Bytes of kept tensors per engine, including those that will be kept."""
        kept = dict(self._kept_tensors)
        for registration in self:
            if registration.kept_bytes:
                kept[registration.engine] = registration.kept_bytes
        return kept

    def is_open(self, registration: Registration) -> bool:
        return registration.number in self._open

    def register_tensors(
        self, session: str, engine: str, request: RegistrationRequest
    ) -> list[Action]:
        """Start mapping an engine's tensors; the client gets its reply on TensorsMapped.

        If it raises Refused, nothing has changed.
        """
        layout_arrays = _checked_layout(request)
        current = self._by_engine.get(engine)
        if current is not None:
            message = (
                f"another process has registered KV caches as engine {engine!r}; give each engine "
                "its own name"
            )
            if current.session == session:
                message = (
                    f"this client has already registered KV caches as engine {engine!r}; connect "
                    "a new client to register others"
                )
            raise Refused(Code.ALREADY_REGISTERED, message, engine)
        registration = self._create_registration(session, engine, layout_arrays, request)
        reuse, dropped = self._match_kept_tensors(registration, request)
        number, layout = registration.number, registration.layout
        if isinstance(request, AllocateKVCaches):
            clock, keep = request.timeline, request.keep
            wanted = MapTensors(number, session, layout, (), None, clock, keep, reuse)
        else:
            where = request.allocations, request.locations
            wanted = MapTensors(number, session, layout, *where, request.timeline)
        return [*dropped, *self.release_orphaned(), wanted]

    def finish_mapping(self, report: TensorsMapped) -> tuple[list[Action], ErrorInfo | None]:
        """Reply to the client whose tensors were mapped or not. Return an error to be counted."""
        registration = self._opening.pop(report.registration, None)
        if registration is None:  # its session was closed meanwhile; TensorsUnmapped follows
            return [], None
        request_id = registration.terms.request_id
        if report.error is not None:
            self._free_name(registration)
            told = None if registration.engine == OWN else report.error
            return [SendMessage(registration.session, Error(request_id, report.error))], told
        registration.copying = report.copying
        registration.was_open = True
        self._open[registration.number] = registration
        reply: DaemonMessage = Registered(request_id, registration.host)
        dropped: list[Action] = []
        if registration.terms.allocated:
            dropped = self._hand_over_tensors(registration, report)
            where = report.allocations, report.locations
            reply = Allocated(request_id, registration.host, *where, report.reused)
        return [*dropped, SendMessage(registration.session, reply)], None

    def restore_kept_tensors(self, record: KeptTensorsRecord) -> int:
        """Hold tensors that an earlier daemon kept; return the number to hold them under.

        Raises Refused (NOT_REGISTERED) if their engine's host blocks were not restored.
        """
        region = self._regions.get(record.owner)
        if region is None or self._kept_tensors.find_tensors(record.engine) is not None:
            message = f"the host blocks of engine {record.engine!r} were not restored"
            raise Refused(Code.NOT_REGISTERED, message, record.engine)
        number = next(self._numbers)
        kept = KeptTensors(number, record.layout, record.nbytes, region, record.uid)
        self._kept_tensors.add_tensors(record.engine, kept)
        return number

    def release_kept_tensors(self, session: str, message: ReleaseKVCaches) -> list[Action]:
        """Stop keeping an engine's tensors. Raises Refused (NOT_REGISTERED) if none are kept."""
        current, kept = (
            self._by_engine.get(message.engine),
            self._kept_tensors.remove_tensors(message.engine),
        )
        actions = _release_all(kept)
        nbytes = 0 if kept is None else kept.nbytes
        if current is not None and current.kept_bytes:
            actions.append(ReleaseTensors(current.number))
            nbytes, current.kept_bytes = nbytes + current.kept_bytes, 0
        if not actions:
            raise Refused(
                Code.NOT_REGISTERED,
                f"no tensors are kept for engine {message.engine!r}; see kvferry status for the "
                "engines that have some",
                message.engine,
            )
        return [*actions, SendMessage(session, Released(message.request_id, nbytes))]

    def release_orphaned(self) -> list[Action]:
        """Release kept tensors whose host blocks now belong to another owner."""
        return _release_all(*self._kept_tensors.remove_orphaned())

    def close_session(self, session: str) -> list[Action]:
        """Start to unmap the registrations of a closed session."""
        actions: list[Action] = []
        for place in (self._opening, self._open):
            for registration in [r for r in place.values() if r.session == session]:
                self._closing[registration.number] = place.pop(registration.number)
                actions.append(UnmapTensors(registration.number))
        return actions

    def finish_unmapping(self, number: int) -> list[Action]:
        """Remove an unmapped registration; its engine's name is free again."""
        registration = self._closing.pop(number)
        self._free_name(registration)
        return self._keep_or_release(registration)

    def _match_kept_tensors(
        self, registration: Registration, request: RegistrationRequest
    ) -> tuple[int | None, list[Action]]:
        """Under which number an engine's kept tensors are held; drop them if they do not fit."""
        kept = self._kept_tensors.find_tensors(registration.engine)
        if kept is None:
            return None, []
        same = (kept.region.owner, kept.uid) == (registration.region.owner, registration.uid)
        if same and _may_reuse(kept, registration.layout.layout_arrays, request):
            kept.region = registration.region
            return kept.number, []
        return None, _release_all(self._kept_tensors.remove_tensors(registration.engine))

    def _hand_over_tensors(self, registration: Registration, report: TensorsMapped) -> list[Action]:
        """Release an engine's kept tensors now that it has tensors; keep the new ones if asked."""
        dropped = _release_all(self._kept_tensors.remove_tensors(registration.engine))
        if not registration.terms.keep:
            return dropped
        nbytes = registration.kept_bytes = sum(place.size for place in report.allocations)
        engine, layout_arrays = registration.engine, registration.layout.layout_arrays
        record = KeptTensorsRecord(
            engine, layout_arrays, nbytes, registration.region.owner, registration.uid
        )
        return [KeepTensors(registration.number, record, report.held), *dropped]

    def _keep_or_release(self, registration: Registration) -> list[Action]:
        """Keep the tensors of a removed registration, or release them."""
        number, layout_arrays = registration.number, registration.layout.layout_arrays
        if registration.kept_bytes:
            kept = KeptTensors(
                number,
                layout_arrays,
                registration.kept_bytes,
                registration.region,
                registration.uid,
            )
            self._kept_tensors.add_tensors(registration.engine, kept)
        elif registration.terms.keep:
            return [ReleaseTensors(number)]
        return []

    def _create_registration(
        self, session: str, engine: str, layout_arrays: LayoutArrays, request: RegistrationRequest
    ) -> Registration:
        number = next(self._numbers)
        namespace, reattached = self._namespaces.namespace_of(session), False
        if namespace is not None:
            namespace.add_registration(number, layout_arrays, request.host_bytes)
            self._regions.record_updated(namespace.record)
            region = namespace.region
        else:
            region, reattached = self._assign_region(engine, layout_arrays, request.host_bytes)
        locations = request.locations if isinstance(request, RegisterKVCaches) else None
        block_bytes = region.contents.host_block_bytes
        layout = BlockLayout(layout_arrays, region.start, region.num_blocks, locations, block_bytes)
        host = HostRegion(region.num_blocks, block_bytes, reattached)
        hazards = HazardTracker(layout.gpu_slots, region.num_blocks)
        allocated = isinstance(request, AllocateKVCaches)
        keep, has_timeline = getattr(request, "keep", False), request.timeline is not None
        terms = RegistrationTerms(request.request_id, allocated, keep, has_timeline)
        registration = Registration(
            number, engine, session, terms, layout, host, region, hazards, namespace
        )
        registration.uid = self._owners.uid_of(engine)
        self._opening[registration.number] = registration
        self._by_engine[engine] = registration
        return registration

    def _assign_region(
        self, engine: str, layout_arrays: LayoutArrays, nbytes: int | None
    ) -> tuple[Region, bool]:
        """A region, and whether it is the one that the engine had before. Raises Refused."""
        owner = engine_owner(engine)
        if engine == OWN:
            return Region(owner, layout_arrays, 0, self._regions.own_bytes), False
        uid = self._owners.uid_of(engine)
        region, reattached = self._regions.assign_region(owner, layout_arrays, nbytes, uid)
        if not reattached:
            self._regions.record_created(
                RegionRecord(engine, region.start, region.nbytes, layout_arrays, uid=uid)
            )
        return region, reattached

    def _free_name(self, registration: Registration) -> None:
        """Free the engine's name. Its region stays if the bytes in it are the engine's."""
        del self._by_engine[registration.engine]
        if registration.engine == OWN:
            return
        if registration.namespace is not None:
            self._namespaces.remove_registration(registration.namespace, registration.number)
        elif registration.was_open or registration.host.reattached:
            self._regions.mark_deserted(engine_owner(registration.engine))
        else:
            self._regions.free_region(engine_owner(registration.engine))


def _may_reuse(
    kept: KeptTensors, layout_arrays: LayoutArrays, request: RegistrationRequest
) -> bool:
    """Whether a request asks for the held tensors, or registers what may be the same memory."""
    if layout_arrays != kept.layout_arrays:
        return False
    if isinstance(request, AllocateKVCaches):
        return True
    return all(isinstance(allocation, FdAllocation) for allocation in request.allocations)


def _release_all(*tensors: KeptTensors | None) -> list[Action]:
    return [ReleaseTensors(kept.number) for kept in tensors if kept is not None]


def _checked_layout(request: RegistrationRequest) -> LayoutArrays:
    """The layout of a request, checked; every tensor lies in its allocation. Raises Refused."""
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
    for index, (span, place) in enumerate(
        zip(layout_arrays.span_bytes, request.locations, strict=True)
    ):
        if place.allocation >= len(allocations):
            raise Refused(
                Code.BAD_LAYOUT,
                f"tensor {index} lies in allocation {place.allocation}, but {len(allocations)} "
                "allocations were given; use indices from 0",
                place.allocation,
            )
        end, size = place.offset + span, allocations[place.allocation].size
        if end > size:
            raise Refused(
                Code.BAD_LAYOUT,
                f"tensor {index} ends at byte {end}, beyond its {size}-byte allocation; correct "
                "its offset or its layout",
                end,
            )
    return layout_arrays
