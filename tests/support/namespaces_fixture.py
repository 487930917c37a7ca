"""NamespacesFixture: a core with namespaces, for example-based tests.

Keys are single letters; b"abc" stands for three keys. In LAYOUT a host block is one GPU block, and
the namespace has four host blocks. In WIDE and HYBRID a host block is three GPU blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from kvferry.daemon.core.actions import (
    Action,
    Broadcast,
    CopyPlan,
    FreeDeferred,
    MapTensors,
    PublishKVEvents,
    Report,
    SendMessage,
    SendStream,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.core import Core, PoolBounds
from kvferry.daemon.core.epochs import Epochs
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.ports import Ports
from kvferry.daemon.core.siblings import NO_SIBLINGS, Siblings
from kvferry.daemon.core.tier_actions import TierDescription
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.protocol import make_hello
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    TransferSpec,
)
from support.committed_blocks import commit_all
from support.own_epochs import OwnEpochs, with_syncs
from support.region_records_model import RegionRecordsModel

PAGE = 1024
REGION_BYTES = 4 * PAGE
POOL = 16 * REGION_BYTES
ROW = TensorLayout(16, PAGE, PAGE)
LAYOUT = KVLayout((ROW,), ((TensorRef(0, PAGE),),))
WIDE = KVLayout((ROW,), ((TensorRef(0, PAGE),),), 3)
HYBRID = KVLayout((ROW, ROW), ((TensorRef(0, PAGE),), (TensorRef(1, PAGE // 2),)), 3)
FINGERPRINT = Fingerprint("llama", PAGE, block_size=16, key_bytes=1)
FINGERPRINT_OF_THREE = Fingerprint("llama", 3 * PAGE, key_bytes=1)
OTHER = Fingerprint("qwen", PAGE, key_bytes=1)
DEVICE = proto_status.DeviceInfo("cpu", "cpu", "host memory")
FAULT = ErrorInfo(Code.COPY_FAILED, "the copy failed")
DONE, FAILED, CANCELLED = Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED
NOT_DONE = pytest.mark.parametrize("outcome", [FAILED, CANCELLED])


def each(letters: bytes) -> tuple[bytes, ...]:
    return tuple(letters[at : at + 1] for at in range(len(letters)))


def by_key(letters: bytes) -> KeyLoadStoreSpec:
    return KeyLoadStoreSpec(each(letters))


def blocks(ids: Sequence[int], *groups: tuple[int, int]) -> GPULoadStoreSpec:
    """GPU blocks. groups: (number of blocks, index of the first block) of each group."""
    if not groups:
        return GPULoadStoreSpec(ids)
    sizes, indices = zip(*groups, strict=True)
    return GPULoadStoreSpec(ids, sizes, indices)


def store(letters: bytes, gpu: GPULoadStoreSpec | None = None) -> TransferSpec:
    return gpu or blocks(range(len(letters))), by_key(letters)


def load(letters: bytes, gpu: GPULoadStoreSpec | None = None) -> TransferSpec:
    return by_key(letters), gpu or blocks(range(len(letters)))


class NamespacesFixture:
    """A core and short methods for the tests.

    Sessions are named engine/process. The sessions given to the constructor are in the namespace,
    and the first session of an engine has registered it.
    """

    def __init__(
        self,
        *sessions: str,
        fingerprint: Fingerprint = FINGERPRINT,
        layout: KVLayout = LAYOUT,
        quota: int | None = REGION_BYTES,
        policy: str = "lru",
        threshold: int = 1,
        pool_bytes: int = POOL,
        tiers: tuple[str | TierDescription, ...] = (),
        epochs: Epochs | None = None,
        siblings: Siblings = NO_SIBLINGS,
    ) -> None:
        limits = proto_status.Limits(1 << 20, 1 << 10, 64)
        self.epochs: Epochs = OwnEpochs() if epochs is None else epochs
        self.now = 100.0
        # Seconds between two messages: epochs are adopted with each. Epochs are synced at once.
        self.step, self.syncs = 1.0, True
        self.core = Core(
            DaemonIdentity("0.1", "boot", 4711, DEVICE, limits, 100.0),
            PoolBounds(pool_bytes),
            Ports(
                self.epochs,
                tuple(TierDescription(t) if isinstance(t, str) else t for t in tiers),
                siblings,
            ),
        )
        self.region_records = RegionRecordsModel()
        self.commits = True
        self.job_ids = count(1)
        self.registrations: dict[str, int] = {}
        for session in sessions:
            self.open_namespace(session, fingerprint, quota, policy, threshold)
            if session.partition("/")[0] not in self.registrations:
                self.register(session, layout)

    def open_sessions(self, *sessions: str) -> None:
        for session in sessions:
            engine = session.partition("/")[0]
            self.core.open_session(session, make_hello(session, engine))

    def send(self, session: str, message: wire.ClientMessage) -> list[Any]:
        """Send a message. The first one opens its session."""
        if session not in self.core.sessions:
            self.open_sessions(session)
        self.now += self.step
        actions = self.core.handle(session, message, self.now)
        if self.syncs:
            actions = with_syncs(self.core, actions, self.now)
        return self.region_records.observe(actions)

    def advance(self) -> list[Any]:
        """Nothing happens until the core's deadline."""
        assert self.core.deadline is not None
        self.now = self.core.deadline
        return self.region_records.observe(self.core.advance(self.now))

    def report(self, report: Report) -> list[Any]:
        """Report to the core. If `commits`, stored blocks get their checksums at once."""
        actions = self.core.report(report)
        for namespace in self.core._namespaces if self.commits else ():
            commit_all(namespace.region.table)
        return self.region_records.observe(actions)

    def error(self, session: str, message: wire.ClientMessage) -> tuple[str, str]:
        """The code with which a request is refused, and the value."""
        (action,) = self.send(session, message)
        assert isinstance(action.message, wire.Error)
        assert action.session == session
        assert action.message.request_id == getattr(message, "request_id", None)
        return action.message.error.code, action.message.error.value

    # Namespaces

    def open_namespace(
        self,
        session: str,
        fingerprint: Fingerprint = FINGERPRINT,
        quota: int | None = REGION_BYTES,
        policy: str = "lru",
        threshold: int = 1,
    ) -> wire.Opened:
        answer, *_ = self.send(
            session, wire.OpenNamespace(7, fingerprint, quota, policy, threshold)
        )
        assert isinstance(answer, SendMessage)
        assert isinstance(answer.message, wire.Opened)
        assert (answer.session, answer.message.request_id) == (session, 7)
        return answer.message

    def register(self, session: str, layout: KVLayout = LAYOUT) -> memory.HostRegion:
        (mapping,) = self.send(session, wire.AllocateKVCaches(8, layout))
        assert isinstance(mapping, MapTensors)
        self.registrations[session.partition("/")[0]] = mapping.registration
        (action,) = self.report(TensorsMapped(mapping.registration, session))
        assert isinstance(action, SendMessage)
        assert isinstance(action.message, wire.Allocated)
        return action.message.region

    def close_sessions(self, *sessions: str) -> None:
        """Close sessions, unmap the tensors that they registered, and release their pins."""
        for session in sessions:
            for action in self.core.close_session(session):
                if isinstance(action, UnmapTensors):
                    self.report(TensorsUnmapped(action.registration))
                elif isinstance(action, FreeDeferred):
                    free_all(action)

    def namespaces(self) -> tuple[proto_status.NamespaceStatus, ...]:
        (action,) = self.send("observer", wire.NamespacesRequest(9))
        self.core.close_session("observer")
        assert action == SendMessage(
            "observer", wire.NamespacesReport(9, action.message.namespaces)
        )
        return tuple(action.message.namespaces)

    def usage(self, *names: str) -> tuple[Any, ...]:
        """Fields of the status of the only namespace."""
        (status,) = self.namespaces()
        return tuple(getattr(status, name) for name in names)

    def snapshot(self, session: str) -> tuple[bytes, bytes]:
        """The ready and the pending letters of the snapshot that a subscriber receives."""
        stream = self.send(session, wire.Subscribe())[-1]
        assert isinstance(stream, SendStream)
        letters = {False: b"", True: b""}
        for part in stream.messages:
            assert isinstance(part, wire.Snapshot)
            letters[part.pending] += b"".join(part.keys)
        return bytes(sorted(letters[False])), bytes(sorted(letters[True]))

    # Transfers

    def submit(self, session: str, spec: TransferSpec) -> list[Any]:
        return self.send(session, wire.Submit(next(self.job_ids), *spec))

    def start(self, session: str, spec: TransferSpec) -> CopyPlan:
        action, *_ = self.submit(session, spec)
        assert isinstance(action, StartTransfer)
        return action.plan

    def refused(self, session: str, spec: TransferSpec) -> str:
        """The code with which a transfer is refused."""
        (action,) = self.submit(session, spec)
        (result,) = action.message.results
        assert (action.session, result.outcome) == (session, Outcome.REFUSED)
        return str(result.error.code)

    def end(self, plan: CopyPlan, outcome: Outcome = DONE) -> list[Any]:
        return self.report(
            TransferCompleted(plan.serial, outcome, error=FAULT if outcome == FAILED else None)
        )

    def stored(self, session: str, letters: bytes, gpu: GPULoadStoreSpec | None = None) -> CopyPlan:
        plan = self.start(session, store(letters, gpu))
        self.end(plan)
        return plan

    def loadable(self, session: str, letters: bytes = b"abcdefgh") -> bytes:
        """The letters that can be loaded. Does not change the LRU order."""
        found = b""
        for letter in each(letters):
            action, *_ = self.submit(session, load(letter))
            if isinstance(action, StartTransfer):
                found += letter
                self.end(action.plan, CANCELLED)
            else:
                assert action.message.results[0].error.code == Code.KEY_ABSENT
        return found


def free_all(action: FreeDeferred) -> int:
    """Free all deferred objects. Returns the number of steps."""
    return next(number for number in count(1) if not action.deferred.free_some())


def copies(plan: CopyPlan) -> list[tuple[int, int, int]]:
    """(group, GPU block, pool offset) of every copy of a plan."""
    return [
        (run.group, int(block), int(offset))
        for run in plan.extents
        for block, offset in zip(run.gpu_blocks, run.host_offsets, strict=True)
    ]


def gpu_blocks(plan: CopyPlan) -> list[int]:
    return [block for _, block, _ in copies(plan)]


def offsets(plan: CopyPlan) -> list[int]:
    return [offset for _, _, offset in copies(plan)]


def key_events_of(
    actions: Sequence[Action], kind: type[Broadcast] | type[PublishKVEvents] = Broadcast
) -> Any:
    """[(kind, letters)] of the only KeyEvents among actions; None if there is none."""
    found = [
        a.message if isinstance(a, Broadcast) else a.key_events for a in actions if type(a) is kind
    ]
    if not found:
        return None
    (key_events,) = found
    return [(str(event.kind), b"".join(event.keys)) for event in key_events.events]


def stored_in_part() -> NamespacesFixture:
    """Host blocks of three GPU blocks. Stored: 1 and 2 of a, all of b, 0 and 1 of c, 1 of d."""
    fixture = NamespacesFixture("a", fingerprint=FINGERPRINT_OF_THREE, layout=WIDE, quota=12 * PAGE)
    fixture.stored("a", b"abc", blocks(range(7), (7, 1)))
    fixture.stored("a", b"d", blocks([0], (1, 4)))
    return fixture
