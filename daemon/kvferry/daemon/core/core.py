"""The core: decides which actions follow from a message of a client or from a report.

`handle` takes a message, `report` a report. Both return actions (actions.py), and neither blocks. A
request is checked completely before any state changes. If a check raises Refused, the reply is an
Error, and it is counted. Called by the server, on the event loop only.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from kvferry.daemon.core.actions import (
    Action,
    BlocksCorrupted,
    BlocksVerified,
    CloseSession,
    OwnRequest,
    Report,
    SendMessage,
    SendStatus,
    TensorsUnmapped,
)
from kvferry.daemon.core.dispatch import MessageTable, ReportTable
from kvferry.daemon.core.engine_owners import EngineOwners
from kvferry.daemon.core.grants import Grants, RegionRequest
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.layout import split_spec
from kvferry.daemon.core.lending import Lending
from kvferry.daemon.core.namespaces import Namespaces
from kvferry.daemon.core.ports import Ports
from kvferry.daemon.core.prefix_hints import PrefixHints
from kvferry.daemon.core.promotions import Promotions
from kvferry.daemon.core.records import KeptTensorsRecord, RecoveredRegion
from kvferry.daemon.core.refused_engines import RefusedEngines
from kvferry.daemon.core.region import Region
from kvferry.daemon.core.regions import MAX_REGIONS, Regions
from kvferry.daemon.core.registration import OWN_SESSION
from kvferry.daemon.core.registrations import Registrations
from kvferry.daemon.core.resets import Resets
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.core.tier_actions import BlocksWritten, FetchReleased, TimedReport
from kvferry.daemon.core.transfers import JobObserver, Transfers
from kvferry.daemon.core.writes import Writes
from kvferry.proto import messages as wire
from kvferry.proto import status as wire_status
from kvferry.proto.errors import Code, ErrorInfo, Gone, KVFerryError, Refused
from kvferry.proto.protocol import format_protocol, protocol_number
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import Direction

# Stories of corrupt blocks that are kept.
MOST_CORRUPT = 4
# After these, something that a waiting request needs may be free.
_FREEING = TensorsUnmapped, FetchReleased, BlocksWritten
# Messages that a daemon refuses while it stops.
_REFUSED_AT_STOP = wire.Submit | RegionRequest


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """The host pool. own_bytes: bytes at its front for the daemon's own blocks."""

    nbytes: int
    own_bytes: int = 0
    max_regions: int = MAX_REGIONS


class Core:
    """All bookkeeping of a daemon.

    ports: what it asks of others. observe_job: see transfers.JobObserver.

    errors: their number by code. writes: what the tiers take to write it. Every method is called on
    the event loop and returns without blocking.
    """

    def __init__(
        self,
        identity: DaemonIdentity,
        pool: PoolBounds,
        ports: Ports,
        observe_job: JobObserver = lambda *_: None,
    ) -> None:
        self.identity = identity
        self.stopping = False
        self.errors: Counter[str] = Counter()
        # Stories of the last corrupt blocks.
        self.corrupt = deque[str](maxlen=MOST_CORRUPT)
        # Of the last message, or of a later report.
        self._now = 0.0
        self._owners = EngineOwners()
        self._regions = Regions(pool.nbytes, pool.own_bytes, pool.max_regions)
        self._namespaces = Namespaces(self._regions, ports)
        self.resets = Resets(self._namespaces, ports.epochs, ports.tiers)
        self._hints = PrefixHints(self._namespaces)
        self._promotions = Promotions(self._namespaces, ports.tiers)
        self.lending = Lending(self._namespaces, is_enabled=ports.siblings.is_enabled)
        self.writes = Writes(self._namespaces, ports.tiers)
        regions, namespaces = self._regions, self._namespaces
        self._registrations = Registrations(regions, namespaces, self._owners, self.errors)
        self._transfers = Transfers(self._registrations, identity.limits, observe_job, self.errors)
        self._grants = Grants(namespaces, self._registrations, self._owners)
        self._messages: MessageTable = {
            **self._transfers.messages,
            **self._namespaces.messages,
            **self._hints.messages,
            **self._promotions.messages,
            **self.resets.messages,
            **self.lending.messages,
            **self._grants.messages,
            **self._registrations.messages,
            **self._own_messages,
        }
        self._reports: ReportTable = {
            **self._transfers.reports,
            **self._promotions.reports,
            **self.resets.reports,
            **self.writes.reports,
            **self._registrations.reports,
            BlocksVerified: self._handle_verified,
            BlocksCorrupted: self._handle_corrupted,
        }

    @property
    def sessions(self) -> tuple[str, ...]:
        """Sessions of clients, without the daemon's own."""
        return tuple(self._owners)

    @property
    def refused_engines(self) -> RefusedEngines:
        """Engines whose last request for memory was refused."""
        return self._grants.refused

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
            self._owners.add_session(session, hello.engine, uid)
        except Refused as refused:
            return [SendMessage(session, self.refusal_reply(None, refused))]
        me = self.identity
        reply = wire.Welcome(
            protocol, me.boot_id, session, me.version, me.pid, me.device, me.limits
        )
        return [SendMessage(session, reply)]

    def handle(self, session: str, message: wire.ClientMessage, now: float) -> list[Action]:
        """Handle one message of an open session. now: time.monotonic() in seconds."""
        self._now = max(self._now, now)
        actions = self._namespaces.adopt_epochs(now)
        try:
            if self.stopping and isinstance(message, _REFUSED_AT_STOP):
                raise self._shutting_down()
            actions += self._messages[type(message)](session, message, now)
        except KVFerryError as error:
            actions.append(SendMessage(session, self.refusal_reply(message, error, session)))
        return self._with_changes(actions)

    def advance(self, now: float) -> list[Action]:
        """Perform the work that waits for a time. The server calls this at `deadline`.

        now: time.monotonic() in seconds.
        """
        self._now = max(self._now, now)
        self._hints.expire(now)
        return self._with_changes(self._namespaces.adopt_epochs(now))

    @property
    def deadline(self) -> float | None:
        """The time at which the server must call `advance`; None: it need not."""
        deadlines = self._namespaces.deadline, self.resets.deadline, self._hints.deadline
        return min((each for each in deadlines if each is not None), default=None)

    def _with_changes(self, actions: list[Action]) -> list[Action]:
        """Actions, after changes for persistence, and before key events and the resets that are
        done."""
        changes, events = self._regions.take_changes(), self._namespaces.take_key_events()
        return [*changes, *actions, *events, *self.resets.take_done(self._now)]

    def report(self, report: Report) -> list[Action]:
        """Handle a report of the device worker, of persistence or of the tiers."""
        if isinstance(report, OwnRequest):
            return self.handle(OWN_SESSION, report.message, self._now)
        handler = self._reports.get(type(report))
        if handler is None:  # it is for observability
            return []
        if isinstance(report, TimedReport):
            self._now = max(self._now, report.now)
        actions = handler(report)
        return self._with_changes(actions + self._retry_requests(report))

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
        self._owners.remove_session(session)
        self._grants.close_session(session)
        self._promotions.close_session(session)
        self.resets.close_session(session)
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
            self._grants.note_refused(session, error)
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
        if not self._owners.is_own(session):
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

    @property
    def _own_messages(self) -> MessageTable:
        return {
            wire.StatusRequest: lambda session, message, _: [
                SendStatus(session, message.request_id)
            ],
            wire.NamespacesRequest: self._report_namespaces,
            wire.Goodbye: self._say_goodbye,
            wire.Hello: self._refuse_hello,
        }

    def _report_namespaces(
        self, session: str, message: wire.NamespacesRequest, _now: float
    ) -> list[Action]:
        report = wire.NamespacesReport(message.request_id, self.namespaces())
        return [SendMessage(session, report)]

    def _say_goodbye(self, session: str, _message: wire.Goodbye, _now: float) -> list[Action]:
        return [SendMessage(session, wire.Goodbye()), *self.close_session(session)]

    def _refuse_hello(self, session: str, _message: wire.Hello, _now: float) -> list[Action]:
        engine = self._owners.engine_of(session)
        text = f"engine {engine!r} sent a second Hello; send one Hello per connection"
        raise Refused(Code.BAD_MESSAGE, text, engine)

    def _handle_verified(self, report: BlocksVerified) -> list[Action]:
        region = self._regions.get(report.owner)
        if region is None:
            return []
        if region.states is not None:
            region.states.mark_verified(report.blocks)
        else:
            self._namespaces.mark_verified(report)
        return []

    def _handle_corrupted(self, report: BlocksCorrupted) -> list[Action]:
        """Host blocks are corrupt: they are no longer loadable, and loads in flight fail."""
        self.errors[Code.CORRUPT_BLOCK] += report.blocks.size
        region = self._regions.get(report.owner)
        if region is None:
            return []
        first, owner = int(report.blocks[0]), report.owner
        story = f"{owner.kind} {owner.name}, host block {first}: {region.table.story.of(first)}"
        self.corrupt.append(story)
        self._transfers.mark_corrupted(report)
        if region.states is not None:
            region.states.discard_blocks(report.blocks)
        else:
            self._namespaces.mark_corrupted(report)
        return []

    def _shutting_down(self) -> Gone:
        daemon = f"pid {self.identity.pid}"
        message = f"the daemon ({daemon}) is stopping; connect again once it is restarted"
        return Gone(Code.SHUTTING_DOWN, message, daemon)

    def _retry_requests(self, report: Report) -> list[Action]:
        """If something was freed, try the waiting requests again, in order."""
        actions = list[Action]()
        if not isinstance(report, _FREEING):
            return actions
        for session, message in self._grants.take_waiting().items():
            try:
                if self.stopping:
                    raise self._shutting_down()
                actions += self._grants.grant(session, message, self._now)
            except KVFerryError as error:
                actions.append(SendMessage(session, self.refusal_reply(message, error, session)))
        return actions


def _refused_job(message: wire.Submit, error: ErrorInfo) -> JobResult:
    try:
        direction = split_spec(message.src, message.dst)[0]
    except Refused:
        direction = Direction.STORE
    return JobResult(message.job_id, direction, Outcome.REFUSED, error=error)
