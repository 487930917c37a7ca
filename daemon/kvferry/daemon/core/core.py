"""The core: decides which actions follow from a message of a client or from a report.

`handle` takes a message, `report` a report. Both return actions (actions.py), and neither blocks. A
request is checked completely before any state changes. If a check raises Refused, the reply is an
Error, and it is counted. Called by the server, on the event loop only.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from kvferry.daemon.core.actions import (
    Action,
    BlocksCorrupted,
    BlocksVerified,
    CloseSession,
    Continue,
    CopyCalibrated,
    OwnRequest,
    Pong,
    PoolRegistered,
    Report,
    SendMessage,
    SendStatus,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
)
from kvferry.daemon.core.engine_owners import EngineOwners
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.layout import split_spec
from kvferry.daemon.core.lending import Lending
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.ports import NO_PORTS, Ports
from kvferry.daemon.core.promotions import Promotions
from kvferry.daemon.core.records import KeptTensorsRecord, RecoveredRegion
from kvferry.daemon.core.refused_engines import RefusedEngines
from kvferry.daemon.core.region import Region
from kvferry.daemon.core.regions import MAX_REGIONS, Regions
from kvferry.daemon.core.registration import OWN, OWN_SESSION
from kvferry.daemon.core.registrations import Registrations
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    BlocksWritten,
    FetchReleased,
    KeysFound,
    StoreDropped,
    StoreDroppedElsewhere,
)
from kvferry.daemon.core.transfers import JobObserver, Transfers
from kvferry.daemon.core.writes import Writes
from kvferry.proto import messages as wire
from kvferry.proto import status as wire_status
from kvferry.proto.errors import Code, ErrorInfo, Gone, KVFerryError, Refused
from kvferry.proto.lending import LendingMessage
from kvferry.proto.protocol import format_protocol, protocol_number
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import Direction

RegionRequest: TypeAlias = wire.OpenNamespace | wire.RegisterKVCaches | wire.AllocateKVCaches
_RETRYABLE = Code.POOL_FULL, Code.ALREADY_REGISTERED


class Core:
    """All bookkeeping of a daemon.

    own_bytes: bytes at the front of the pool for the daemon's own blocks. observe_job: see
    transfers.JobObserver.

    errors: their number by code. writes: what the tiers take to write it. Every method is called on
    the event loop and returns without blocking.
    """

    def __init__(
        self,
        identity: DaemonIdentity,
        pool_bytes: int,
        own_bytes: int = 0,
        max_regions: int = MAX_REGIONS,
        observe_job: JobObserver = lambda *_: None,
        ports: Ports = NO_PORTS,
    ) -> None:
        self.identity = identity
        self.stopping = False
        self.errors: Counter[str] = Counter()
        self.refused_engines = RefusedEngines()
        # The engine of each session.
        self._engines: dict[str, str] = {OWN_SESSION: OWN}
        self._owners = EngineOwners()
        # Requests, by session, that wait until a closing registration or a tier frees what they
        # need.
        self._waiting_requests: dict[str, RegionRequest] = {}
        self._regions = Regions(pool_bytes, own_bytes, max_regions)
        self._namespaces = Namespaces(self._regions, ports)
        self._promotions = Promotions(self._namespaces, ports.tiers)
        self.lending = Lending(self._namespaces, is_enabled=ports.siblings.is_enabled)
        self.writes = Writes(self._namespaces, ports.tiers)
        self._registrations = Registrations(self._regions, self._namespaces, self._owners)
        self._transfers = Transfers(self._registrations, identity.limits, observe_job)

    @property
    def sessions(self) -> tuple[str, ...]:
        """Sessions of clients, without the daemon's own."""
        return tuple(name for name, engine in self._engines.items() if engine != OWN)

    @property
    def busy(self) -> bool:
        """Whether a job is in flight, or memory is being mapped or unmapped."""
        return len(self._transfers) > 0 or self._registrations.is_mapping

    def open_session(self, session: str, hello: wire.Hello, uid: int | None = None) -> list[Action]:
        """Open the session of a client process of user `uid`, or reply why not."""
        protocol = protocol_number()
        if not hello.protocol_min <= protocol <= hello.protocol_max:
            theirs = format_protocol(hello.protocol_max)
            message = (
                f"the client is another build of kvferry (protocol {theirs}) than this daemon "
                f"({self.identity.version}, protocol {format_protocol(protocol)}); install the "
                "same build on both sides, and restart both"
            )
            error: KVFerryError = Refused(Code.PROTOCOL_VERSION, message, theirs)
            return [SendMessage(session, self.refusal_reply(None, error))]
        if self.stopping:
            return [SendMessage(session, self.refusal_reply(None, self._shutting_down()))]
        try:
            self._owners.add_session(hello.engine, uid)
        except Refused as refused:
            return [SendMessage(session, self.refusal_reply(None, refused))]
        self._engines[session] = hello.engine
        me = self.identity
        reply = wire.Welcome(
            protocol, me.boot_id, session, me.version, me.pid, me.device, me.limits
        )
        return [SendMessage(session, reply)]

    def handle(self, session: str, message: wire.ClientMessage, now: float) -> list[Action]:
        """Handle one message of an open session. now: time.monotonic() in seconds."""
        try:
            actions = self._dispatch(session, self._engines[session], message, now)
        except KVFerryError as error:
            return [
                *self._regions.take_changes(),
                SendMessage(session, self.refusal_reply(message, error, session)),
                *self._namespaces.take_key_events(),
            ]
        return [*self._regions.take_changes(), *actions, *self._namespaces.take_key_events()]

    def report(self, report: Report) -> list[Action]:
        """Handle a report of the device worker, of persistence or of the tiers."""
        match report:
            case TransferCompleted():
                actions, error = self._transfers.end_transfer(report)
            case TensorsMapped():
                actions, error = self._registrations.finish_mapping(report)
            case TensorsUnmapped(number):
                unmapped = self._registrations.finish_unmapping(number)
                actions, error = [*unmapped, *self._retry_requests()], None
            case BlocksVerified():
                self._handle_verified(report)
                actions, error = [], None
            case BlocksCorrupted():
                self._handle_corrupted(report)
                actions, error = [], None
            case Pong() | CopyCalibrated() | PoolRegistered():  # for observability
                return []
            case OwnRequest(message):
                return self.handle(OWN_SESSION, message, now=0.0)
            case KeysFound():
                actions, error = self._promotions.handle_found(report), None
            case BlocksFetched():
                self._promotions.end_fetch(report)
                actions, error = [], None
            case FetchReleased():
                self._promotions.release_fetch(report)
                actions, error = self._retry_requests(), None
            case BlocksWritten():
                written = self.writes.end_write(report)
                actions, error = [*written, *self._retry_requests()], None
            case StoreDropped() | StoreDroppedElsewhere():
                actions, error = self._promotions.handle_drop(report), None
            case Continue(command):
                return [command]
        if error is not None:
            self.errors[error.code] += 1
        return [*self._regions.take_changes(), *actions, *self._namespaces.take_key_events()]

    def restore_region(self, found: RecoveredRegion) -> Region:
        """Restore a region of an earlier daemon, before the first session.

        If it raises Refused, nothing has changed.
        """
        if found.record.layout is None:
            return self._namespaces.restore_namespace(found)
        return self._regions.restore_region(found)

    def restore_kept_tensors(self, record: KeptTensorsRecord) -> int:
        """Restore kept tensors of an earlier daemon, after its regions.

        Return the number under which the device worker must hold them. If it raises Refused,
        nothing has changed.
        """
        return self._registrations.restore_kept_tensors(record)

    def close_session(self, session: str) -> list[Action]:
        """Close a session: cancel its jobs and unmap what it registered."""
        self._owners.remove_session(self._engines.pop(session))
        self._waiting_requests.pop(session, None)
        self._namespaces.region_wanted = bool(self._waiting_requests)
        self._promotions.close_session(session)
        deferred = self._namespaces.close_session(session)
        moved = self._transfers.moved_bytes.pop(session, 0)
        cancels, unfinished = self._transfers.close_session(session)
        return [
            CloseSession(session, unfinished, moved),
            *cancels,
            *self._registrations.close_session(session),
            *deferred,
        ]

    def stop(self) -> None:
        """Refuse new requests from now on; accepted jobs still end."""
        self.stopping = True

    def cancel_all_transfers(self) -> list[Action]:
        """Cancel all jobs in flight."""
        return self._transfers.cancel_all()

    def refusal_reply(
        self, message: wire.ClientMessage | None, error: KVFerryError, session: str = ""
    ) -> wire.DaemonMessage:
        """The reply to a refused message; counts the error."""
        if isinstance(message, RegionRequest) and isinstance(error, Refused):
            self.refused_engines.add(self._engines[session], error.info)
        if isinstance(message, wire.Submit):
            self._count_error(error, session)
            return wire.Finished((_refused_job(message, error.info),))
        return self.error_reply(error, getattr(message, "request_id", None), session)

    def error_reply(
        self, error: KVFerryError, request_id: int | None = None, session: str = ""
    ) -> wire.Error:
        """The reply to a refused request that is not a job; counts the error."""
        self._count_error(error, session)
        return wire.Error(request_id, error.info)

    def _count_error(self, error: KVFerryError, session: str) -> None:
        if self._engines.get(session) != OWN:
            self.errors[error.code] += 1

    # Numbers of the status

    def tier_counters(self) -> dict[str, dict[str, float]]:
        """Fields of TierStatus that the core counts, by the name of the tier."""
        return self._promotions.counters()

    @property
    def pool_bytes(self) -> int:
        return self._regions.pool_bytes

    @property
    def own_bytes(self) -> int:
        """The part of the pool that is the daemon's own."""
        return self._regions.own_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all regions, without the daemon's own."""
        return self._regions.reserved_bytes

    def totals(self) -> wire_status.Totals:
        return wire_status.Totals(**self._transfers.totals)

    def engines(self) -> tuple[wire_status.EngineStatus, ...]:
        return self._registrations.status(self._transfers.count_by_engine())

    def used_contents(self) -> list[NamespaceContents]:
        """Of the namespaces in use, what siblings must have, too."""
        return self._namespaces.used_contents()

    def namespaces(self) -> tuple[wire_status.NamespaceStatus, ...]:
        return self._namespaces.status()

    def _dispatch(
        self, session: str, engine: str, message: wire.ClientMessage, now: float
    ) -> list[Action]:
        match message:
            case wire.Submit():
                self._check_running()
                return self._transfers.submit_transfer(session, engine, message, now)
            case wire.Cancel(job_ids):
                return self._transfers.cancel_transfers(engine, job_ids)
            case wire.Wait():
                return self._transfers.add_wait(session, engine, message)
            case wire.FindInTiers():
                return self._promotions.find_keys(session, message, now)
            case wire.Reset(request_id):
                reset = self._namespaces.handle_message(session, message)
                return [*reset, *self._promotions.drop_store(session, request_id)]
            case message if isinstance(message, LendingMessage):
                return self.lending.handle(session, message)
            case wire.Subscribe() | wire.Pin() | wire.Unpin() | wire.Touch():
                return self._namespaces.handle_message(session, message)
            case wire.StatusRequest(request_id):
                return [SendStatus(session, request_id)]
            case wire.NamespacesRequest(request_id):
                return [SendMessage(session, wire.NamespacesReport(request_id, self.namespaces()))]
            case wire.OpenNamespace() | wire.RegisterKVCaches() | wire.AllocateKVCaches():
                return self._grant_region(session, engine, message)
            case wire.ReleaseKVCaches():
                return self._registrations.release_kept_tensors(session, message)
            case wire.Goodbye():
                return [SendMessage(session, wire.Goodbye()), *self.close_session(session)]
            case wire.Hello():
                text = f"engine {engine!r} sent a second Hello; send one Hello per connection"
                raise Refused(Code.BAD_MESSAGE, text, engine)

    def _handle_verified(self, report: BlocksVerified) -> None:
        region = self._regions.get(report.owner)
        if region is None:
            return
        if region.states is not None:
            region.states.mark_verified(report.blocks)
        else:
            self._namespaces.mark_verified(report)

    def _handle_corrupted(self, report: BlocksCorrupted) -> None:
        """Host blocks are corrupt: they are no longer loadable, and loads in flight fail."""
        self.errors[Code.CORRUPT_BLOCK] += report.blocks.size
        region = self._regions.get(report.owner)
        if region is None:
            return
        self._transfers.mark_corrupted(report)
        if region.states is not None:
            region.states.discard_blocks(report.blocks)
        else:
            self._namespaces.mark_corrupted(report)

    def _check_running(self) -> None:
        if self.stopping:
            raise self._shutting_down()

    def _shutting_down(self) -> Gone:
        daemon = f"pid {self.identity.pid}"
        message = f"the daemon ({daemon}) is stopping; connect again once it is restarted"
        return Gone(Code.SHUTTING_DOWN, message, daemon)

    def _grant_region(self, session: str, engine: str, message: RegionRequest) -> list[Action]:
        """Grant a request, or keep it waiting if what it needs may soon be free: held by a closing
        registration, or by tiers in a namespace that nobody uses. A new region that is all that is
        free always waits for them."""
        self._check_running()
        if session in self._waiting_requests:
            waiting = type(self._waiting_requests[session]).__name__
            error = f"{waiting} of engine {engine!r} has no reply yet; wait for it, then try again"
            raise Refused(Code.BUSY, error, waiting)
        held = self._namespaces.any_held_by_tiers or self._registrations.is_closing
        if held and self._registrations.wants_all_free(session, engine, message):
            return self._keep_waiting(session, message)
        try:
            if isinstance(message, wire.OpenNamespace):
                opened = self._namespaces.open_namespace(session, engine, message)
                granted = self._registrations.release_orphaned() + opened
            else:
                granted = self._registrations.register_tensors(session, engine, message)
            self.refused_engines.remove(engine)
            return granted
        except Refused as refused:
            held = refused.code == Code.POOL_FULL and self._namespaces.any_held_by_tiers
            closing = refused.code in _RETRYABLE and self._registrations.is_closing
            if not (held or closing):
                raise
            return self._keep_waiting(session, message)

    def _keep_waiting(self, session: str, message: RegionRequest) -> list[Action]:
        self._waiting_requests[session] = message
        self._namespaces.region_wanted = True
        return []

    def _retry_requests(self) -> list[Action]:
        """Something was freed: try the waiting requests again, in order."""
        actions = list[Action]()
        waiting, self._waiting_requests = self._waiting_requests, {}
        self._namespaces.region_wanted = False
        for session, message in waiting.items():
            try:
                actions += self._grant_region(session, self._engines[session], message)
            except KVFerryError as error:
                actions.append(SendMessage(session, self.refusal_reply(message, error, session)))
        return actions


def _refused_job(message: wire.Submit, error: ErrorInfo) -> JobResult:
    try:
        direction = split_spec(message.src, message.dst)[0]
    except Refused:
        direction = Direction.STORE
    return JobResult(message.job_id, direction, Outcome.REFUSED, error=error)
