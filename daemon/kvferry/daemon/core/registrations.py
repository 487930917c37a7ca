"""All registrations of engines: their states, names and regions.

A registration (registration.py) is in exactly one of three states:

    opening  --TensorsMapped-->  open  --session closed-->  closing  --TensorsUnmapped-->  removed
       \\______________ session closed ______________/

Only an open one accepts transfers. A closing one still holds its engine's name and host blocks, so
that no late copy of it writes into blocks of the next owner. Tensors that must outlive their
registration become kept tensors (kept_tensors.py) when it is unmapped. Called by the core, on the
event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

from kvferry.daemon.core.actions import (
    Action,
    MapTensors,
    SendMessage,
    TensorsMapped,
    TensorsUnmapped,
    UnmapTensors,
)
from kvferry.daemon.core.dispatch import MessageTable, ReportTable
from kvferry.daemon.core.engine_owners import EngineOwners
from kvferry.daemon.core.hazards import HazardTracker
from kvferry.daemon.core.kept_tensors import KeptTensorsTable
from kvferry.daemon.core.layout import BlockLayout
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.records import (
    KeptTensorsRecord,
    RegionRecord,
    engine_owner,
    namespace_owner,
)
from kvferry.daemon.core.region import Region
from kvferry.daemon.core.regions import Regions
from kvferry.daemon.core.registration import (
    OWN,
    Registration,
    RegistrationRequest,
    RegistrationTerms,
    check_layout,
)
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import HostRegion
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    DaemonMessage,
    Error,
    OpenNamespace,
    Registered,
    RegisterKVCaches,
    Released,
    ReleaseKVCaches,
)
from kvferry.proto.status import EngineStatus, GroupCopying


class Registrations:
    """All registrations by state, at most one per engine. Iteration: those that have a name.

    errors: number of errors by code.
    """

    def __init__(
        self,
        regions: Regions,
        namespaces: Namespaces,
        owners: EngineOwners,
        errors: Counter[str],
    ) -> None:
        self._regions, self._namespaces = regions, namespaces
        self._owners, self._errors = owners, errors
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

    @property
    def messages(self) -> MessageTable:
        return {ReleaseKVCaches: self.release_kept_tensors}

    @property
    def reports(self) -> ReportTable:
        return {TensorsMapped: self.finish_mapping, TensorsUnmapped: self.finish_unmapping}

    def engine_of(self, session: str) -> str:
        return self._owners.engine_of(session)

    def require_open(self, engine: str) -> Registration:
        """The open registration of an engine. Raises Refused (NOT_REGISTERED)."""
        registration = self._by_engine.get(engine)
        if registration is None or registration.number not in self._open:
            message = f"engine {engine!r} has no KV caches registered; register them first"
            raise Refused(Code.NOT_REGISTERED, message, engine)
        return registration

    def status(self, in_flight: Counter[str]) -> tuple[EngineStatus, ...]:
        """Engines with a registration, with a deserted region, or only with kept tensors.

        in_flight: jobs of each engine.
        """
        clients = [each for each in self if each.engine != OWN]
        will_keep = {each.engine: each.kept_bytes for each in clients if each.kept_bytes}
        kept = self._kept_tensors.bytes_by_engine() | will_keep
        copying: dict[str, tuple[GroupCopying, ...]] = {}
        # Whether it is present, its host blocks, and the bytes of each. The last entry counts.
        hosts = dict.fromkeys(kept, (False, 0, 0))
        for region in self._regions:
            if region.owner.kind == "engine":
                block_bytes = region.contents.host_block_bytes
                hosts[region.owner.name] = False, region.num_blocks, block_bytes
        for each in clients:
            hosts[each.engine] = True, each.host.num_blocks, each.host.block_bytes
            copying[each.engine] = each.copying
        return tuple(
            EngineStatus(name, *host, in_flight[name], copying.get(name, ()), kept.get(name, 0))
            for name, host in hosts.items()
        )

    def is_open(self, registration: Registration) -> bool:
        return registration.number in self._open

    def wants_all_free(
        self, session: str, engine: str, request: RegistrationRequest | OpenNamespace
    ) -> bool:
        """Whether a request creates a region without a size."""
        if isinstance(request, OpenNamespace):
            owner, nbytes = namespace_owner(request.fingerprint.name), request.quota_bytes
        elif engine != OWN and self._namespaces.namespace_of(session) is None:
            owner, nbytes = engine_owner(engine), request.host_bytes
        else:
            return False
        return nbytes is None and self._regions.get(owner) is None

    def register_tensors(
        self, session: str, engine: str, request: RegistrationRequest
    ) -> list[Action]:
        """Start mapping an engine's tensors; the client gets its reply on TensorsMapped.

        If it raises Refused, nothing has changed.
        """
        layout_arrays = check_layout(request)
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
        reuse, dropped = self._kept_tensors.match_request(registration, request)
        number, layout = registration.number, registration.layout
        if isinstance(request, AllocateKVCaches):
            timeline, keep = request.timeline, request.keep
            mapping = MapTensors(number, session, layout, (), None, timeline, keep, reuse)
        else:
            shared = request.allocations, request.locations
            mapping = MapTensors(number, session, layout, *shared, request.timeline)
        return [*dropped, *self.release_orphaned(), mapping]

    def finish_mapping(self, report: TensorsMapped) -> list[Action]:
        """Reply to the client whose tensors were mapped or not."""
        registration = self._opening.pop(report.registration, None)
        if registration is None:  # its session has ended; TensorsUnmapped follows
            return []
        request_id = registration.terms.request_id
        if report.error is not None:
            self._free_name(registration)
            if registration.engine != OWN:
                self._errors[report.error.code] += 1
            return [SendMessage(registration.session, Error(request_id, report.error))]
        registration.copying = report.copying
        registration.was_open = True
        self._open[registration.number] = registration
        reply: DaemonMessage = Registered(request_id, registration.host)
        dropped: list[Action] = []
        if registration.terms.allocated:
            dropped = self._kept_tensors.take_over_allocated(registration, report)
            shared = report.allocations, report.locations
            reply = Allocated(request_id, registration.host, *shared, report.reused)
        return [*dropped, SendMessage(registration.session, reply)]

    def restore_kept_tensors(self, record: KeptTensorsRecord) -> int:
        """Hold tensors that an earlier daemon kept; return the number to hold them under.

        Raises Refused (NOT_REGISTERED) if their engine's host blocks were not restored.
        """
        return self._kept_tensors.restore_tensors(record, self._numbers)

    def release_kept_tensors(
        self, session: str, message: ReleaseKVCaches, _now: float
    ) -> list[Action]:
        """Stop keeping an engine's tensors, and its region or that of a namespace if requested.

        Raises Refused: NOT_REGISTERED if nothing is kept, ALREADY_REGISTERED if it is in use.
        """
        name, host_bytes = message.engine, 0
        current = self._by_engine.get(name)
        if message.host_memory:
            host_bytes = self._release_region(name, current)
        actions, nbytes = self._kept_tensors.release_engine(name, current)
        if not nbytes + host_bytes:
            what = "nothing is kept for engine or namespace" if message.host_memory else ""
            text = (
                f"{what or 'no tensors are kept for engine'} {name!r}; see kvferry status for "
                "those that have some"
            )
            raise Refused(Code.NOT_REGISTERED, text, name)
        reply = SendMessage(session, Released(message.request_id, nbytes + host_bytes))
        return [*actions, *self.release_orphaned(), reply]

    def release_orphaned(self) -> list[Action]:
        """Release kept tensors whose host blocks now belong to another owner."""
        return self._kept_tensors.release_orphaned()

    def close_session(self, session: str) -> list[Action]:
        """Start to unmap the registrations of a closed session."""
        actions: list[Action] = []
        for table in (self._opening, self._open):
            for registration in [r for r in table.values() if r.session == session]:
                self._closing[registration.number] = table.pop(registration.number)
                actions.append(UnmapTensors(registration.number))
        return actions

    def finish_unmapping(self, report: TensorsUnmapped) -> list[Action]:
        """Remove an unmapped registration; its engine's name is free again."""
        registration = self._closing.pop(report.registration)
        self._free_name(registration)
        return self._kept_tensors.end_registration(registration)

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
            _check_unpacked(layout_arrays)
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

    def _release_region(self, name: str, current: Registration | None) -> int:
        """Free the region of an engine or a namespace, now or when the engine disconnects; return
        its bytes. current: the engine's registration. Raises Refused (ALREADY_REGISTERED)."""
        owner = engine_owner(name)
        region = self._regions.get(owner) or self._regions.get(namespace_owner(name))
        if region is None:
            return 0
        if current is not None and region.owner == owner:
            current.frees_region = True
        elif region.present:
            text = f"{region.owner.kind} {name!r} is in use; stop its engines, then try again"
            raise Refused(Code.ALREADY_REGISTERED, text, name)
        else:
            self._regions.free_region(region.owner)
        return region.nbytes

    def _free_name(self, registration: Registration) -> None:
        """Free the engine's name. Its region stays if the bytes in it are the engine's."""
        del self._by_engine[registration.engine]
        if registration.engine == OWN:
            return
        if registration.namespace is not None:
            self._namespaces.remove_registration(registration.namespace, registration.number)
        elif not registration.frees_region and (
            registration.was_open or registration.host.reattached
        ):
            self._regions.mark_deserted(engine_owner(registration.engine))
        else:
            self._regions.free_region(engine_owner(registration.engine))


def _check_unpacked(layout_arrays: LayoutArrays) -> None:
    """Raise Refused for packed host blocks without keys: some blocks may be left out of a store."""
    if layout_arrays.packed:
        message = (
            "packed host blocks need a namespace; open one before registering, or register without "
            "`packed`"
        )
        raise Refused(Code.BAD_LAYOUT, message, True)
