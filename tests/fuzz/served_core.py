"""A core behind a server, a device worker and tiers that obey it, for messages of any kind.

They check what holds for every message: each request has one reply, each job one result, each reply
can be encoded and decoded, and a transfer stays within its region and its tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kvferry.daemon.core import actions as acts
from kvferry.daemon.core import tier_actions as tiers
from kvferry.daemon.core.actions import Action, CopyPlan
from kvferry.daemon.core.core import Core, PoolBounds
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.ports import Ports
from kvferry.daemon.core.resets import PUBLISH_SECONDS
from kvferry.daemon.core.tier_actions import TierDescription
from kvferry.proto import messages as wire
from kvferry.proto.codec import decode_daemon_message, encode
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.lending import MemoryLent
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from kvferry.proto.status import DeviceInfo, Limits
from support.committed_blocks import commit_all
from support.own_epochs import OwnEpochs
from support.region_records_model import RegionRecordsModel

POOL = 1 << 18
FAULT = ErrorInfo(Code.COPY_FAILED, "the copy failed")
TIERS = TierDescription("disk"), TierDescription("store", is_shared=True)
# Of one stream: a snapshot has few parts.
MAX_PARTS = 100


class ServedCore:
    """A core, and everything around it that has not ended yet."""

    def __init__(self) -> None:
        limits = Limits(1 << 20, 1 << 10, 16)
        self.core = Core(
            DaemonIdentity("0.1", "boot", 4711, DeviceInfo("cpu", "cpu", "host memory"), limits, 1),
            PoolBounds(POOL),
            Ports(OwnEpochs(), TIERS),
        )
        self.records = RegionRecordsModel()
        # Performs what the core has for persistence.
        self.persist: Callable[[acts.RegionChange], None] = lambda _: None
        self.now = 100.0
        self.sessions: list[str] = []
        self.mapping: list[acts.MapTensors] = []
        self.unmapping: list[int] = []
        self.plans: list[CopyPlan] = []
        self.searches: list[tiers.FindKeys] = []
        self.fetches: list[tiers.FetchBlocks] = []
        self.held_fetches: list[int] = []
        self.writes: list[tiers.WriteJob] = []
        self.syncs: list[tiers.SyncEpochs] = []
        self._layouts: dict[int, acts.MapTensors] = {}
        # Replies that are due, by session and what they repeat.
        self._due = Counter[tuple[str, Any]]()

    # Messages

    def connect(self, session: str, engine: str) -> None:
        if session not in self.sessions and session not in self.core.sessions:
            self.sessions.append(session)
            before = len(self.core.sessions)
            self.perform(self.core.open_session(session, make_hello(session, engine), 1000))
            if len(self.core.sessions) == before:
                self.sessions.remove(session)

    def receive(self, session: str, message: wire.ClientMessage) -> None:
        if session not in self.core.sessions:
            return
        request = getattr(message, "request_id", None)
        if isinstance(message, wire.Submit):
            self._due[session, ("job", message.job_id)] += 1
        elif request is not None:
            self._due[session, request] += 1
        self.now += 1.0
        self.perform(self.core.handle(session, message, self.now))

    def disconnect(self, session: str) -> None:
        if session in self.core.sessions:
            self.perform(self.core.close_session(session))

    def advance(self) -> None:
        """Nothing happens until the core's deadline."""
        if (deadline := self.core.deadline) is not None:
            self.now = max(self.now, deadline)
            self.perform(self.core.advance(self.now))

    # Reports

    def report(self, report: acts.Report) -> None:
        self.perform(self.core.report(report))

    def end_mapping(self, at: int, *, works: bool) -> None:
        action = self.mapping.pop(at)
        error = None if works else ErrorInfo(Code.MAP_FAILED, "no memory")
        self.report(acts.TensorsMapped(action.registration, action.session, error))

    def end_transfer(self, at: int, outcome: Outcome) -> None:
        plan = self.plans.pop(at)
        error = FAULT if outcome is Outcome.FAILED else None
        self.report(acts.TransferCompleted(plan.serial, outcome, 0.0, error))
        for _, region in self.records.regions.values():
            commit_all(region.table)

    def end_unmapping(self, at: int) -> None:
        """Transfers of the registration end first."""
        number = self.unmapping[at]
        for plan in [each for each in self.plans if each.registration == number]:
            self.end_transfer(self.plans.index(plan), Outcome.CANCELLED)
        for action in [each for each in self.mapping if each.registration == number]:
            self.end_mapping(self.mapping.index(action), works=True)
        self.unmapping.remove(number)
        self.report(acts.TensorsUnmapped(number))

    def end_search(self, at: int, tier_of: int) -> None:
        search = self.searches.pop(at)
        found = tuple((tier_of + n) % (len(TIERS) + 1) - 1 for n in range(len(search.keys)))
        self.report(tiers.KeysFound(search.search, found, (1e9,) * 2, (0.0,) * 2, (True,) * 2))

    def end_fetch(self, at: int, *, works: bool) -> None:
        fetch = self.fetches.pop(at)
        self.held_fetches.append(fetch.fetch)
        self.report(tiers.BlocksFetched(fetch.fetch, (works,) * len(fetch.keys)))

    def release_fetch(self, at: int) -> None:
        self.report(tiers.FetchReleased(self.held_fetches.pop(at)))

    def write_out(self, tier: int) -> None:
        self.writes += self.core.writes.take_writes(tier % len(TIERS), 1 << 20, 1.0)

    def end_write(self, at: int, *, works: bool) -> None:
        job = self.writes.pop(at)
        self.report(tiers.BlocksWritten(job.number, (works,) * len(job.keys)))

    def end_sync(self, at: int) -> None:
        del self.syncs[at]
        self.report(tiers.EpochsSynced(now=self.now))

    def settle(self) -> None:
        """The shared tier has the epochs of this host."""
        asked = self.core.resets.epochs_in_use()
        shared = next(at for at, tier in enumerate(TIERS) if tier.is_shared)
        self.report(tiers.EpochsSettled(tier=shared, asked=asked, found=asked, now=self.now))

    def finish(self) -> None:
        """Everything that was begun ends. Then no reply is due, and the core is idle."""
        while self._end_one():
            pass
        self.now += 2 * PUBLISH_SECONDS  # an unreachable shared tier holds up a reset so long
        self.perform(self.core.advance(self.now))
        left = {key: count for key, count in self._due.items() if count}
        assert not left, f"requests without a reply: {left}"
        for session in tuple(self.core.sessions):
            self.disconnect(session)
        while self._end_one():
            pass
        assert not self.core.busy
        assert not self.core.sessions
        for _, region in self.records.regions.values():
            assert not region.present, "a region is in use by nobody"

    def _end_one(self) -> bool:
        if self.plans:
            self.end_transfer(0, Outcome.DONE)
        elif self.mapping:
            self.end_mapping(0, works=True)
        elif self.unmapping:
            self.end_unmapping(0)
        elif self.searches:
            self.end_search(0, 1)
        elif self.fetches:
            self.end_fetch(0, works=True)
        elif self.held_fetches:
            self.release_fetch(0)
        elif self.writes:
            self.end_write(0, works=True)
        elif self.syncs:
            self.end_sync(0)
        else:
            return False
        return True

    # Actions

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, acts.RegionChange):
                self.persist(action)
        for action in self.records.observe(actions):
            match action:
                case acts.SendMessage(session, message):
                    self._check_reply(session, message)
                case acts.SendStatus(session, request_id):
                    self._note_reply(session, request_id)
                case acts.SendStream(_, messages):
                    self._check_stream(messages)
                case acts.Broadcast(_, message):
                    _check_encoding(message)
                case acts.PublishKVEvents(_, _, message):
                    _check_encoding(message)
                case acts.CloseSession(session):
                    self.sessions.remove(session)
                    self._due = Counter({k: n for k, n in self._due.items() if k[0] != session})
                case acts.FreeDeferred(deferred):
                    while deferred.free_some():
                        pass
                case _:
                    self._begin(action)

    def _begin(self, action: Action) -> None:
        """Begin what ends with a report."""
        match action:
            case acts.MapTensors():
                self.mapping.append(action)
                self._layouts[action.registration] = action
            case acts.UnmapTensors(number):
                self.unmapping.append(number)
            case acts.StartTransfer(plan=plan):
                self._check_plan(plan)
                self.plans.append(plan)
            case tiers.FindKeys():
                self.searches.append(action)
            case tiers.SyncEpochs():
                self.syncs.append(action)
            case tiers.FetchBlocks():
                self.fetches.append(action)
            case tiers.LendMemory(session, request_id):
                self._check_reply(session, MemoryLent(request_id))

    def _check_reply(self, session: str, message: wire.DaemonMessage) -> None:
        _check_encoding(message)
        match message:
            case wire.Finished(results):
                for result in results:
                    self._note_reply(session, ("job", result.job_id))
            case wire.Error(None) | wire.Welcome() | wire.Goodbye():
                pass
            case _:
                self._note_reply(session, getattr(message, "request_id"))  # noqa: B009

    def _note_reply(self, session: str, request: Any) -> None:
        self._due[session, request] -= 1
        assert self._due[session, request] >= 0, f"a second reply to {request}"

    def _check_stream(self, messages: Iterator[wire.DaemonMessage]) -> None:
        parts = list(messages)
        assert 0 < len(parts) < MAX_PARTS
        for part in parts:
            _check_encoding(part)

    def _check_plan(self, plan: CopyPlan) -> None:
        layout = self._layouts[plan.registration].layout
        blocks = layout._blocks
        for extent in plan.extents:
            nbytes = layout.group_bytes[extent.group]
            assert extent.gpu_blocks.size == extent.host_offsets.size > 0
            assert 0 <= extent.gpu_blocks.min() <= extent.gpu_blocks.max() < blocks[extent.group]
            assert extent.host_offsets.min() >= 0
            assert extent.host_offsets.max() + nbytes <= POOL


def _check_encoding(message: wire.DaemonMessage) -> None:
    data = encode(message)
    assert encode(decode_daemon_message(data)) == data
