"""Namespaces against dictionaries: which keys load and with what content, and what is told of them.

The machine stands for engines, the server and the lane: it asks what engines may ask, reports what
a lane may report in any order, and knows what every answer must be, except for who is evicted; that
it takes from the news, and checks that they were allowed to go. The pool is a row of cells that
remember what was written to them last, so that a load proves that its bytes are those of its keys.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeAlias, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

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
    SendMessage,
    SendStream,
    StartTransfer,
    TensorsMapped,
    TensorsUnmapped,
    TransferCompleted,
    UnmapTensors,
)
from kvferry.daemon.core.core import Core
from kvferry.daemon.core.status import DaemonIdentity
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto import status as told
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.keys import EventKind
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from support.region_records_model import RegionRecordsModel

CELL = 128
ROOM = 4096
POOL = 2 * ROOM
"""Room for two regions; two namespaces and a newcomer want one each."""
GPU_BLOCKS = 64
PLAIN = KVLayout((TensorLayout(GPU_BLOCKS, 1024, 1024),), ((TensorRef(0, 1024),),))
HYBRID = KVLayout(
    (TensorLayout(GPU_BLOCKS, 256, 256), TensorLayout(GPU_BLOCKS, 128, 128)),
    ((TensorRef(0, 256),), (TensorRef(1, 128),)),
    3,
)
SHORT = KVLayout(HYBRID.tensors, HYBRID.groups, 2)
LAYOUTS = {
    told.Fingerprint("m", layout.host_block_bytes, key_bytes=1): layout
    for layout in (PLAIN, HYBRID)
}
"""The layout that fills the host blocks of each namespace."""
FITTING = {PLAIN: [PLAIN, HYBRID, SHORT], HYBRID: [HYBRID, SHORT]}
"""Layouts that may enter in its place: those whose host blocks fit into its."""
LETTERS = [[bytes([letter]) for letter in letters] for letters in (b"abcdefghij", b"uvwxyz")]
"""The keys of each group."""


def group_of(key: bytes) -> int:
    return int(key in LETTERS[1])


ENDS = st.sampled_from([Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED])
WORDS = st.sampled_from(
    [wire.Pin((b"a",)), wire.Unpin(()), wire.Touch(()), wire.Reset(1), wire.Subscribe()]
)
FAULT = ErrorInfo(Code.COPY_FAILED, "the copy failed")
NEWCOMER = "newcomer"
MOST_SESSIONS = 6
T = TypeVar("T")
DEVICE = told.DeviceInfo("cpu", "cpu", "host memory")

TAKEN = Code.POOL_FULL, Code.ALREADY_REGISTERED
"""What is refused with these waits where somebody leaves."""
Foreseen: TypeAlias = Code | Callable[[list[Any]], None]
"""With what it is refused; or what to hold the answer against."""
Foresee: TypeAlias = Callable[[], Foreseen]
"""What follows from a request now, in the model, where it is done, too."""

Content: TypeAlias = tuple[int, bytes, int]
"""What a store wrote: its serial, the key, and which sub-block of it."""


# What is asked


@dataclass(frozen=True)
class MovedBlock:
    """A GPU block of a transfer, and what it is there for."""

    group: int
    gpu_block: int
    position: int
    """Which of the keys named."""
    key: bytes
    sub: int


@dataclass(frozen=True)
class ModelRequest:
    gpu: GPULoadStoreSpec
    keys: tuple[bytes, ...]
    places: tuple[MovedBlock, ...]


@st.composite
def requests(draw: st.DrawFn, layout: KVLayout, letters: Sequence[Sequence[bytes]]) -> ModelRequest:
    """Some of these keys for each group, the first and last host block of them perhaps in part."""
    factor, gpu_blocks = layout.block_size_factor, count(draw(st.integers(0, 20)))
    sizes, indices, names = list[int](), list[int](), list[bytes]()
    places: list[MovedBlock] = []
    for group in range(len(layout.groups)):
        least = draw(st.sampled_from([1, 1, 1, 0])) if letters[group] else 0
        most = 4 if letters[group] else 0
        keys = draw(
            st.lists(st.sampled_from(letters[group] or [b""]), min_size=least, max_size=most)
        )
        skip, cut = (min(factor - 1, draw(st.sampled_from([0, 0, 0, 1, 2]))) for _ in range(2))
        if len(keys) == 1 and skip + cut >= factor:
            cut = 0
        size = len(keys) * factor - skip - cut if keys else 0
        for number in range(skip, skip + size):
            block, sub = divmod(number, factor)
            places.append(MovedBlock(group, next(gpu_blocks), len(names) + block, keys[block], sub))
        sizes.append(size)
        indices.append(skip + factor * draw(st.integers(0, 1)))
        names += keys
    gpu = GPULoadStoreSpec([place.gpu_block for place in places], tuple(sizes), tuple(indices))
    return ModelRequest(gpu, tuple(names), tuple(places))


def copies(plan: CopyPlan) -> list[tuple[int, int, int]]:
    """(group, GPU block, byte of the pool), all that a plan copies."""
    return [
        (run.group, int(block), int(offset))
        for run in plan.extents
        for block, offset in zip(run.gpu_blocks, run.host_offsets, strict=True)
    ]


# The model


@dataclass(frozen=True)
class Held:
    """A host block with a key: where it begins in the pool, who stored it, and how much of it."""

    at: int
    serial: int
    subs: tuple[int, ...]


@dataclass(eq=False)
class ModelJob:
    serial: int
    direction: Direction
    session: str | None
    """Who wants to hear of it."""
    claim: ModelRegistration
    generation: int
    held: dict[bytes, Held]
    """What it stores, or what it loads."""
    cells: list[tuple[int, int, Content]]
    """(offset, bytes, what it writes there or must find there)"""

    @property
    def space(self) -> Space:
        return self.claim.space


@dataclass(eq=False)
class ModelRegistration:
    """An engine's registration, as the lane sees it."""

    number: int
    engine: str
    session: str
    space: Space
    layout: KVLayout
    mapped: bool = False
    leaving: bool = False

    @property
    def open(self) -> bool:
        return self.mapped and not self.leaving


class ModelMirror:
    """What somebody makes of the news."""

    def __init__(self, stream: Iterator[Any] | None = None, generation: int = 1) -> None:
        self.stream = stream
        self.generation = generation
        """Of the snapshot."""
        self.sequence = self.parts = 0
        self.ready, self.pending = set[bytes](), set[bytes]()
        self.early: list[wire.KeyEvents] = []

    def hear(self, news: wire.KeyEvents) -> None:
        if self.stream is not None:
            self.early.append(news)
            return
        self.sequence += 1
        assert news.sequence == self.sequence
        assert news.events
        for event in news.events:
            self.check(event.kind, set(event.keys))
            self.apply(event.kind, set(event.keys))
            assert len(set(event.keys)) == len(event.keys)

    def check(self, kind: EventKind, keys: set[bytes]) -> None:
        before = {
            EventKind.PENDING: set[bytes](),
            EventKind.STORED: self.pending,
            EventKind.ABANDONED: self.pending,
            EventKind.REMOVED: self.ready,
            EventKind.CLEARED: set[bytes](),
        }
        assert keys & (self.ready | self.pending) == keys & before[kind]
        assert kind is EventKind.PENDING or keys <= before[kind]

    def apply(self, kind: EventKind, keys: set[bytes]) -> None:
        self.ready -= keys
        self.pending -= keys
        match kind:
            case EventKind.PENDING:
                self.pending |= keys
            case EventKind.STORED:
                self.ready |= keys
            case EventKind.CLEARED:
                self.ready, self.pending = set(), set()

    def read(self) -> None:
        """The next part of the snapshot, and behind the last what was told meanwhile."""
        assert self.stream is not None
        part = next(self.stream)
        assert isinstance(part, wire.Snapshot)
        assert (part.part, part.generation) == (self.parts, self.generation)
        assert self.parts == 0 or part.sequence == self.sequence
        self.parts, self.sequence = self.parts + 1, part.sequence
        (self.pending if part.pending else self.ready).update(part.keys)
        if part.last:
            assert next(self.stream, None) is None
            self.stream, early = None, self.early
            for news in early:  # parts of the snapshot may contain its changes already
                self.sequence += 1
                assert news.sequence == self.sequence
                for event in news.events:
                    self.apply(event.kind, set(event.keys))


@dataclass(eq=False)
class Space:
    """A namespace from when it is made until its room is given away."""

    fingerprint: told.Fingerprint
    start: int
    policy: str
    threshold: int
    layout: KVLayout | None = None
    """Of those who entered last: what is stored is made so."""
    generation: int = 1
    """One more with each reset."""
    sessions: dict[str, str] = field(default_factory=dict)
    claims: set[ModelRegistration] = field(default_factory=set)
    ready: dict[bytes, Held] = field(default_factory=dict)
    pending: dict[bytes, Held] = field(default_factory=dict)
    pins: dict[str, dict[bytes, list[tuple[int, Held] | None]]] = field(default_factory=dict)
    """By session; (generation, block) or None, of what was not there."""
    offers: Counter[bytes] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    followers: dict[str, ModelMirror] = field(default_factory=dict)
    listener: ModelMirror = field(default_factory=ModelMirror)

    @property
    def name(self) -> str:
        return self.fingerprint.name

    @property
    def capacity(self) -> int:
        return ROOM // self.fingerprint.host_block_bytes

    @property
    def used(self) -> bool:
        return bool(self.sessions or self.claims)

    def configure(self, policy: str, threshold: int) -> None:
        """Its keys and what was counted stay; what was offered does not."""
        if (policy, threshold) == (self.policy, self.threshold):
            return
        self.policy, self.threshold = policy, threshold
        self.offers.clear()

    def all_pins(self) -> Iterator[tuple[bytes, int, Held]]:
        for held in self.pins.values():
            for key, pins in held.items():
                yield from ((key, *pin) for pin in pins if pin is not None)

    @property
    def factor(self) -> int:
        return 1 if self.layout is None else self.layout.block_size_factor

    def hits(self) -> set[bytes]:
        """Keys that are stored whole."""
        return {key for key, held in self.ready.items() if len(held.subs) == self.factor}

    def wanted(self, keys: Sequence[bytes], replaced: set[bytes]) -> list[bytes]:
        """Who is to be stored. It is an offer of those that are absent, and counts."""
        present = {*self.ready, *self.pending} - replaced
        absent = [k for k in dict.fromkeys(keys) if k not in present]
        self.offers.update(absent)
        wanted = [key for key in absent if self.offers[key] >= self.threshold]
        self.counts["stores_skipped"] += len(absent) - len(wanted)
        return wanted

    def status(self, orphaned: int, pinned: int) -> told.NamespaceStatus:
        blocks, used = self.capacity, len(self.ready) + len(self.pending) + orphaned
        return told.NamespaceStatus(
            name=self.name,
            fingerprint=self.fingerprint,
            policy=self.policy,
            engines=tuple(sorted(set(self.sessions.values()))),
            blocks=blocks,
            block_bytes=self.fingerprint.host_block_bytes,
            free=blocks - used,
            pending=len(self.pending),
            ready=len(self.ready),
            unverified=0,
            orphaned=orphaned,
            pinned=pinned,
            **{name: self.counts[name] for name in COUNTS},
        )


COUNTS = ("hits", "misses", "stored", "stores_skipped", "evictions")


class Room:
    """The pool has room for so many owners; who was away longest makes room for a new one."""

    def __init__(self) -> None:
        self.present: list[str] = []
        self.deserted: list[str] = []

    def claim(self, owner: str) -> tuple[bool, str | None] | None:
        """Whether it was there before, and who went for it; None where there is no room."""
        back, gone = owner in self.deserted, None
        if back:
            self.deserted.remove(owner)
        elif len(self.present) + len(self.deserted) == POOL // ROOM:
            if not self.deserted:
                return None
            gone = self.deserted.pop(0)
        self.present.append(owner)
        return back, gone

    def desert(self, owner: str) -> None:
        self.present.remove(owner)
        self.deserted.append(owner)


# Anything may happen

CHANCES = {
    "store": 12,
    "load": 9,
    "submit_nonsense": 2,
    "lane_ends": 8,
    "lane_maps": 2,
    "lane_unmaps": 3,
    "come": 4,
    "come_with_tensors": 3,
    "open_again": 1,
    "leave": 2,
    "everybody_leaves": 2,
    "a_newcomer_comes_or_goes": 3,
    "pin": 3,
    "unpin": 3,
    "touch": 1,
    "reset": 3,
    "follow": 2,
    "read_on": 3,
    "speak_from_outside": 1,
    "status": 1,
}
HAPPENS = [name for name, chance in CHANCES.items() for _ in range(chance)]


def needs(what: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """A step that can be done only where there are any of these."""

    def decorate(step: Callable[[Any], None]) -> Callable[[Any], None]:
        def checked(world: Any) -> None:
            if getattr(world, what):
                step(world)

        return checked

    return decorate


class NamespacesModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.draw: Any = None
        limits = told.Limits(1 << 20, 1 << 10, 1000)
        self.core = Core(DaemonIdentity("0.1", "boot", 4711, DEVICE, limits, 100.0), POOL)
        self.books = RegionRecordsModel()
        self.pool: list[Content | None] = [None] * (POOL // CELL)
        self.room = Room()
        self.names = (f"s{n}" for n in count())
        self.numbers = count(1)
        """Of requests, and of jobs."""
        self.engine_of: dict[str, str] = {}
        self.spaces: dict[told.Fingerprint, Space] = {}
        self.holders: dict[str, ModelRegistration] = {}
        self.waiting: dict[str, Foresee] = {}
        """session -> what it asked for, where who leaves had it then"""
        self.jobs: dict[int, ModelJob] = {}
        self.lost: list[Space] = []
        """Those that have just given their room away."""
        self.newcomer = 0
        """Its registration."""

    # What the core asks for and tells

    def ask(self, session: str, message: wire.ClientMessage) -> list[Any]:
        return self.hear(self.core.handle(session, message, now=101.0))

    def hear(self, actions: list[Action]) -> list[Any]:
        """Take the news in. Returns what else the core wants."""
        actions = self.books.observe(actions)
        published = [action for action in actions if isinstance(action, PublishKVEvents)]
        broadcast = [action for action in actions if isinstance(action, Broadcast)]
        named = {space.name: space for space in self.spaces.values()}
        for space in self.lost:
            cleared = (wire.KeyEvent(EventKind.CLEARED, ()),)
            news = wire.KeyEvents(space.listener.sequence + 1, cleared, space.generation + 1)
            assert published.pop(0) == PublishKVEvents(space.name, 0, news)
        self.lost = []
        for action in published:
            space = named.pop(action.namespace)  # one News of each at once
            assert action.block_size == 0
            assert action.key_events.generation == space.generation
            space.listener.hear(action.key_events)
            if space.followers:
                copy = broadcast.pop(0)
                assert copy.message == action.key_events
                assert sorted(copy.sessions) == sorted(space.followers)
                for mirror in space.followers.values():
                    mirror.hear(copy.message)
        assert not broadcast
        return [
            action
            for action in actions
            if type(action) not in (PublishKVEvents, Broadcast, FreeDeferred)
        ]

    def error(self, actions: list[Any], session: str, code: Code) -> None:
        (action,) = actions
        assert action.session == session
        match action.message:
            case wire.Finished((result,)):
                assert result.outcome is Outcome.REFUSED
                assert result.error is not None
                assert result.error.code == code
            case wire.Error(error=error):
                assert error.code == code
            case other:
                raise AssertionError(other)

    # The model, looked at

    def space_of(self, session: str) -> Space | None:
        return next((s for s in self.spaces.values() if session in s.sessions), None)

    @property
    def inside(self) -> list[str]:
        return [session for session in self.engine_of if self.space_of(session)]

    @property
    def outside(self) -> list[str]:
        return [session for session in self.engine_of if not self.space_of(session)]

    @property
    def able(self) -> list[str]:
        """Sessions that may submit."""
        holders = {engine for engine, claim in self.holders.items() if claim.open}
        return [session for session, engine in self.engine_of.items() if engine in holders]

    @property
    def opening(self) -> list[ModelRegistration]:
        return [claim for claim in self.holders.values() if not claim.mapped]

    @property
    def closing(self) -> list[ModelRegistration]:
        return [claim for claim in self.holders.values() if claim.leaving]

    @property
    def reading(self) -> list[ModelMirror]:
        """Followers who have not read all of their snapshot."""
        mirrors = [mirror for s in self.spaces.values() for mirror in s.followers.values()]
        return [mirror for mirror in mirrors if mirror.stream is not None]

    def jobs_of(self, space: Space, *, past: bool) -> list[ModelJob]:
        jobs = self.jobs.values()
        return [
            job
            for job in jobs
            if job.space is space and (job.generation < space.generation) == past
        ]

    def orphaned(self, space: Space) -> set[int]:
        pins = {
            held.at for _, generation, held in space.all_pins() if generation < space.generation
        }
        return pins.union(h.at for job in self.jobs_of(space, past=True) for h in job.held.values())

    def pinned(self, space: Space) -> set[bytes]:
        loads = [j for j in self.jobs_of(space, past=False) if j.direction is Direction.LOAD]
        pins = {key for key, generation, _ in space.all_pins() if generation == space.generation}
        return pins.union(key for job in loads for key in job.held)

    def free(self, space: Space) -> int:
        orphaned = self.orphaned(space)
        return space.capacity - len(space.ready) - len(space.pending) - len(orphaned)

    def write(self, offset: int, nbytes: int, content: Content | None) -> None:
        cells = slice(offset // CELL, (offset + nbytes) // CELL)
        self.pool[cells] = [content] * (nbytes // CELL)

    def check_content(self, offset: int, nbytes: int, content: Content) -> None:
        cells = self.pool[offset // CELL : (offset + nbytes) // CELL]
        assert cells == [content] * (nbytes // CELL)

    def make_room(self, owner: str) -> bool | None:
        """Whether an owner was there before; None where the pool is full."""
        claimed = self.room.claim(owner)
        if claimed is None:
            return None
        back, gone = claimed
        self.lost += [space for space in self.spaces.values() if space.name == gone]
        self.spaces = {f: space for f, space in self.spaces.items() if space.name != gone}
        return back

    def settle(self, space: Space) -> None:
        if not space.used:
            self.room.desert(space.name)

    # What happens

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        self.draw = data.draw
        getattr(self, self.one_of(HAPPENS))()

    def one_of(self, things: Iterable[T]) -> T:
        thing: T = self.draw(st.sampled_from(list(things)))
        return thing

    # Sessions

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.draw = data.draw
        plain, hybrid = LAYOUTS
        layouts = {plain: self.one_of(FITTING[PLAIN]), hybrid: self.one_of(FITTING[HYBRID])}
        for engine, fingerprint in (("a", plain), ("b", plain), ("c", hybrid)):
            self.welcome(engine)
            (*_, session) = self.engine_of
            policy, threshold = self.one_of(["lru", "arc"]), self.one_of([1, 1, 1, 2])
            self.open(session, fingerprint, ROOM, policy, threshold)
            self.register(session, layouts[fingerprint], mapped=True)
            self.store_some(session, Outcome.DONE)
            self.follow_from(session, at_once=True)

    def welcome(self, engine: str) -> str:
        session = next(self.names)
        self.core.open_session(session, wire.Hello(1, 1, "client", engine))
        self.engine_of[session] = engine
        return session

    def come(self) -> None:
        if len(self.engine_of) < MOST_SESSIONS:
            session = self.welcome(self.one_of("abc"))
            policy, threshold = self.one_of(["lru", "arc"]), self.one_of([1, 1, 1, 2])
            self.open(session, self.one_of(LAYOUTS), ROOM, policy, threshold)

    @needs("engine_of")
    def open_again(self) -> None:
        session, quota = self.one_of(self.engine_of), self.one_of([ROOM, ROOM, 0, 3 * ROOM])
        self.open(session, self.one_of(LAYOUTS), quota, self.one_of(["lru", "arc"]), 1)

    def open(
        self, session: str, fingerprint: told.Fingerprint, quota: int, policy: str, threshold: int
    ) -> None:
        message = wire.OpenNamespace(next(self.numbers), fingerprint, quota, policy, threshold)
        self.claim(session, message, partial(self.opens, session, message))

    def opens(self, session: str, message: wire.OpenNamespace) -> Foreseen:
        fingerprint = message.fingerprint
        engine, space = self.engine_of[session], self.spaces.get(fingerprint)
        others = [s for s in self.spaces.values() if s is not space]
        if any(engine in other.sessions.values() for other in others):
            return Code.NAMESPACE_MISMATCH
        back: bool | None = True
        if space is None or not space.used:
            back = self.make_room(fingerprint.name) if message.quota_bytes == ROOM else None
        if back is None:
            return Code.POOL_FULL
        if not back:
            space = Space(fingerprint, 0, message.policy, message.store_threshold)
            self.spaces[fingerprint] = space
        assert space is not None
        if not space.used:
            space.configure(message.policy, message.store_threshold)
        space.sessions[session] = engine
        space.pins.setdefault(session, {})
        unlike = tuple(
            f"{other.name}: {'; '.join(fingerprint.differences(other.fingerprint))}"
            for other in self.spaces.values()
            if other is not space
        )
        opened = wire.Opened(
            message.request_id,
            space.name,
            space.capacity,
            fingerprint.host_block_bytes,
            bool(back),
            space.policy,
            space.threshold,
            unlike,
            space.generation,
        )
        return partial(self.opened, space, SendMessage(session, opened))

    def opened(self, space: Space, expected: SendMessage, actions: list[Any]) -> None:
        assert actions == [expected]
        space.start = self.core._namespaces._by_name[space.name].region.start

    def claim(self, session: str, message: wire.ClientMessage, foresee: Foresee) -> None:
        """Ask for what may still be theirs who leave."""
        if session in self.waiting:
            return self.error(self.ask(session, message), session, Code.BUSY)
        foreseen = foresee()
        actions = self.ask(session, message)
        if foreseen in TAKEN and self.closing:
            assert actions == []
            self.waiting[session] = foresee
        else:
            self.comes_true(foreseen, actions, session)
        return None

    def comes_true(self, foreseen: Foreseen, actions: list[Any], session: str) -> None:
        if isinstance(foreseen, Code):
            self.error(actions, session, foreseen)
        else:
            foreseen(actions)

    def unmapped(self, number: int) -> None:
        """The lane has let go: who waits asks again, in the order in which they came."""
        waiting, self.waiting = self.waiting, {}
        answered = dict[str, Foreseen]()
        for session, foresee in waiting.items():
            foreseen = foresee()
            if foreseen in TAKEN and self.closing:
                self.waiting[session] = foresee
            else:
                answered[session] = foreseen
        actions = self.hear(self.core.report(TensorsUnmapped(number)))
        for (session, foreseen), action in zip(answered.items(), actions, strict=True):
            self.comes_true(foreseen, [action], session)

    @needs("engine_of")
    def leave(self) -> None:
        self.kill(self.one_of(self.engine_of), self.draw(st.booleans()))

    @needs("spaces")
    def everybody_leaves(self) -> None:
        """One namespace, and the lane lets go of all tensors there."""
        space = self.spaces[self.one_of(self.spaces)]
        for session in self.draw(st.permutations(list(space.sessions))):
            self.kill(session)
            for claim in self.closing:
                self.unmap(claim, self.draw(ENDS))

    def kill(self, session: str, polite: bool = False) -> None:
        engine, space = self.engine_of.pop(session), self.space_of(session)
        if space is not None:
            del space.sessions[session], space.pins[session]
            space.followers.pop(session, None)
            self.settle(space)
        expected: list[Action] = [SendMessage(session, wire.Goodbye())] if polite else []
        expected.append(CloseSession(session))
        given_up: defaultdict[int, list[int]] = defaultdict(list)
        for job in self.jobs.values():
            if job.session == session:
                job.session = None
                given_up[job.claim.number].append(job.serial)
        expected += [
            CancelTransfers(number, tuple(serials)) for number, serials in given_up.items()
        ]
        claim = self.holders.get(engine)
        if claim is not None and claim.session == session and not claim.leaving:
            claim.leaving = True
            expected.append(UnmapTensors(claim.number))
        self.waiting.pop(session, None)
        if polite:
            assert self.ask(session, wire.Goodbye()) == expected
        else:
            assert self.core.close_session(session) == expected

    # Registrations

    @needs("inside")
    def come_with_tensors(self) -> None:
        free = [s for s in self.inside if self.engine_of[s] not in self.holders]
        session = self.one_of(free or self.inside[:1])
        space = self.space_of(session)
        assert space is not None
        layouts = FITTING[LAYOUTS[space.fingerprint]]
        if self.bound(space) and space.layout:
            layouts = [space.layout, space.layout, PLAIN, HYBRID, SHORT]
        self.register(session, self.one_of(layouts), self.draw(st.booleans()))

    def bound(self, space: Space) -> bool:
        """Whether there is anything that newcomers must be like."""
        return bool(space.claims) or self.free(space) < space.capacity

    def register(self, session: str, layout: KVLayout, mapped: bool) -> None:
        message = wire.AllocateKVCaches(next(self.numbers), layout)
        engine, before = self.engine_of[session], set(self.holders)
        self.claim(session, message, partial(self.registers, session, layout))
        if mapped and engine in self.holders.keys() - before:
            self.map(self.holders[engine], works=True)

    def registers(self, session: str, layout: KVLayout) -> Foreseen:
        """It is on its way where its blocks are made as those that are there."""
        space, engine = self.space_of(session), self.engine_of[session]
        assert space is not None
        if engine in self.holders:
            return Code.ALREADY_REGISTERED
        unlike = self.bound(space) and space.layout not in (None, layout)
        if unlike or layout.host_block_bytes > space.fingerprint.host_block_bytes:
            return Code.NAMESPACE_MISMATCH
        claim = ModelRegistration(0, engine, session, space, layout)
        self.holders[engine], space.layout = claim, layout
        space.claims.add(claim)
        return partial(self.begins, claim)

    def begins(self, claim: ModelRegistration, actions: list[Any]) -> None:
        (mapping,) = actions
        assert isinstance(mapping, MapTensors)
        assert mapping.session == claim.session
        claim.number = mapping.registration

    @needs("opening")
    def lane_maps(self) -> None:
        self.map(self.one_of(self.opening), self.one_of([True, True, False]))

    def map(self, claim: ModelRegistration, works: bool) -> None:
        claim.mapped = True
        error = None if works else ErrorInfo(Code.MAP_FAILED, "no memory")
        actions = self.hear(self.core.report(TensorsMapped(claim.number, claim.session, error)))
        if claim.leaving:
            assert actions == []
        elif works:
            (action,) = actions
            space = claim.space
            region = memory.HostRegion(space.capacity, space.fingerprint.host_block_bytes, False)
            assert (action.session, action.message.region) == (claim.session, region)
        else:
            self.error(actions, claim.session, Code.MAP_FAILED)
            self.release(claim)

    def release(self, claim: ModelRegistration) -> None:
        del self.holders[claim.engine]
        claim.space.claims.remove(claim)
        self.settle(claim.space)

    @needs("closing")
    def lane_unmaps(self) -> None:
        self.unmap(self.one_of(self.closing), self.draw(ENDS))

    def unmap(self, claim: ModelRegistration, outcome: Outcome) -> None:
        if not claim.mapped:
            self.map(claim, works=True)
        for job in [job for job in self.jobs.values() if job.claim is claim]:
            self.end(job, outcome)
        self.release(claim)
        self.unmapped(claim.number)

    # Transfers

    @needs("able")
    def store(self) -> None:
        self.store_some(self.one_of(self.able), self.one_of([None, None, Outcome.DONE]))

    def store_some(self, session: str, at_once: Outcome | None) -> None:
        claim = self.holders[self.engine_of[session]]
        space, request = claim.space, self.draw(requests(claim.layout, LETTERS))
        replaced = self.replaced(space, request)
        wanted = space.wanted(request.keys, replaced)
        replaced &= set(wanted)
        keep = tuple(self.draw(st.lists(st.sampled_from([b"a", b"b", b"u"]), max_size=2)))
        movable = space.ready.keys() - self.pinned(space) - {*request.keys, *keep}
        room, orphaned = self.free(space) + len(replaced), self.orphaned(space)
        missing = max(0, len(wanted) - room)
        generation = self.draw(st.sampled_from([0, space.generation]))
        spec = KeyLoadStoreSpec(request.keys, generation, keep)
        actions = self.ask(session, wire.Submit(next(self.numbers), request.gpu, spec))
        if missing > len(movable):
            space.counts["stores_skipped"] += len(wanted)
            return self.error(actions, session, Code.CACHE_FULL)
        for key in replaced:
            del space.ready[key]
        entries = dict(self.core._namespaces._by_name[space.name].cache.entries())
        gone = space.ready.keys() - entries.keys()
        assert (len(gone), gone <= movable) == (missing, True)
        space.counts["evictions"] += len(gone)
        for key in gone:
            del space.ready[key]
        first = {key: request.keys.index(key) for key in wanted}
        places = [place for place in request.places if place.position == first.get(place.key)]
        job = self.started(actions, session, claim, Direction.STORE, places)
        held = job.held.values()
        others = {*(h.at for h in (*space.ready.values(), *space.pending.values())), *orphaned}
        assert list(job.held) == sorted(wanted, key=lambda key: first[key])
        assert len({h.at for h in held}) == len(held)
        assert not others & {h.at for h in held}
        space.pending.update(job.held)
        for offset, nbytes, _ in job.cells:
            self.write(offset, nbytes, None)
        if at_once:
            self.end(job, at_once)
        return None

    def replaced(self, space: Space, request: ModelRequest) -> set[bytes]:
        """Keys stored in part of which this request has all that is there, and more."""
        found = set()
        for key in space.ready.keys() & set(request.keys) - self.pinned(space):
            first = request.keys.index(key)
            subs = {place.sub for place in request.places if place.position == first}
            if subs > set(space.ready[key].subs):
                found.add(key)
        return found

    @needs("able")
    def load(self) -> None:
        session = self.one_of(self.able)
        claim = self.holders[self.engine_of[session]]
        ready = [[key for key in letters if key in claim.space.ready] for letters in LETTERS]
        letters = self.one_of([ready, ready, LETTERS])
        self.load_by_key(session, claim, self.draw(requests(claim.layout, letters)))

    def load_by_key(self, session: str, claim: ModelRegistration, request: ModelRequest) -> None:
        ready, spec = claim.space.ready, KeyLoadStoreSpec(request.keys, 1)  # not compared
        actions = self.ask(session, wire.Submit(next(self.numbers), spec, request.gpu))
        if any(p.key not in ready or p.sub not in ready[p.key].subs for p in request.places):
            return self.error(actions, session, Code.KEY_ABSENT)
        job = self.started(actions, session, claim, Direction.LOAD, request.places)
        assert {key: held.at for key, held in job.held.items()} == {
            key: ready[key].at for key in request.keys
        }
        return None

    def started(
        self,
        actions: list[Any],
        session: str,
        claim: ModelRegistration,
        direction: Direction,
        places: Sequence[MovedBlock],
    ) -> ModelJob:
        """A plan copies these places and no others, inside the region, each key in one block."""
        (start,) = actions
        assert isinstance(start, StartTransfer)
        plan, space = start.plan, claim.space
        assert (start.session, plan.registration, plan.direction) == (
            session,
            claim.number,
            direction,
        )
        moved = copies(plan)
        assert [copy[:2] for copy in moved] == [(p.group, p.gpu_block) for p in places]
        size, held = space.fingerprint.host_block_bytes, dict[bytes, Held]()
        cells: list[tuple[int, int, Content]] = []
        for place, (group, _, offset) in zip(places, moved, strict=True):
            nbytes = claim.layout.group_bytes(group)
            at = offset - place.sub * nbytes
            block, rest = divmod(at - space.start, size)
            assert (0 <= block < space.capacity, rest) == (True, 0)
            known = space.ready[place.key] if direction is Direction.LOAD else None
            subs = tuple(p.sub for p in places if p.key == place.key)
            one = known or Held(at, plan.serial, subs)
            assert held.setdefault(place.key, one).at == at
            cells.append((offset, nbytes, (one.serial, place.key, place.sub)))
        assert plan.nbytes == sum(nbytes for _, nbytes, _ in cells)
        job = ModelJob(plan.serial, direction, session, claim, space.generation, held, cells)
        self.jobs[job.serial] = job
        return job

    @needs("able")
    def submit_nonsense(self) -> None:
        session, loading = self.one_of(self.able), self.draw(st.booleans())
        claim = self.holders[self.engine_of[session]]
        request = self.draw(requests(claim.layout, LETTERS))
        gpu, keys, generation = request.gpu, request.keys, 0
        sizes, indices = gpu.group_sizes, gpu.block_indices
        match self.draw(st.integers(0, 4)):
            case 0:
                code, keys = Code.SIZE_MISMATCH, (*keys, b"a")
            case 1:
                code, keys = Code.BAD_KEY, (*keys[1:], b"ab")
            case 2:
                code, gpu = Code.UNKNOWN_GROUP, GPULoadStoreSpec([0], (1, 0, 0), (0, 0, 0))
            case 3:
                code, loading = Code.STALE, False
                generation = claim.space.generation + self.draw(st.sampled_from([-1, 1]))
            case _:
                ids = [*gpu.block_ids[1:], GPU_BLOCKS]
                code, gpu = Code.BLOCK_OUT_OF_RANGE, GPULoadStoreSpec(ids, sizes, indices)
        if not request.keys or (code is Code.STALE and not generation):
            return
        host = KeyLoadStoreSpec(keys, generation)
        sides = (host, gpu) if loading else (gpu, host)
        self.error(self.ask(session, wire.Submit(next(self.numbers), *sides)), session, code)

    @needs("jobs")
    def lane_ends(self) -> None:
        self.end(self.jobs[self.one_of(self.jobs)], self.draw(ENDS))

    def end(self, job: ModelJob, outcome: Outcome) -> None:
        space, done = job.space, outcome is Outcome.DONE
        del self.jobs[job.serial]
        if job.direction is Direction.LOAD:
            for cell in job.cells:
                self.check_content(*cell)
        elif done:
            for cell in job.cells:
                self.write(*cell)
        if job.direction is Direction.STORE and job.generation == space.generation:
            for key in job.held:
                del space.pending[key]
            if done:
                space.ready.update(job.held)
                space.counts["stored"] += len(job.held)
        error = FAULT if outcome is Outcome.FAILED else None
        ended = TransferCompleted(job.serial, outcome, 0.0, error)
        actions = self.hear(self.core.report(ended))
        if job.session is None:
            assert actions == []
            return
        (action,) = actions
        (result,) = action.message.results
        cut_off = outcome is Outcome.CANCELLED and not job.claim.open
        assert action.session == job.session
        assert result.outcome == (Outcome.FAILED if cut_off else outcome)
        assert result.nbytes == (sum(nbytes for _, nbytes, _ in job.cells) if done else 0)

    # What sessions say of keys

    def some(self, space: Space) -> tuple[bytes, ...]:
        """Mostly keys that are there."""
        ready = [st.sampled_from(sorted(space.ready))] if space.ready else []
        letters = st.sampled_from([bytes([letter]) for letter in b"abcuvw"])
        return tuple(self.draw(st.lists(st.one_of(*ready, *ready, letters), max_size=4)))

    def somebody(self) -> tuple[str, Space]:
        session = self.one_of(self.inside)
        space = self.space_of(session)
        assert space is not None
        return session, space

    @needs("inside")
    def pin(self) -> None:
        session, space = self.somebody()
        keys = self.some(space)
        assert self.ask(session, wire.Pin(keys)) == []
        for key in keys:
            pin = (space.generation, space.ready[key]) if key in space.ready else None
            space.pins[session].setdefault(key, []).append(pin)

    @needs("inside")
    def unpin(self) -> None:
        session, space = self.somebody()
        mine = space.pins[session]
        keys = self.some(space)
        if self.one_of([True, True, False]):
            all_of_mine = [key for key, pins in mine.items() for _ in pins]
            keys = tuple(self.draw(st.permutations(all_of_mine)))[: len(keys)]
        actions = self.ask(session, wire.Unpin(keys))
        if any(len(mine.get(key, ())) < many for key, many in Counter(keys).items()):
            return self.error(actions, session, Code.NOT_PINNED)
        assert actions == []
        for key in keys:
            pins = mine[key]
            pins.pop(0)
            if not pins:
                del mine[key]
        return None

    @needs("inside")
    def touch(self) -> None:
        session, space = self.somebody()
        hits, misses = self.draw(st.integers(0, 3)), self.draw(st.integers(0, 3))
        assert self.ask(session, wire.Touch(self.some(space), hits, misses)) == []
        space.counts.update(hits=hits, misses=misses)

    @needs("inside")
    def reset(self) -> None:
        with_jobs = {job.space.name for job in self.jobs.values()}
        likely = [
            s for space in self.spaces.values() if space.name in with_jobs for s in space.sessions
        ]
        session = self.one_of(likely or self.inside)
        space = self.space_of(session)
        assert space is not None
        space.ready, space.pending = {}, {}
        space.generation += 1
        space.offers.clear()
        number = next(self.numbers)
        assert self.ask(session, wire.Reset(number)) == [SendMessage(session, wire.Done(number))]

    @needs("outside")
    def speak_from_outside(self) -> None:
        session = self.one_of(self.outside)
        self.error(self.ask(session, self.draw(WORDS)), session, Code.UNKNOWN_NAMESPACE)

    @needs("inside")
    def follow(self) -> None:
        self.follow_from(self.one_of(self.inside), self.draw(st.booleans()))

    def follow_from(self, session: str, at_once: bool) -> None:
        space = self.space_of(session)
        assert space is not None
        (stream,) = self.ask(session, wire.Subscribe())
        assert isinstance(stream, SendStream)
        assert stream.session == session
        mirror = space.followers[session] = ModelMirror(stream.messages, space.generation)
        while at_once and mirror.stream is not None:
            mirror.read()

    @needs("reading")
    def read_on(self) -> None:
        self.reading[self.draw(st.integers(0, len(self.reading) - 1))].read()

    # Others who want room

    def a_newcomer_comes_or_goes(self) -> None:
        """An engine of its own, that writes to all of its region as soon as it has one."""
        if NEWCOMER in self.core.sessions:
            self.core.close_session(NEWCOMER)
            self.room.desert(NEWCOMER)
            self.unmapped(self.newcomer)
            return
        self.core.open_session(NEWCOMER, wire.Hello(1, 1, "client", NEWCOMER))
        room = self.make_room(NEWCOMER)
        actions = self.ask(NEWCOMER, wire.AllocateKVCaches(1, PLAIN, ROOM))
        if room is None:
            if self.closing:
                assert actions == []
            else:
                self.error(actions, NEWCOMER, Code.POOL_FULL)
            self.core.close_session(NEWCOMER)
            return
        self.newcomer = actions[0].registration
        self.hear(self.core.report(TensorsMapped(self.newcomer, NEWCOMER)))
        spec = GPULoadStoreSpec(range(4)), CPULoadStoreSpec(range(4))
        (start,) = self.ask(NEWCOMER, wire.Submit(1, *spec))
        self.hear(self.core.report(TransferCompleted(start.plan.serial, Outcome.DONE)))
        for _, _, offset in copies(start.plan):
            self.write(offset, 1024, (start.plan.serial, b"", 0))

    @needs("engine_of")
    def status(self) -> None:
        session = min(self.engine_of)
        report = wire.NamespacesReport(
            5,
            tuple(
                space.status(len(self.orphaned(space)), len(self.pinned(space)))
                for space in self.spaces.values()
            ),
        )
        assert self.ask(session, wire.NamespacesRequest(5)) == [SendMessage(session, report)]

    # Always

    @invariant()
    def the_books_agree(self) -> None:
        for space in self.spaces.values():
            cache = self.core._namespaces._by_name[space.name].cache
            cache.check_integrity()
            usage, orphaned = cache.usage, len(self.orphaned(space))
            assert usage.free + usage.pending + usage.ready + usage.orphaned == space.capacity
            assert (usage.free, usage.orphaned) == (self.free(space), orphaned)
            assert usage.pinned == len(self.pinned(space))
            size = space.fingerprint.host_block_bytes
            blocks = {key: (held.at - space.start) // size for key, held in space.ready.items()}
            assert dict(cache.entries()) == blocks
            assert set(cache.pending_keys()) == set(space.pending)
            assert set(cache.ready_keys()) == space.hits()

    @invariant()
    def another_daemon_would_find_all_that_is_ready(self) -> None:
        """And nothing else: of a block that a store may be writing, or wrote in part, it knows."""
        limits = told.Limits(1 << 20, 1 << 10, 1000)
        heir = Core(DaemonIdentity("0.1", "next", 4712, DEVICE, limits, 200.0), POOL)
        for found in self.books.found():
            heir.restore_region(found)
        caches = {one.name: one for one in heir._namespaces}
        assert caches.keys() == {space.name for space in self.spaces.values()}
        for space in self.spaces.values():
            ours, theirs = self.core._namespaces._by_name[space.name], caches[space.name]
            theirs.cache.check_integrity()
            entries = dict(theirs.cache.entries())
            assert entries == dict(ours.cache.entries())
            assert theirs.record == ours.record
            for key in entries:
                assert theirs.cache.stored_part(key) == ours.cache.stored_part(key)
            assert theirs.take_key_events() is None
            assert theirs.cache.ready_keys() == []
            assert set(theirs.cache.pending_keys()) == space.hits()
            blocks = np.array(list(entries.values()), dtype=np.int64)
            heir.report(BlocksVerified(theirs.region.owner, blocks, tuple(entries)))
            assert set(theirs.cache.ready_keys()) == space.hits()
        regions = {region.owner: (region.start, region.nbytes) for region in heir._regions}
        mine = {region.owner: (region.start, region.nbytes) for region in self.core._regions}
        assert regions == mine

    @invariant()
    def everybody_was_told_the_truth(self) -> None:
        for space in self.spaces.values():
            for mirror in (space.listener, *space.followers.values()):
                if mirror.stream is None:
                    assert mirror.ready == space.hits()
                    assert mirror.pending == set(space.pending)

    @invariant()
    def what_can_be_loaded_is_what_was_stored(self) -> None:
        for space in self.spaces.values():
            for key, held in space.ready.items():
                assert space.layout is not None
                nbytes = space.layout.group_bytes(group_of(key))
                for sub in held.subs:
                    self.check_content(held.at + sub * nbytes, nbytes, (held.serial, key, sub))
        for job in self.jobs.values():
            if job.direction is Direction.LOAD:
                for cell in job.cells:
                    self.check_content(*cell)

    @invariant()
    def nothing_is_written_by_two(self) -> None:
        stores = [job for job in self.jobs.values() if job.direction is Direction.STORE]
        written = [
            cell
            for job in stores
            for offset, nbytes, _ in job.cells
            for cell in range(offset, offset + nbytes, CELL)
        ]
        assert len(set(written)) == len(written)

    def teardown(self) -> None:
        """Everybody goes; then nothing is held, and what was kept loads."""
        for mirror in self.reading:
            while mirror.stream is not None:
                mirror.read()
        for job in list(self.jobs.values()):
            self.end(job, Outcome.DONE)
        self.everybody_was_told_the_truth()
        for session in sorted(self.engine_of):
            self.kill(session)
        for claim in list(self.holders.values()):
            self.unmap(claim, Outcome.DONE)
        self.the_books_agree()
        for space in list(self.spaces.values()):
            usage = self.core._namespaces._by_name[space.name].cache.usage
            assert (usage.pending, usage.orphaned, usage.pinned) == (0, 0, 0)
            session = self.welcome("heir")
            layout = space.layout or LAYOUTS[space.fingerprint]
            self.open(session, space.fingerprint, ROOM, "lru", 1)
            self.register(session, layout, mapped=True)
            for key, held in space.ready.items():
                group, many = group_of(key), len(layout.groups)
                places = tuple(MovedBlock(group, n, 0, key, sub) for n, sub in enumerate(held.subs))
                sizes = tuple(len(places) * (g == group) for g in range(many))
                gpu = GPULoadStoreSpec(range(len(places)), sizes, (min(held.subs),) * many)
                self.load_by_key(session, self.holders["heir"], ModelRequest(gpu, (key,), places))
            assert len(self.jobs) == len(space.ready)
            self.kill(session)
            self.unmap(self.holders["heir"], Outcome.DONE)


def test_whatever_happens_keys_load_what_was_stored_under_them() -> None:
    run_state_machine_as_test(
        NamespacesModel,
        settings=settings(max_examples=150, stateful_step_count=50),
    )
