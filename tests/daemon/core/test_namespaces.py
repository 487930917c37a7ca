"""Namespaces by example: who enters which, what is stored and loaded by key, who is told what.

Keys are single letters, and b"abc" are three of them. In LAYOUT a key is one GPU block, and the
namespace has room for four; where host blocks of several GPU blocks matter, it is WIDE or HYBRID.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.daemon.core import namespace as namespace_module
from kvferry.daemon.core import session_pins as pinned_module
from kvferry.daemon.core.actions import (
    Action,
    BlocksVerified,
    Broadcast,
    CancelTransfers,
    CloseSession,
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
from kvferry.daemon.core.core import Core, DaemonIdentity
from kvferry.daemon.core.records import RecoveredRegion
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto import status as told
from kvferry.proto.errors import Code, ErrorInfo, Refused
from kvferry.proto.keys import EventKind
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
    TransferSpec,
)
from support.region_records_model import RegionRecordsModel

PAGE = 1024
ROOM = 4 * PAGE
POOL = 16 * ROOM
ROW = TensorLayout(16, PAGE, PAGE)
LAYOUT = KVLayout((ROW,), ((TensorRef(0, PAGE),),))
WIDE = KVLayout((ROW,), ((TensorRef(0, PAGE),),), 3)
HYBRID = KVLayout((ROW, ROW), ((TensorRef(0, PAGE),), (TensorRef(1, PAGE // 2),)), 3)
FINGERPRINT = told.Fingerprint("llama", PAGE, block_size=16, key_bytes=1)
OF_THREE = told.Fingerprint("llama", 3 * PAGE, key_bytes=1)
OTHER = told.Fingerprint("qwen", PAGE, key_bytes=1)
DEVICE = told.DeviceInfo("cpu", "cpu", "host memory")
FAULT = ErrorInfo(Code.COPY_FAILED, "the copy failed")
DONE, FAILED, CANCELLED = Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED
NOT_DONE = pytest.mark.parametrize("outcome", [FAILED, CANCELLED])


def each(letters: bytes) -> tuple[bytes, ...]:
    return tuple(letters[at : at + 1] for at in range(len(letters)))


def by_key(letters: bytes) -> KeyLoadStoreSpec:
    return KeyLoadStoreSpec(each(letters))


def blocks(ids: Sequence[int], *groups: tuple[int, int]) -> GPULoadStoreSpec:
    """GPU blocks. groups: of each how many they are, and the index of the first."""
    if not groups:
        return GPULoadStoreSpec(ids)
    return GPULoadStoreSpec(ids, *(tuple(column) for column in zip(*groups, strict=True)))


def store(letters: bytes, gpu: GPULoadStoreSpec | None = None) -> TransferSpec:
    return gpu or blocks(range(len(letters))), by_key(letters)


def load(letters: bytes, gpu: GPULoadStoreSpec | None = None) -> TransferSpec:
    return by_key(letters), gpu or blocks(range(len(letters)))


class NamespacesFixture:
    """A core, and the shorthand of the examples.

    Sessions are named engine/process. Those that are given here are in the namespace already, and
    the first of an engine has registered it.
    """

    def __init__(
        self,
        *sessions: str,
        fingerprint: told.Fingerprint = FINGERPRINT,
        layout: KVLayout = LAYOUT,
        quota: int | None = ROOM,
        policy: str = "lru",
        threshold: int = 1,
        pool_bytes: int = POOL,
    ) -> None:
        limits = told.Limits(1 << 20, 1 << 10, 64)
        self.core = Core(
            DaemonIdentity("0.1", "boot", 4711, DEVICE, limits), pool_bytes, started=100.0
        )
        self.books = RegionRecordsModel()
        self.job_ids = count(1)
        self.registrations: dict[str, int] = {}
        for session in sessions:
            self.come(session)
            self.enter(session, fingerprint, quota, policy, threshold)
            if session.partition("/")[0] not in self.registrations:
                self.register(session, layout)

    def come(self, *sessions: str) -> None:
        for session in sessions:
            engine = session.partition("/")[0]
            self.core.open_session(session, wire.Hello(1, 1, session, engine))

    def ask(self, session: str, message: wire.ClientMessage) -> list[Any]:
        return self.books.hear(self.core.handle(session, message, now=101.0))

    def report(self, report: Report) -> list[Any]:
        return self.books.hear(self.core.report(report))

    def error(self, session: str, message: wire.ClientMessage) -> tuple[str, str]:
        """The code with which a request is refused, and the value."""
        (action,) = self.ask(session, message)
        assert isinstance(action.message, wire.Error)
        assert action.session == session
        assert action.message.request_id == getattr(message, "request_id", None)
        return action.message.error.code, action.message.error.value

    # Namespaces

    def enter(
        self,
        session: str,
        fingerprint: told.Fingerprint = FINGERPRINT,
        quota: int | None = ROOM,
        policy: str = "lru",
        threshold: int = 1,
    ) -> wire.Opened:
        answer, *_ = self.ask(session, wire.OpenNamespace(7, fingerprint, quota, policy, threshold))
        assert isinstance(answer, SendMessage)
        assert isinstance(answer.message, wire.Opened)
        assert (answer.session, answer.message.request_id) == (session, 7)
        return answer.message

    def register(self, session: str, layout: KVLayout = LAYOUT) -> memory.HostRegion:
        (mapping,) = self.ask(session, wire.AllocateKVCaches(8, layout))
        assert isinstance(mapping, MapTensors)
        self.registrations[session.partition("/")[0]] = mapping.registration
        (action,) = self.report(TensorsMapped(mapping.registration, session))
        assert isinstance(action, SendMessage)
        assert isinstance(action.message, wire.Allocated)
        return action.message.region

    def part(self, *sessions: str) -> None:
        """Sessions leave, and the lane lets go of what they registered."""
        for session in sessions:
            for action in self.core.close_session(session):
                if isinstance(action, UnmapTensors):
                    self.report(TensorsUnmapped(action.registration))

    def namespaces(self) -> tuple[told.NamespaceStatus, ...]:
        self.come("onlooker")
        (action,) = self.ask("onlooker", wire.NamespacesRequest(9))
        self.core.close_session("onlooker")
        assert action == SendMessage(
            "onlooker", wire.NamespacesReport(9, action.message.namespaces)
        )
        return tuple(action.message.namespaces)

    def usage(self, *names: str) -> tuple[Any, ...]:
        """Numbers of the only namespace."""
        (status,) = self.namespaces()
        return tuple(getattr(status, name) for name in names)

    def snapshot(self, session: str) -> tuple[bytes, bytes]:
        """The letters that are ready, and those pending, as a follower is told them."""
        stream = self.ask(session, wire.Subscribe())[-1]
        assert isinstance(stream, SendStream)
        letters = {False: b"", True: b""}
        for part in stream.messages:
            assert isinstance(part, wire.Snapshot)
            letters[part.pending] += b"".join(part.keys)
        return bytes(sorted(letters[False])), bytes(sorted(letters[True]))

    # Transfers

    def submit(self, session: str, spec: TransferSpec) -> list[Any]:
        return self.ask(session, wire.Submit(next(self.job_ids), *spec))

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

    def end(self, plan: CopyPlan, outcome: Outcome = DONE) -> list[Action]:
        return self.report(
            TransferCompleted(plan.serial, outcome, error=FAULT if outcome == FAILED else None)
        )

    def stored(self, session: str, letters: bytes, gpu: GPULoadStoreSpec | None = None) -> CopyPlan:
        plan = self.start(session, store(letters, gpu))
        self.end(plan)
        return plan

    def loadable(self, session: str, letters: bytes = b"abcdefgh") -> bytes:
        """Those that load; recency does not notice."""
        found = b""
        for letter in each(letters):
            action, *_ = self.submit(session, load(letter))
            if isinstance(action, StartTransfer):
                found += letter
                self.end(action.plan, CANCELLED)
            else:
                assert action.message.results[0].error.code == Code.KEY_ABSENT
        return found


def copies(plan: CopyPlan) -> list[tuple[int, int, int]]:
    """(group, GPU block, byte of the pool), all that a plan copies."""
    return [
        (run.group, int(block), int(offset))
        for run in plan.extents
        for block, offset in zip(run.gpu_blocks, run.host_offsets, strict=True)
    ]


def gpu_blocks(plan: CopyPlan) -> list[int]:
    return [block for _, block, _ in copies(plan)]


def offsets(plan: CopyPlan) -> list[int]:
    return [offset for _, _, offset in copies(plan)]


def heard(
    actions: Sequence[Action], kind: type[Broadcast] | type[PublishKVEvents] = Broadcast
) -> Any:
    """[(kind, letters)] of the only KeyEvents among actions; None if there is none."""
    news = [
        a.message if isinstance(a, Broadcast) else a.key_events for a in actions if type(a) is kind
    ]
    if not news:
        return None
    (one,) = news
    return [(str(event.kind), b"".join(event.keys)) for event in one.events]


# Opening


def test_a_namespace_is_made_and_answered_with_its_blocks() -> None:
    desk = NamespacesFixture()
    desk.come("a")
    opened = desk.enter("a", quota=ROOM + 100, policy="arc", threshold=2)
    assert opened == wire.Opened(7, FINGERPRINT.name, 4, PAGE, False, "arc", 2, ())
    assert desk.core.status(101.0).pool.reserved_bytes == ROOM + 100


def test_a_namespace_without_a_quota_takes_what_is_free() -> None:
    desk = NamespacesFixture()
    desk.come("a")
    assert desk.enter("a", quota=None).num_blocks == POOL // PAGE


def test_an_engine_of_an_equal_fingerprint_enters_the_same_namespace() -> None:
    desk = NamespacesFixture("a")
    plan = desk.stored("a", b"ab")
    desk.come("b")
    assert desk.enter("b") == wire.Opened(7, FINGERPRINT.name, 4, PAGE, True, "lru", 1, ())
    assert desk.register("b") == memory.HostRegion(4, PAGE, False)
    assert offsets(desk.start("b", load(b"ba"))) == offsets(plan)[::-1]
    assert desk.core.status(101.0).pool.reserved_bytes == ROOM


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_block_bytes", 2 * PAGE),
        ("revision", "b00b5"),
        ("dtype", "bfloat16"),
        ("kv_dtype", "fp8"),
        ("kv_layout", "HND"),
        ("block_size", 32),
        ("rank", 1),
        ("world_size", 2),
        ("hash_algorithm", "sha256"),
        ("hash_seed", "42"),
        ("key_bytes", 2),
    ],
)
def test_a_fingerprint_that_differs_in_one_field_is_another_namespace(
    field: str, value: object
) -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"a")
    desk.come("b")
    opened = desk.enter("b", msgspec.structs.replace(FINGERPRINT, **{field: value}))
    there = getattr(FINGERPRINT, field)
    differs = f"{FINGERPRINT.name}: {field}: {value!r} here, {there!r} there"
    assert (opened.reattached, opened.unlike) == (False, (differs,))
    assert opened.name != FINGERPRINT.name
    assert [(n.name, n.engines, n.ready) for n in desk.namespaces()] == [
        (FINGERPRINT.name, ("a",), 1),
        (opened.name, ("b",), 0),
    ]


def test_what_is_unlike_is_told_of_the_same_model_only_and_of_what_is_extra_by_its_name() -> None:
    desk = NamespacesFixture()
    desk.come("a", "b", "c")
    desk.enter("a", OTHER)
    first = desk.enter("b", msgspec.structs.replace(FINGERPRINT, extra=(("rope", "yarn"),)))
    assert first.unlike == ()
    (unlike,) = desk.enter("c").unlike
    assert unlike == f"{first.name}: rope: None here, 'yarn' there"


def test_of_others_that_are_many_or_differ_in_much_some_are_told() -> None:
    desk = NamespacesFixture(pool_bytes=64 * ROOM)
    names = [f"e{n}" for n in range(40)]
    desk.come("a", *names)
    for name in names:
        extra = tuple((f"{field:02}", name * 20) for field in range(20))
        desk.enter(name, msgspec.structs.replace(FINGERPRINT, extra=extra))
    unlike = desk.enter("a").unlike
    assert [len(text) for text in unlike] == [512] * 16
    assert "00: None here, 'e0e0" in unlike[0]


def test_a_fingerprint_that_is_long_is_refused() -> None:
    """All of them are told in one message."""
    desk = NamespacesFixture()
    desk.come("a")
    for texts, fits in ((15, True), (16, False)):
        extra = tuple((f"{n:02}", 253 * "x") for n in range(texts))
        fingerprint = msgspec.structs.replace(FINGERPRINT, extra=extra)
        assert (fingerprint.nbytes <= 4096) == fits
        if fits:
            desk.enter("a", fingerprint)
            desk.part("a")
            desk.come("a")
        else:
            error = desk.error("a", wire.OpenNamespace(5, fingerprint, ROOM))
            assert error == (Code.BAD_SPEC, str(fingerprint.nbytes))


@pytest.mark.parametrize("second", ["a/worker", "a/scheduler"])
def test_the_sessions_of_an_engine_are_in_one_namespace(second: str) -> None:
    desk = NamespacesFixture("a/worker")
    desk.come("a/scheduler")
    wrong = msgspec.structs.replace(FINGERPRINT, kv_dtype="fp8", rank=3)
    before = desk.namespaces()
    assert desk.error(second, wire.OpenNamespace(5, wrong, ROOM)) == (
        Code.NAMESPACE_MISMATCH,
        "kv_dtype: 'fp8' here, '' there, rank: 3 here, 0 there",
    )
    assert desk.namespaces() == before
    assert desk.enter(second).reattached


def test_the_order_of_what_is_extra_does_not_part_the_sessions_of_an_engine() -> None:
    desk = NamespacesFixture()
    desk.come("a")
    extra = (("rope", "yarn"), ("tokenizer", "v2"))
    desk.enter("a", msgspec.structs.replace(FINGERPRINT, extra=extra))
    again = msgspec.structs.replace(FINGERPRINT, extra=extra[::-1])
    desk.ask("a", wire.OpenNamespace(5, again, ROOM))  # refused, or the same namespace
    desk.part("a")
    assert [status.engines for status in desk.namespaces()] == [()]


def test_sessions_whose_fingerprints_differ_in_what_no_field_tells_are_not_let_in() -> None:
    desk = NamespacesFixture()
    desk.come("a/worker", "a/scheduler")
    desk.enter("a/worker", msgspec.structs.replace(FINGERPRINT, extra=(("b", "1"), ("b", "2"))))
    other = msgspec.structs.replace(FINGERPRINT, extra=(("b", "2"),))
    error = desk.error("a/scheduler", wire.OpenNamespace(5, other, ROOM))
    assert error[0] == Code.NAMESPACE_MISMATCH


def test_an_engine_may_change_its_fingerprint_once_all_its_sessions_have_gone() -> None:
    desk = NamespacesFixture("a/worker", "a/scheduler")
    desk.part("a/worker")
    desk.come("a/new")
    assert desk.error("a/new", wire.OpenNamespace(5, OTHER))[0] == Code.NAMESPACE_MISMATCH
    desk.part("a/scheduler")
    desk.enter("a/new", OTHER)


@pytest.mark.parametrize("quota", [0, 1, PAGE - 1, POOL + 1])
def test_a_quota_that_holds_no_block_or_that_the_pool_does_not_is_refused(quota: int) -> None:
    desk = NamespacesFixture()
    desk.come("a")
    assert desk.error("a", wire.OpenNamespace(5, FINGERPRINT, quota)) == ("pool_full", str(quota))
    assert desk.namespaces() == ()
    assert desk.core.status(101.0).pool.reserved_bytes == 0
    assert desk.error("a", wire.Touch(()))[0] == Code.UNKNOWN_NAMESPACE


def test_a_quota_that_is_refused_leaves_what_was_there() -> None:
    desk = NamespacesFixture("a", policy="arc")
    desk.stored("a", b"abc")
    desk.part("a")
    desk.come("b")
    before = desk.namespaces()
    assert desk.error("b", wire.OpenNamespace(5, FINGERPRINT, POOL + 1))[0] == Code.POOL_FULL
    assert desk.namespaces() == before
    assert desk.enter("b").reattached


def test_an_unknown_policy_is_refused() -> None:
    desk = NamespacesFixture()
    desk.come("a")
    error = desk.error("a", wire.OpenNamespace(5, FINGERPRINT, ROOM, "fifo"))
    assert error == (Code.BAD_SPEC, "fifo")
    assert desk.namespaces() == ()


def test_a_daemon_that_stops_opens_no_namespace() -> None:
    desk = NamespacesFixture()
    desk.come("a")
    desk.core.stop()
    assert desk.error("a", wire.OpenNamespace(5, FINGERPRINT))[0] == Code.SHUTTING_DOWN


def test_opening_twice_changes_nothing() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"ab")
    desk.ask("a", wire.Pin(each(b"a")))
    before = desk.namespaces()
    assert desk.enter("a").reattached
    assert desk.namespaces() == before
    desk.ask("a", wire.Unpin(each(b"a")))
    desk.part("a")
    assert desk.usage("engines", "pinned") == ((), 0)


def test_opening_otherwise_while_others_are_in_it_keeps_what_holds() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"ab")
    desk.come("b")
    opened = desk.enter("b", quota=2 * ROOM, policy="arc", threshold=3)
    assert opened == wire.Opened(7, FINGERPRINT.name, 4, PAGE, True, "lru", 1, ())
    assert desk.loadable("a") == b"ab"


def test_opening_otherwise_when_alone_in_it_keeps_what_holds_for_one_s_own_jobs() -> None:
    desk = NamespacesFixture("a")
    plan = desk.start("a", store(b"a"))
    assert desk.enter("a", quota=2 * ROOM, policy="arc").policy == "lru"
    desk.end(plan)
    assert desk.loadable("a") == b"a"


def test_opening_while_an_engine_is_being_let_go_keeps_what_holds() -> None:
    """Its session has gone, and yet its tensors are mapped, and its jobs under way."""
    desk = NamespacesFixture("a")
    plan = desk.start("a", store(b"a"))
    desk.core.close_session("a")
    desk.come("b")
    assert desk.enter("b", quota=2 * ROOM, policy="arc").policy == "lru"
    desk.end(plan)
    desk.report(TensorsUnmapped(1))
    desk.register("b")
    assert desk.loadable("b") == b"a"


def test_opening_otherwise_with_nobody_in_it_changes_how_it_evicts_and_keeps_the_keys() -> None:
    desk = NamespacesFixture("a")
    plan = desk.stored("a", b"abcd")
    desk.part("a")
    desk.come("b")
    opened = desk.enter("b", policy="arc", threshold=2)
    assert (opened.reattached, opened.policy, opened.store_threshold) == (True, "arc", 2)
    (found,) = desk.books.found()
    assert (found.record.policy, found.record.threshold) == ("arc", 2)
    desk.register("b")
    assert offsets(desk.start("b", load(b"abcd"))) == offsets(plan)
    assert desk.submit("b", store(b"e"))[0].plan.extents == ()


def test_a_change_of_policy_keeps_the_order_in_which_keys_go() -> None:
    desk = NamespacesFixture("a", policy="arc")
    desk.stored("a", b"abcd")
    desk.ask("a", wire.Touch(each(b"bd")))
    desk.part("a")
    desk.come("b")
    desk.enter("b", policy="lru")
    desk.register("b")
    gone = []
    for letter in each(b"efgh"):
        gone.append(heard(desk.submit("b", store(letter)), PublishKVEvents)[0])
    assert gone == [("removed", letter) for letter in each(b"cadb")]


def test_a_change_of_policy_is_no_news_and_what_was_counted_stays() -> None:
    """A million keys told anew were 34 MB, and seconds in which nobody else was heard."""
    desk = NamespacesFixture("a")
    desk.ask("a", wire.Touch((), 3, 4))
    desk.stored("a", b"abcd")
    desk.stored("a", b"e")
    desk.part("a")
    (before,) = desk.namespaces()
    desk.come("b")
    actions = desk.ask("b", wire.OpenNamespace(7, FINGERPRINT, ROOM, "arc", 2))
    assert [type(action) for action in actions] == [SendMessage]
    (after,) = desk.namespaces()
    assert after == msgspec.structs.replace(before, policy="arc", engines=("b",))


def test_an_engine_that_comes_back_with_the_same_policy_finds_what_was_learnt() -> None:
    desk = NamespacesFixture("a", policy="arc", threshold=2)
    for _ in range(2):
        desk.stored("a", b"ab")
    desk.ask("a", wire.Touch(each(b"a"), 3, 4))
    desk.stored("a", b"c")  # its first offer
    desk.part("a")
    before = desk.namespaces()
    desk.come("b")
    desk.enter("b", policy="arc", threshold=2)
    desk.register("b")
    assert [msgspec.structs.replace(n, engines=()) for n in desk.namespaces()] == list(before)
    desk.stored("b", b"c")
    assert desk.loadable("b") == b"abc"


def test_another_quota_with_nobody_in_it_begins_anew() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"abcd")
    desk.part("a")
    desk.come("b")
    opened = desk.enter("b", quota=2 * ROOM)
    assert (opened.reattached, opened.num_blocks) == (False, 8)
    assert desk.usage("blocks", "ready", "free") == (8, 0, 8)
    assert desk.core.status(101.0).pool.reserved_bytes == 2 * ROOM


# Registering


def test_an_engine_in_a_namespace_has_no_host_memory_of_its_own() -> None:
    desk = NamespacesFixture()
    desk.come("a")
    desk.enter("a")
    error = desk.error("a", wire.AllocateKVCaches(1, LAYOUT, ROOM))
    assert error == (Code.BAD_LAYOUT, str(ROOM))
    assert not desk.core.busy
    desk.register("a")


@pytest.mark.parametrize("layout", [WIDE, HYBRID])
def test_a_layout_whose_host_blocks_have_another_size_is_refused(layout: KVLayout) -> None:
    desk = NamespacesFixture()
    desk.come("a")
    desk.enter("a")
    error = desk.error("a", wire.AllocateKVCaches(1, layout))
    assert error == (Code.NAMESPACE_MISMATCH, str(3 * PAGE))
    desk.register("a")


def test_a_layout_that_splits_the_same_bytes_otherwise_is_refused() -> None:
    desk = NamespacesFixture("a")
    halves = (TensorRef(0, PAGE // 2), TensorRef(1, PAGE // 2))
    desk.come("b")
    desk.enter("b")
    split = KVLayout((ROW, ROW), (halves,))
    assert desk.error("b", wire.AllocateKVCaches(1, split))[0] == Code.NAMESPACE_MISMATCH
    padded = KVLayout((TensorLayout(99, PAGE, 4 * PAGE),), LAYOUT.groups)
    desk.register("b", padded)  # how its rows lie on the GPU is its own business


@pytest.mark.parametrize("restarted", [False, True])
def test_a_layout_whose_host_blocks_are_of_more_gpu_blocks_is_refused(restarted: bool) -> None:
    """What is all of a host block to one is a part of it to the other."""
    two = KVLayout((ROW,), ((TensorRef(0, PAGE),),), 2)
    desk = NamespacesFixture("a", fingerprint=OF_THREE, layout=two)
    desk.stored("a", b"k", blocks([0, 1]))
    if restarted:
        books, desk = desk.books, NamespacesFixture()
        desk.books = books
        desk.core.restore_region(*books.found())
    desk.come("b")
    desk.enter("b", OF_THREE)
    (action,) = desk.ask("b", wire.AllocateKVCaches(1, WIDE))
    error = action.message.error
    assert error.code == Code.NAMESPACE_MISMATCH
    assert "has 3 GPU blocks of pages [1024], but in namespace" in error.message
    assert isinstance(desk.ask("b", wire.AllocateKVCaches(1, two))[0], MapTensors)


def test_a_namespace_that_does_not_say_how_its_blocks_were_made_is_given_up() -> None:
    """An earlier daemon did not write down of how many GPU blocks they are."""
    desk = NamespacesFixture("a")
    desk.stored("a", b"a")
    (found,) = desk.books.found()
    deed, other = msgspec.structs.replace(found.record, factor=0), NamespacesFixture()
    with pytest.raises(Refused) as caught:
        other.core.restore_region(msgspec.structs.replace(found, record=deed))
    assert caught.value.code == Code.BAD_LAYOUT
    other.core.restore_region(RecoveredRegion(deed))  # nothing is in it


def test_another_daemon_finds_what_was_stored_as_far_as_it_was_and_tells_nobody(
    partly: NamespacesFixture,
) -> None:
    partly.ask("a", wire.Reset(5))
    partly.stored("a", b"x", blocks([0, 1, 2]))
    partly.stored("a", b"y", blocks([0, 1]))
    books, desk = partly.books, NamespacesFixture()
    desk.books = books
    desk.core.restore_region(*books.found())
    desk.come("b")
    actions = desk.ask("b", wire.OpenNamespace(7, OF_THREE))
    assert [type(action) for action in actions] == [SendMessage]
    assert actions[0].message.generation == 2
    desk.register("b", WIDE)
    whole = blocks([0, 1, 2])
    assert (desk.snapshot("b"), desk.loadable("b", b"x")) == ((b"", b"x"), b"")
    region, keys = desk.books.found()[0].record.owner, each(b"xy")
    held = {one.key: one.block for one in desk.books.found()[0].residents}
    actions = desk.report(BlocksVerified(region, np.array([held[key] for key in keys]), keys))
    assert heard(actions, PublishKVEvents) == [("stored", b"x")]
    desk.start("b", load(b"x", whole))
    assert desk.refused("b", load(b"y", whole)) == Code.KEY_ABSENT
    desk.start("b", load(b"y", blocks([0, 1])))


def test_a_namespace_whose_keys_do_not_add_up_is_given_up_with_its_room() -> None:
    desk = NamespacesFixture("a", quota=POOL)
    desk.stored("a", b"ab")
    (found,) = desk.books.found()
    other, twice = (
        NamespacesFixture(),
        msgspec.structs.replace(found, residents=found.residents[:1] * 2),
    )
    with pytest.raises(Refused) as caught:
        other.core.restore_region(twice)
    assert caught.value.code == Code.BAD_SPEC
    assert (other.namespaces(), other.core.status(101.0).pool.reserved_bytes) == ((), 0)


def test_a_layout_that_leaves_room_in_a_host_block_begins_each_where_it_begins() -> None:
    desk = NamespacesFixture()
    desk.come("a")
    desk.enter("a")
    half = KVLayout((ROW,), ((TensorRef(0, PAGE // 2),),))
    assert desk.register("a", half) == memory.HostRegion(4, PAGE, False)
    plan = desk.start("a", store(b"abcd"))
    assert sorted(offsets(plan)) == [0, PAGE, 2 * PAGE, 3 * PAGE]
    assert plan.nbytes == 2 * PAGE


def test_an_engine_with_host_memory_of_its_own_names_no_keys() -> None:
    desk = NamespacesFixture()
    desk.come("a")
    desk.register("a")
    for spec in (store(b"a"), load(b"a")):
        assert desk.refused("a", spec) == Code.UNKNOWN_NAMESPACE


def test_an_engine_in_a_namespace_names_no_host_blocks() -> None:
    desk = NamespacesFixture("a")
    gpu, host = GPULoadStoreSpec([0]), CPULoadStoreSpec([0])
    assert desk.refused("a", (gpu, host)) == Code.BAD_SPEC
    assert desk.refused("a", (host, gpu)) == Code.BAD_SPEC


@pytest.mark.parametrize(
    "message",
    [
        wire.Pin(each(b"a")),
        wire.Unpin(each(b"a")),
        wire.Touch(each(b"a")),
        wire.Subscribe(),
        wire.Reset(5),
    ],
)
def test_who_is_in_no_namespace_says_nothing_of_keys(message: wire.ClientMessage) -> None:
    desk = NamespacesFixture("a/worker")
    desk.come("a/scheduler")  # each session enters by itself
    assert desk.error("a/scheduler", message)[0] == Code.UNKNOWN_NAMESPACE


def test_a_registration_that_failed_leaves_the_namespace_to_others() -> None:
    desk = NamespacesFixture()
    desk.come("a")
    desk.enter("a")
    desk.ask("a", wire.AllocateKVCaches(1, LAYOUT))
    desk.report(TensorsMapped(1, "a", ErrorInfo(Code.MAP_FAILED, "no memory")))
    desk.register("a")
    desk.stored("a", b"a")
    desk.part("a")
    assert desk.usage("engines", "ready") == ((), 1)


def test_a_layout_of_which_nothing_is_stored_is_forgotten() -> None:
    desk = NamespacesFixture()
    desk.come("a", "b")
    desk.enter("a")
    desk.register("a", KVLayout((ROW, ROW), ((TensorRef(0, PAGE // 2), TensorRef(1, PAGE // 2)),)))
    desk.part("a")
    desk.enter("b")
    assert isinstance(desk.ask("b", wire.AllocateKVCaches(1, LAYOUT))[0], MapTensors)


def test_a_layout_of_which_something_is_stored_holds_until_a_reset() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"a")
    desk.part("a")
    desk.come("b")
    desk.enter("b")
    split = KVLayout((ROW, ROW), ((TensorRef(0, PAGE // 2), TensorRef(1, PAGE // 2)),))
    assert desk.error("b", wire.AllocateKVCaches(1, split))[0] == Code.NAMESPACE_MISMATCH
    desk.ask("b", wire.Reset(5))
    desk.register("b", split)


# Stores


def test_a_store_gets_blocks_of_the_region_and_its_keys_load_once_it_is_done() -> None:
    desk = NamespacesFixture("n", fingerprint=OTHER)  # so that the region does not begin at 0
    desk.come("a")
    desk.enter("a")
    desk.register("a")
    plan = desk.start("a", store(b"abc", blocks([5, 0, 9])))
    assert [(group, block) for group, block, _ in copies(plan)] == [(0, 5), (0, 0), (0, 9)]
    assert len(set(offsets(plan))) == 3
    assert set(offsets(plan)) <= set(range(ROOM, 2 * ROOM, PAGE))
    assert (plan.nbytes, plan.host_end) == (3 * PAGE, max(offsets(plan)) + PAGE)
    assert desk.loadable("a") == b""
    desk.end(plan)
    assert desk.loadable("a") == b"abc"
    assert offsets(desk.start("a", load(b"cab"))) == [offsets(plan)[at] for at in (2, 0, 1)]


@NOT_DONE
def test_a_store_that_was_not_done_leaves_no_key(outcome: Outcome) -> None:
    desk = NamespacesFixture("a")
    desk.end(desk.start("a", store(b"abcd")), outcome)
    assert desk.usage("free", "pending", "ready") == (4, 0, 0)
    assert desk.loadable("a") == b""
    desk.stored("a", b"abcd")
    assert desk.loadable("a") == b"abcd"


def test_keys_that_are_there_or_on_their_way_are_left_out_with_their_blocks() -> None:
    desk = NamespacesFixture("a", "b")
    first = desk.stored("a", b"b")
    second = desk.start("b", store(b"d"))
    plan = desk.start("a", store(b"abcd", blocks([3, 4, 5, 6])))
    assert gpu_blocks(plan) == [3, 5]
    assert not set(offsets(plan)) & {*offsets(first), *offsets(second)}
    assert plan.nbytes == 2 * PAGE
    desk.end(plan)
    assert desk.loadable("a") == b"abc"
    desk.end(second)
    assert desk.loadable("a") == b"abcd"


def test_a_store_of_what_is_there_moves_nothing_and_is_done() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"ab")
    plan = desk.start("a", store(b"ba"))
    assert (plan.extents, plan.nbytes, plan.host_end) == ((), 0, 0)
    (action,) = desk.end(plan)
    assert isinstance(action, SendMessage)
    assert isinstance(action.message, wire.Finished)
    assert action.message.results[0].outcome is DONE
    assert desk.loadable("a") == b"ab"


def test_nobody_waits_for_what_is_left_out() -> None:
    desk = NamespacesFixture("a")
    stored = desk.stored("a", b"abcd")
    desk.start("a", store(b"ad"))
    for letter in each(b"abcd"):
        assert desk.start("a", load(letter)).after == stored.serial


def test_a_key_twice_in_one_store_is_stored_once_from_where_it_came_first() -> None:
    desk = NamespacesFixture("a")
    plan = desk.start("a", store(b"abab", blocks([3, 4, 5, 6])))
    assert gpu_blocks(plan) == [3, 4]
    assert desk.usage("free", "pending") == (2, 2)
    desk.end(plan)
    assert desk.loadable("a") == b"ab"
    assert desk.usage("free", "ready") == (2, 2)


def test_two_engines_that_store_a_key_at_once_store_it_once() -> None:
    desk = NamespacesFixture("a", "b")
    mine, theirs = desk.start("a", store(b"ab")), desk.start("b", store(b"bc"))
    assert (gpu_blocks(mine), gpu_blocks(theirs)) == ([0, 1], [1])
    desk.end(theirs)
    assert desk.loadable("b") == b"c"
    desk.end(mine, FAILED)  # nobody stored b after all
    assert desk.loadable("b") == b"c"
    assert gpu_blocks(desk.stored("b", b"bc")) == [0]


def test_blocks_that_are_left_out_go_with_all_that_they_hold_and_no_more() -> None:
    """Seven GPU blocks from index 1 on, three a host block: a has two, b three, and c two."""
    desk = NamespacesFixture("a", fingerprint=OF_THREE, layout=WIDE, quota=12 * PAGE)
    spec = store(b"abc", blocks([9, 8, 7, 6, 5, 4, 3], (7, 1)))
    desk.stored("a", b"b", blocks([0, 1, 2]))
    plan = desk.start("a", spec)
    a, c = (offsets(plan)[at] // (3 * PAGE) * 3 * PAGE for at in (0, -1))
    assert a != c
    assert copies(plan) == [(0, 9, a + PAGE), (0, 8, a + 2 * PAGE), (0, 4, c), (0, 3, c + PAGE)]
    desk.end(plan, FAILED)
    desk.ask("a", wire.Reset(1))
    desk.stored("a", b"a", blocks([0, 1, 2]))
    desk.stored("a", b"c", blocks([0, 1, 2]))
    assert gpu_blocks(desk.start("a", spec)) == [7, 6, 5]


def test_every_group_has_keys_of_its_own() -> None:
    """Group 0: blocks 1 to 4 from index 2 on, in a and b. Group 1: blocks 5 to 9, in c and d."""
    desk = NamespacesFixture("a", fingerprint=OF_THREE, layout=HYBRID, quota=12 * PAGE)
    spec = store(b"abcd", blocks(range(1, 10), (4, 2), (5, 4)))
    plan = desk.start("a", spec)
    at = [offset - offset % (3 * PAGE) for offset in offsets(plan)]
    a, b, c, d = dict.fromkeys(at)
    half = PAGE // 2
    assert copies(plan) == [
        *((0, 1, a + 2 * PAGE), (0, 2, b), (0, 3, b + PAGE), (0, 4, b + 2 * PAGE)),
        *((1, 5, c + half), (1, 6, c + PAGE), (1, 7, d), (1, 8, d + half), (1, 9, d + PAGE)),
    ]
    assert plan.nbytes == 4 * PAGE + 5 * half
    desk.end(plan, CANCELLED)
    desk.stored("a", b"bc", blocks([1, 2, 3, 4, 5, 6], (3, 0), (3, 0)))
    plan = desk.start("a", spec)
    assert [(group, block) for group, block, _ in copies(plan)] == [(0, 1), (1, 7), (1, 8), (1, 9)]
    desk.end(plan, CANCELLED)
    desk.stored("a", b"a", blocks([1, 2, 3], (3, 0), (0, 0)))
    plan = desk.start("a", spec)
    assert [group for group, _, _ in copies(plan)] == [1, 1, 1]


def test_a_store_evicts_the_least_recent_and_never_who_is_offered_with_it() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"abcd")  # d goes first: of a prefix the tail
    assert gpu_blocks(desk.stored("a", b"dce")) == [2]
    assert desk.loadable("a") == b"acde"
    desk.ask("a", wire.Touch(each(b"dc")))
    desk.stored("a", b"f")
    assert desk.loadable("a") == b"cdef"


@pytest.mark.parametrize(("policy", "goes"), [("lru", b"b"), ("arc", b"d")])
def test_who_goes_is_the_policy_s_choice(policy: str, goes: bytes) -> None:
    desk = NamespacesFixture("a", policy=policy)
    desk.stored("a", b"ab")
    desk.ask("a", wire.Touch(each(b"ab")))
    desk.stored("a", b"cd")
    assert heard(desk.submit("a", store(b"e")), PublishKVEvents)[0] == ("removed", goes)


@pytest.mark.parametrize("letters", [b"efghi", b"abcde"])
def test_more_keys_than_can_go_are_refused_whole(letters: bytes) -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"abc")
    names = ("free", "pending", "ready", "orphaned", "pinned", "stored", "evictions")
    before = desk.usage(*names)
    assert desk.refused("a", store(letters)) == Code.CACHE_FULL
    assert desk.usage(*names) == before
    assert desk.loadable("a") == b"abc"
    desk.stored("a", b"d")


def test_keys_on_their_way_make_no_room() -> None:
    desk = NamespacesFixture("a", "b")
    plan = desk.start("a", store(b"abc"))
    assert desk.refused("b", store(b"de")) == Code.CACHE_FULL
    desk.stored("b", b"d")
    desk.end(plan, FAILED)
    desk.stored("b", b"efg")
    assert desk.loadable("b") == b"defg"


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (store(b"ab", blocks([0])), Code.SIZE_MISMATCH),
        (store(b"", blocks([0])), Code.SIZE_MISMATCH),
        (store(b"a", blocks([0, 1])), Code.SIZE_MISMATCH),
        (store(b"a", blocks([0], (2, 0))), Code.SIZE_MISMATCH),
        (store(b"a", blocks([0], (1, 0), (0, 0))), Code.UNKNOWN_GROUP),
        (store(b"a", blocks([16])), Code.BLOCK_OUT_OF_RANGE),
        (store(b"ab", blocks([0, -1])), Code.BLOCK_OUT_OF_RANGE),
        ((GPULoadStoreSpec([0, 1]), KeyLoadStoreSpec((b"a", b"bc"))), Code.BAD_KEY),
        ((KeyLoadStoreSpec((b"d", b"")), GPULoadStoreSpec([0, 1])), Code.BAD_KEY),
        (load(b"dd", blocks([0])), Code.SIZE_MISMATCH),
        (load(b"d", blocks([16])), Code.BLOCK_OUT_OF_RANGE),
        (load(b"dd", blocks([1, 1])), Code.DUPLICATE_BLOCK),
    ],
)
def test_a_bad_transfer_reserves_nothing_and_pins_nothing(spec: TransferSpec, code: Code) -> None:
    desk = NamespacesFixture("a", quota=2 * PAGE)
    desk.stored("a", b"d")
    before = desk.namespaces()
    assert desk.refused("a", spec) == code
    assert desk.namespaces() == before
    assert not desk.core.busy
    desk.stored("a", b"ef")


def test_a_store_threshold_leaves_out_what_was_not_offered_often_enough() -> None:
    desk = NamespacesFixture("a", "b", threshold=2)
    assert desk.stored("a", b"ab").extents == ()
    assert gpu_blocks(desk.stored("b", b"cb")) == [1]
    assert desk.loadable("a") == b"b"
    assert gpu_blocks(desk.stored("a", b"abc")) == [0, 2]
    assert desk.usage("stores_skipped", "stored") == (3, 3)


# Loads


@pytest.mark.parametrize("outcome", [DONE, FAILED, CANCELLED])
def test_a_load_keeps_its_blocks_until_it_ends(outcome: Outcome) -> None:
    desk = NamespacesFixture("a", "b")
    desk.stored("a", b"abcd")
    plans = [desk.start("a", load(b"abc")), desk.start("b", load(b"cd"))]
    assert desk.usage("pinned") == (4,)
    assert desk.refused("b", store(b"e")) == Code.CACHE_FULL
    desk.end(plans[0], outcome)
    assert desk.usage("pinned") == (2,)
    assert desk.refused("b", store(b"efg")) == Code.CACHE_FULL
    desk.stored("b", b"ef")
    assert desk.loadable("b") == b"cdef"
    desk.end(plans[1], outcome)
    desk.stored("b", b"gh")
    assert desk.usage("pinned", "ready") == (0, 4)


def test_a_load_of_what_is_absent_or_on_its_way_is_refused_whole() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"ab")
    desk.start("a", store(b"c"))
    for letters in (b"abc", b"dab", b"c"):
        assert desk.refused("a", load(letters)) == Code.KEY_ABSENT
    assert desk.usage("pinned") == (0,)
    (action,) = desk.submit("a", load(b"abc"))
    assert action.message.results[0].error.value == b"c".hex()


def test_one_block_loads_into_several_places_at_once() -> None:
    desk = NamespacesFixture("a")
    plan = desk.stored("a", b"a")
    assert offsets(desk.start("a", load(b"aa"))) == offsets(plan) * 2


@pytest.fixture
def partly() -> NamespacesFixture:
    """Three GPU blocks a host block. Stored: 1 and 2 of a, all of b, 0 and 1 of c; 1 of d."""
    desk = NamespacesFixture("a", fingerprint=OF_THREE, layout=WIDE, quota=12 * PAGE)
    desk.stored("a", b"abc", blocks(range(7), (7, 1)))
    desk.stored("a", b"d", blocks([0], (1, 4)))
    return desk


@pytest.mark.parametrize(
    ("letters", "size", "index", "fits"),
    [
        (b"a", 2, 1, True),
        (b"a", 1, 2, True),
        (b"a", 3, 0, False),
        (b"a", 1, 0, False),
        (b"b", 3, 0, True),
        (b"c", 2, 0, True),
        (b"c", 1, 1, True),
        (b"c", 3, 0, False),
        (b"c", 1, 2, False),
        (b"c", 2, 1, False),
        (b"d", 1, 1, True),
        (b"d", 1, 0, False),
        (b"d", 1, 2, False),
        (b"abc", 7, 1, True),
        (b"abc", 6, 2, True),
        (b"abc", 8, 1, False),
        (b"abc", 8, 0, False),
        (b"ab", 5, 4, True),
        (b"bc", 5, 0, True),
        (b"ba", 6, 0, False),
        (b"cb", 6, 0, False),
    ],
)
def test_a_block_stored_in_part_loads_as_far_as_it_was_stored(
    partly: NamespacesFixture, letters: bytes, size: int, index: int, fits: bool
) -> None:
    spec = load(letters, blocks(range(size), (size, index)))
    if fits:
        assert gpu_blocks(partly.start("a", spec)) == list(range(size))
    else:
        assert partly.refused("a", spec) == Code.KEY_ABSENT
        assert partly.usage("pinned") == (0,)


def test_a_key_stored_in_part_is_a_miss_to_mirrors_until_a_store_covers_more(
    partly: NamespacesFixture,
) -> None:
    whole = blocks([0, 1, 2])
    assert partly.snapshot("a") == (b"b", b"")
    assert partly.stored("a", b"a", blocks([0], (1, 2))).extents == ()  # no more than is there
    plan = partly.start("a", store(b"a", whole))
    assert gpu_blocks(plan) == [0, 1, 2]
    assert partly.refused("a", load(b"a", blocks([0], (1, 2)))) == Code.KEY_ABSENT
    assert partly.snapshot("a") == (b"b", b"a")
    partly.end(plan)
    assert partly.snapshot("a") == (b"ab", b"")
    partly.start("a", load(b"a", whole))


def test_a_key_stored_in_part_is_not_replaced_while_it_is_loaded(partly: NamespacesFixture) -> None:
    part = partly.start("a", load(b"a", blocks([0], (1, 2))))
    assert partly.stored("a", b"a", blocks([0, 1, 2])).extents == ()
    partly.end(part)
    assert gpu_blocks(partly.stored("a", b"a", blocks([0, 1, 2]))) == [0, 1, 2]


def test_who_follows_is_told_of_a_part_that_nothing_came_of_its_store() -> None:
    desk = NamespacesFixture("a", fingerprint=OF_THREE, layout=WIDE, quota=12 * PAGE)
    plan = desk.start("a", store(b"ab", blocks([0, 1, 2, 3])))
    assert heard(desk.end(plan), PublishKVEvents) == [("stored", b"a"), ("abandoned", b"b")]
    for letter in each(b"cdef"):
        desk.stored("a", letter, blocks([0, 1, 2]))
    assert desk.usage("evictions") == (2,)
    assert desk.snapshot("a") == (b"cdef", b"")


def test_resident_keys_of_an_offer_are_no_victims_of_it() -> None:
    """Of an offer of b, c, d and e the client names c, d and e, and says that b is there."""
    desk = NamespacesFixture("a")
    desk.stored("a", b"a")
    desk.stored("a", b"b")
    desk.ask("a", wire.Touch(each(b"a")))
    spec = blocks([0, 1, 2]), KeyLoadStoreSpec(each(b"cde"), 0, each(b"b"))
    desk.end(desk.start("a", spec))
    assert desk.loadable("a") == b"bcde"
    spec = blocks([0]), KeyLoadStoreSpec(each(b"f"), 0, each(b"bcde"))
    assert desk.refused("a", spec) == Code.CACHE_FULL


def test_keys_to_keep_are_checked_like_those_to_store() -> None:
    desk = NamespacesFixture("a")
    spec = blocks([0]), KeyLoadStoreSpec(each(b"a"), 0, (b"long",))
    assert desk.refused("a", spec) == Code.BAD_KEY


@NOT_DONE
def test_a_part_that_was_not_stored_says_nothing_of_the_block(outcome: Outcome) -> None:
    desk = NamespacesFixture("a", fingerprint=OF_THREE, layout=WIDE, quota=3 * PAGE)
    desk.end(desk.start("a", store(b"a", blocks([0]))), outcome)
    desk.stored("a", b"b", blocks([0, 1, 2]))
    desk.start("a", load(b"b", blocks([0, 1, 2])))


def test_which_part_was_stored_outlives_the_engine_and_a_change_of_policy(
    partly: NamespacesFixture,
) -> None:
    partly.part("a")
    partly.come("b")
    assert partly.enter("b", OF_THREE, 12 * PAGE, "arc").reattached
    partly.register("b", WIDE)
    assert partly.refused("b", load(b"a", blocks([0, 1, 2]))) == Code.KEY_ABSENT
    partly.start("b", load(b"a", blocks([0, 1], (2, 1))))


# Pins


def test_pins_are_counted() -> None:
    desk = NamespacesFixture("a", "b")
    desk.stored("a", b"abcd")
    desk.ask("a", wire.Pin(each(b"abab")))
    desk.ask("b", wire.Pin(each(b"a")))
    assert desk.usage("pinned") == (2,)
    assert desk.refused("a", store(b"efg")) == Code.CACHE_FULL
    desk.ask("a", wire.Unpin(each(b"aab")))
    assert desk.usage("pinned") == (2,)
    desk.ask("a", wire.Unpin(each(b"b")))
    assert desk.usage("pinned") == (1,)
    desk.stored("a", b"efg")
    assert desk.loadable("a") == b"aefg"
    desk.ask("b", wire.Unpin(each(b"a")))
    desk.stored("a", b"bcd")
    assert desk.loadable("a", b"a") == b""


def test_keys_that_were_pinned_together_are_let_go_one_by_one() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"abcd")
    desk.ask("a", wire.Pin(each(b"abcb")))
    desk.ask("a", wire.Pin(each(b"cd")))
    for letters, left in ((b"b", 4), (b"a", 3), (b"c", 3), (b"bd", 1), (b"c", 0)):
        desk.ask("a", wire.Unpin(each(letters)))
        assert desk.usage("pinned") == (left,)


def test_of_a_key_that_is_pinned_often_the_oldest_pin_goes_first() -> None:
    """The first is of what was there before the reset, the second of nothing."""
    desk = NamespacesFixture("a")
    desk.stored("a", b"a")
    desk.ask("a", wire.Pin(each(b"a")))
    desk.ask("a", wire.Reset(1))
    desk.ask("a", wire.Pin(each(b"a")))
    desk.stored("a", b"a")
    desk.ask("a", wire.Pin(each(b"a")))
    for left in (1, 1, 0):
        desk.ask("a", wire.Unpin(each(b"a")))
        assert desk.usage("pinned") == (left,)


@pytest.mark.parametrize("letters", [b"c", b"ac", b"ca", b"aa", b"e"])
def test_who_did_not_pin_does_not_unpin(letters: bytes) -> None:
    desk = NamespacesFixture("a", "b")
    desk.stored("a", b"abcd")
    desk.ask("a", wire.Pin(each(b"ab")))
    desk.ask("b", wire.Pin(each(b"c")))
    assert desk.error("a", wire.Unpin(each(letters)))[0] == Code.NOT_PINNED
    assert desk.usage("pinned") == (3,)
    desk.ask("a", wire.Unpin(each(b"ab")))
    assert desk.error("a", wire.Unpin(each(b"a"))) == (Code.NOT_PINNED, b"a".hex())
    assert desk.usage("pinned") == (1,)


def test_pinning_what_is_not_there_is_no_error_and_keeps_nothing() -> None:
    desk = NamespacesFixture("a")
    plan = desk.start("a", store(b"b"))
    assert desk.ask("a", wire.Pin(each(b"ab"))) == []
    desk.end(plan)
    desk.stored("a", b"a")
    assert desk.usage("pinned") == (0,)
    desk.ask("a", wire.Pin(each(b"a")))
    assert desk.ask("a", wire.Unpin(each(b"ab"))) == []
    assert desk.usage("pinned") == (1,)  # of the two of a the one that kept something is left
    assert desk.ask("a", wire.Unpin(each(b"a"))) == []
    assert desk.error("a", wire.Unpin(each(b"b")))[0] == Code.NOT_PINNED
    assert desk.usage("pinned") == (0,)


def test_a_session_pins_so_many_keys_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are there or not: the daemon keeps a line of each."""
    monkeypatch.setattr(pinned_module, "LEAST_PINS", 3)
    desk = NamespacesFixture("a", "b")
    desk.stored("a", b"abcd")
    desk.ask("a", wire.Pin(each(b"aaaabbbbxxxyyy")))
    assert desk.error("a", wire.Pin(each(b"cda"))) == (Code.BUSY, "3")
    assert desk.usage("pinned") == (2,)
    assert desk.ask("a", wire.Pin(each(b"cz"))) == []
    assert desk.error("a", wire.Pin(each(b"d")))[0] == Code.BUSY
    assert desk.ask("b", wire.Pin(each(b"d"))) == []
    desk.ask("a", wire.Unpin(each(b"xz")))
    assert desk.ask("a", wire.Pin(each(b"da"))) == []
    desk.part("a", "b")
    assert desk.usage("pinned") == (0,)


def test_a_key_that_was_pinned_many_times_is_let_go_at_once() -> None:
    desk = NamespacesFixture("a", "b")
    desk.stored("a", b"a")
    desk.ask("b", wire.Pin(each(b"a" * 200)))
    assert calls(lambda: desk.core.close_session("b")) < 4 * 200


@pytest.mark.parametrize("polite", [True, False])
def test_a_session_that_leaves_lets_its_pins_go_and_no_others(polite: bool) -> None:
    desk = NamespacesFixture("a/worker", "a/scheduler", "b")
    desk.stored("b", b"abcd")
    desk.ask("a/scheduler", wire.Pin(each(b"abbz")))
    desk.ask("b", wire.Pin(each(b"bc")))
    if polite:
        assert desk.ask("a/scheduler", wire.Goodbye())[0] == SendMessage(
            "a/scheduler", wire.Goodbye()
        )
    else:
        assert desk.core.close_session("a/scheduler") == [CloseSession("a/scheduler")]
    assert desk.usage("pinned", "engines") == (2, ("a", "b"))
    desk.stored("b", b"ef")
    assert desk.loadable("b") == b"bcef"


@pytest.mark.parametrize("make", [wire.Pin, wire.Touch])
def test_keys_of_another_length_are_no_keys_of_this_namespace(make: Any) -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"a")
    assert desk.error("a", make((b"a", b"bc"))) == (Code.BAD_KEY, b"bc".hex())
    assert desk.usage("pinned") == (0,)


def calls(function: Callable[[], object]) -> int:
    """How many Python functions are called for it."""
    profiled, events = sys.getprofile(), list[str]()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(profiled)
    return events.count("call")


def test_unpinning_a_key_many_times_is_no_work_of_many_times_many() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"a")
    many = each(b"a" * 200)
    desk.ask("a", wire.Pin(many))
    assert calls(lambda: desk.ask("a", wire.Unpin(many))) < 10 * len(many)


class Compared(bytes):
    """A key that counts how often it is compared."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def test_unpinning_many_keys_is_no_work_of_many_times_many() -> None:
    desk = NamespacesFixture("a")
    desk.ask("a", wire.Pin(each(bytes(range(250)))))
    Compared.times = 0
    desk.ask("a", wire.Unpin(tuple(Compared([n]) for n in range(250))))
    assert Compared.times < 10 * 250


# Engines come and go


def test_an_engine_that_dies_with_stores_under_way_takes_those_keys_with_it_and_no_others() -> None:
    desk = NamespacesFixture("a/worker", "b", "a/scheduler")
    desk.stored("a/worker", b"a")
    desk.stored("b", b"b")
    mine, theirs = desk.start("a/worker", store(b"c")), desk.start("a/scheduler", store(b"d"))
    left = desk.core.close_session("a/worker")
    assert left == [CloseSession("a/worker"), CancelTransfers(1, (mine.serial,)), UnmapTensors(1)]
    assert desk.usage("pending", "ready", "free") == (2, 2, 0)
    assert desk.refused("b", store(b"efg")) == Code.CACHE_FULL  # bytes may still arrive there
    assert heard(desk.end(mine, CANCELLED), PublishKVEvents) == [("abandoned", b"c")]
    finished, published = desk.end(theirs, CANCELLED)
    assert isinstance(finished, SendMessage)
    assert isinstance(finished.message, wire.Finished)
    error = finished.message.results[0].error
    assert error is not None
    assert error.code == Code.ENGINE_GONE
    assert heard([published], PublishKVEvents) == [("abandoned", b"d")]
    assert desk.report(TensorsUnmapped(1)) == []
    assert desk.usage("pending", "ready", "free") == (0, 2, 2)
    assert desk.loadable("b") == b"ab"
    desk.stored("b", b"cd")
    assert desk.loadable("b") == b"abcd"


def test_what_was_stored_by_the_time_an_engine_died_is_stored() -> None:
    desk = NamespacesFixture("a", "b")
    plan = desk.start("a", store(b"a"))
    desk.core.close_session("a")
    desk.end(plan, DONE)
    desk.report(TensorsUnmapped(1))
    assert desk.loadable("b") == b"a"


def test_a_namespace_outlives_its_engines() -> None:
    desk = NamespacesFixture("a/worker", "a/scheduler", "b")
    plan = desk.stored("a/worker", b"abc")
    loading = desk.start("b", load(b"a"))
    for session in ("a/worker", "a/scheduler", "b"):
        desk.core.close_session(session)
    desk.end(loading, CANCELLED)
    desk.report(TensorsUnmapped(1))
    desk.report(TensorsUnmapped(2))
    assert desk.usage("engines", "ready", "pinned") == ((), 3, 0)
    desk.come("c")
    assert desk.enter("c").reattached
    desk.register("c")
    assert offsets(desk.start("c", load(b"abc"))) == offsets(plan)


@pytest.mark.parametrize("as_namespace", [True, False])
def test_a_newcomer_that_needs_the_room_of_a_deserted_namespace_gets_it(as_namespace: bool) -> None:
    desk = NamespacesFixture("a", pool_bytes=2 * ROOM)
    desk.stored("a", b"abc")
    desk.come("n", "b")
    if as_namespace:
        request: wire.ClientMessage = wire.OpenNamespace(1, OTHER, 2 * ROOM)
    else:
        request = wire.AllocateKVCaches(1, LAYOUT, 2 * ROOM)
    assert desk.error("n", request)[0] == Code.POOL_FULL
    desk.core.close_session("a")
    assert desk.ask("n", request) == []  # its bytes may still be on their way
    answered = [type(action) for action in desk.report(TensorsUnmapped(1))]
    assert answered.count(SendMessage if as_namespace else MapTensors) == 1
    assert [n.name for n in desk.namespaces()] == ([OTHER.name] if as_namespace else [])
    assert desk.error("b", wire.OpenNamespace(1, FINGERPRINT, ROOM))[0] == Code.POOL_FULL
    desk.part("n")
    assert not desk.enter("b").reattached
    assert desk.usage("ready", "free") == (0, 4)
    desk.register("b")
    assert desk.loadable("b") == b""


@pytest.mark.parametrize("fingerprint", [OTHER, FINGERPRINT])
def test_listeners_are_told_when_a_namespace_gave_its_room_away(
    fingerprint: told.Fingerprint,
) -> None:
    desk = NamespacesFixture("a", pool_bytes=2 * ROOM)
    desk.stored("a", b"abc")
    desk.part("a")
    desk.come("n")
    actions = desk.ask("n", wire.OpenNamespace(1, fingerprint, 2 * ROOM))
    (publish,) = (action for action in actions if isinstance(action, PublishKVEvents))
    assert (publish.namespace, heard([publish], PublishKVEvents)) == (
        FINGERPRINT.name,
        [("cleared", b"")],
    )


def test_a_namespace_that_was_deserted_and_is_used_again_keeps_its_room() -> None:
    desk = NamespacesFixture("a", pool_bytes=ROOM)
    desk.stored("a", b"abc")
    desk.part("a")
    desk.come("b", "n")
    desk.enter("b")
    assert desk.error("n", wire.OpenNamespace(1, OTHER, ROOM))[0] == Code.POOL_FULL
    desk.register("b")
    assert desk.loadable("b") == b"abc"


def test_of_deserted_namespaces_the_one_left_first_makes_room() -> None:
    desk = NamespacesFixture("a", pool_bytes=2 * ROOM)
    desk.come("o", "n")
    desk.enter("o", OTHER)
    desk.part("o", "a")
    desk.enter("n", OF_THREE, ROOM)
    assert [n.name for n in desk.namespaces()] == [FINGERPRINT.name, OF_THREE.name]


def test_a_newcomer_that_finds_room_leaves_a_deserted_namespace_alone() -> None:
    desk = NamespacesFixture("a", pool_bytes=2 * ROOM)
    desk.stored("a", b"abc")
    desk.part("a")
    desk.come("n", "b")
    desk.enter("n", OTHER, ROOM)
    assert desk.enter("b").reattached
    desk.register("b")
    assert desk.loadable("b") == b"abc"


def test_the_tensors_of_a_successor_enter_when_those_before_have_left() -> None:
    desk = NamespacesFixture("a/old")
    desk.stored("a/old", b"a")
    desk.come("a/new")
    desk.enter("a/new")
    desk.core.close_session("a/old")
    assert desk.ask("a/new", wire.AllocateKVCaches(1, WIDE)) == []
    (action,) = desk.report(TensorsUnmapped(1))
    assert isinstance(action, SendMessage)
    assert isinstance(action.message, wire.Error)
    assert action.message.error.code == Code.NAMESPACE_MISMATCH
    desk.register("a/new")
    assert desk.loadable("a/new") == b"a"


def test_a_namespace_that_is_full_evicts_from_no_other() -> None:
    desk = NamespacesFixture("a")
    desk.come("b")
    desk.enter("b", OTHER, 2 * PAGE)
    desk.register("b")
    desk.stored("a", b"abcd")
    desk.stored("b", b"ab")
    assert desk.refused("b", store(b"cde")) == Code.CACHE_FULL
    desk.stored("b", b"cd")
    assert (desk.loadable("a"), desk.loadable("b")) == (b"abcd", b"cd")


# Reset


def test_a_reset_makes_every_key_absent_at_once() -> None:
    desk = NamespacesFixture("a", "b")
    desk.stored("a", b"abc")
    desk.start("a", store(b"d"))
    desk.ask("b", wire.Subscribe())
    *news, done, sweep = desk.ask("b", wire.Reset(5))
    assert heard(news, PublishKVEvents) == heard(news) == [("cleared", b"")]
    assert isinstance(sweep, FreeDeferred)
    assert not sweep.deferred.free_some()
    assert done == SendMessage("b", wire.Done(5))
    assert desk.loadable("a") == b""
    assert desk.snapshot("a") == (b"", b"")
    (found,) = desk.books.found()
    assert (found.residents, found.record.generation) == ((), 2)


@pytest.mark.parametrize("outcome", [DONE, FAILED, CANCELLED])
def test_jobs_from_before_a_reset_keep_their_blocks_and_change_nothing(outcome: Outcome) -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"ab")
    loading = [desk.start("a", load(b"a")), desk.start("a", load(b"a"))]
    storing = desk.start("a", store(b"c"))
    desk.ask("a", wire.Reset(5))
    assert desk.usage("free", "pending", "ready", "orphaned", "pinned") == (2, 0, 0, 2, 0)
    assert desk.refused("a", store(b"abc")) == Code.CACHE_FULL
    anew = desk.start("a", store(b"ac"))
    assert not set(offsets(anew)) & {*offsets(loading[0]), *offsets(storing)}
    assert heard(desk.end(storing, outcome), PublishKVEvents) is None
    assert desk.loadable("a") == b""
    desk.end(anew)
    assert desk.loadable("a") == b"ac"
    desk.end(loading[0], outcome)
    assert desk.usage("free", "orphaned") == (1, 1)
    desk.end(loading[1], outcome)
    assert desk.usage("free", "pending", "ready", "orphaned") == (2, 0, 2, 0)
    assert desk.loadable("a") == b"ac"


def test_a_pin_from_before_a_reset_pins_nothing_after_it() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"ab")
    desk.ask("a", wire.Pin(each(b"ab")))
    desk.ask("a", wire.Reset(5))
    desk.stored("a", b"a")
    assert desk.usage("pinned") == (0,)
    desk.ask("a", wire.Unpin(each(b"a")))
    assert desk.usage("free", "ready", "orphaned") == (2, 1, 1)
    desk.part("a")
    assert desk.usage("free", "ready", "orphaned") == (3, 1, 0)


def test_a_store_decided_on_before_a_reset_is_refused_however_late_it_comes() -> None:
    desk = NamespacesFixture("a", "b")
    desk.stored("a", b"a")
    desk.ask("b", wire.Subscribe())
    published, *_ = desk.ask("b", wire.Reset(5))
    assert published.key_events == wire.KeyEvents(3, (wire.KeyEvent(EventKind("cleared"), ()),), 2)
    before = desk.namespaces()
    gpu = blocks([0])
    for generation in (1, 3):
        spec = gpu, KeyLoadStoreSpec((b"a",), generation)
        assert desk.refused("a", spec) == Code.STALE
    assert desk.namespaces() == before
    for letter, generation in ((b"a", 2), (b"b", 0)):
        desk.end(desk.start("a", (gpu, KeyLoadStoreSpec((letter,), generation))))
    desk.start("a", (KeyLoadStoreSpec((b"a",), 1), gpu))  # a load finds its key, or does not


def test_the_generation_of_a_namespace_is_told_to_who_comes_and_who_follows() -> None:
    desk = NamespacesFixture("a")
    assert desk.enter("a").generation == 1
    desk.ask("a", wire.Reset(5))
    desk.ask("a", wire.Reset(6))
    assert desk.enter("a").generation == 3
    (stream,) = desk.ask("a", wire.Subscribe())
    assert list(stream.messages) == [wire.Snapshot(2, 0, False, (), True, 3)]
    desk.part("a")
    desk.come("b")
    assert desk.enter("b", policy="arc").generation == 3


def test_a_reset_forgets_which_parts_were_stored(partly: NamespacesFixture) -> None:
    whole = blocks(range(12))
    partly.ask("a", wire.Reset(5))
    partly.stored("a", b"abcd", whole)
    assert gpu_blocks(partly.start("a", load(b"abcd", whole))) == list(range(12))


def test_a_part_stored_across_a_reset_says_nothing_of_the_block_after_it() -> None:
    desk = NamespacesFixture("a", fingerprint=OF_THREE, layout=WIDE, quota=3 * PAGE)
    before = desk.start("a", store(b"a", blocks([0])))
    desk.ask("a", wire.Reset(5))
    desk.end(before)
    desk.stored("a", b"a", blocks([0, 1, 2]))
    desk.start("a", load(b"a", blocks([0, 1, 2])))


# News


def test_who_follows_is_told_all_that_happens_in_order() -> None:
    """The sets that a follower keeps are, at every step, the keys that are ready and pending."""
    desk = NamespacesFixture("a", "b", "c")
    ready, pending, sequence = set[bytes](), set[bytes](), 0
    (stream,) = desk.ask("b", wire.Subscribe())
    assert isinstance(stream, SendStream)
    assert list(stream.messages) == [wire.Snapshot(0, 0, False, (), True)]
    plans: list[CopyPlan] = []

    def begin(letters: bytes) -> list[Any]:
        start, *actions = desk.submit("a", store(letters))
        plans.append(start.plan)
        return actions

    steps: list[tuple[Any, list[tuple[str, bytes]] | None]] = [
        (lambda: begin(b"ab"), [("pending", b"ab")]),
        (lambda: begin(b"c"), [("pending", b"c")]),
        (lambda: desk.end(plans.pop()), [("stored", b"c")]),
        (lambda: desk.end(plans.pop()), [("stored", b"ab")]),
        (lambda: begin(b"def"), [("removed", b"ba"), ("pending", b"def")]),
        (lambda: desk.end(plans.pop(), FAILED), [("abandoned", b"def")]),
        (lambda: begin(b"cd"), [("pending", b"d")]),
        (lambda: desk.ask("a", wire.Touch(each(b"a"), 1, 1)), None),
        (lambda: desk.ask("a", wire.Reset(5)), [("cleared", b"")]),
        (lambda: begin(b"d"), [("pending", b"d")]),
        (lambda: desk.end(plans.pop(0)), None),
        (lambda: desk.end(plans.pop()), [("stored", b"d")]),
        (lambda: begin(b"d"), None),
    ]
    for step, expected in steps:
        actions = step()
        assert heard(actions) == expected
        for action in actions:
            if isinstance(action, Broadcast):
                assert action.sessions == ("b",)
                sequence += 1
                assert action.message.sequence == sequence
                for event in action.message.events:
                    apply(event, ready, pending)
        (truth,) = desk.core._namespaces
        assert (ready, pending) == ({*truth.cache.ready_keys()}, {*truth.cache.pending_keys()})


def apply(event: wire.KeyEvent, ready: set[bytes], pending: set[bytes]) -> None:
    ready.difference_update(event.keys)
    pending.difference_update(event.keys)
    match event.kind:
        case "pending":
            pending.update(event.keys)
        case "stored":
            ready.update(event.keys)
        case "cleared":
            ready.clear()
            pending.clear()


def test_listeners_are_told_whether_anybody_follows_or_not() -> None:
    desk = NamespacesFixture("a")
    desk.stored("a", b"abcd")
    _, published = desk.submit("a", store(b"e"))
    events = (
        wire.KeyEvent(EventKind("removed"), (b"d",)),
        wire.KeyEvent(EventKind("pending"), (b"e",)),
    )
    assert published == PublishKVEvents(FINGERPRINT.name, 16, wire.KeyEvents(3, events))


def test_followers_are_told_the_same_once_each_and_behind_the_answer() -> None:
    desk = NamespacesFixture("a", "b", "c")
    for session in ("a", "b", "b"):
        desk.ask(session, wire.Subscribe())
    start, published, broadcast = desk.submit("c", store(b"a"))
    assert sorted(broadcast.sessions) == ["a", "b"]
    assert broadcast.message == published.key_events
    finished, *rest = desk.end(start.plan)
    assert isinstance(finished, SendMessage)
    assert heard(rest) == [("stored", b"a")]


def test_who_left_or_is_elsewhere_is_told_nothing() -> None:
    desk = NamespacesFixture("a", "b")
    desk.come("n")
    desk.enter("n", OTHER)
    for session in ("b", "n"):
        desk.ask(session, wire.Subscribe())
    desk.part("b")
    assert heard(desk.submit("a", store(b"a"))) is None
    desk.ask("a", wire.Subscribe())
    desk.register("n")
    (action,) = (a for a in desk.submit("n", store(b"a")) if isinstance(a, Broadcast))
    assert action.sessions == ("n",)
    assert action.message.sequence == 1  # each namespace counts for itself


def test_a_snapshot_lists_the_keys_of_some_blocks_in_each_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespace_module, "SNAPSHOT_BLOCKS", 2)
    desk = NamespacesFixture("a", "b", quota=2 * ROOM)
    desk.stored("a", b"abc")
    plan = desk.start("a", store(b"de"))
    (stream,) = desk.ask("b", wire.Subscribe())
    first = next(stream.messages)
    desk.end(plan)  # its event is of sequence 4, and is applied after the snapshot
    assert [first, *stream.messages] == [
        wire.Snapshot(3, 0, False, (b"a", b"b")),
        wire.Snapshot(3, 1, False, (b"c", b"d")),
        wire.Snapshot(3, 2, False, (b"e",)),
        wire.Snapshot(3, 3, False, (), True),
    ]


def test_a_snapshot_of_what_is_on_its_way_alone_is_one_part() -> None:
    desk = NamespacesFixture("a")
    desk.start("a", store(b"ab"))
    (stream,) = desk.ask("a", wire.Subscribe())
    assert list(stream.messages) == [wire.Snapshot(1, 0, True, (b"a", b"b"), True)]


def test_more_keys_than_an_event_may_name_are_several_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespace_module, "MAX_KEYS", 2)
    desk = NamespacesFixture("a")
    assert heard(desk.submit("a", store(b"abc")), PublishKVEvents) == [
        ("pending", b"ab"),
        ("pending", b"c"),
    ]


# Status


def test_the_status_of_namespaces_says_what_is_there() -> None:
    desk = NamespacesFixture("b", "a/worker", "a/scheduler", policy="arc", threshold=2)
    for _ in range(2):
        desk.stored("b", b"abc")
    desk.stored("b", b"z")  # offered once: skipped
    for _ in range(2):
        plan = desk.start("b", store(b"d"))
    desk.end(plan)
    desk.start("b", load(b"ab"))
    for _ in range(2):
        desk.submit("b", store(b"e"))
    desk.ask("a/scheduler", wire.Pin(each(b"b")))
    desk.ask("a/scheduler", wire.Touch(each(b"ab"), 5, 6))
    desk.come("n")
    desk.enter("n", OTHER, 2 * PAGE)
    desk.part("n")
    assert desk.namespaces() == (
        told.NamespaceStatus(
            name=FINGERPRINT.name,
            fingerprint=FINGERPRINT,
            policy="arc",
            engines=("a", "b"),
            blocks=4,
            block_bytes=PAGE,
            free=0,
            pending=1,
            ready=3,
            unverified=0,
            orphaned=0,
            pinned=2,
            hits=5,
            misses=6,
            stored=4,
            stores_skipped=6,
            evictions=1,
        ),
        told.NamespaceStatus(OTHER.name, OTHER, "lru", (), 2, PAGE, 2, *(0,) * 10),
    )
