"""Tensors that are kept, against a device worker that releases only what it is told to.

Engines connect, allocate, disconnect and are released in any order, while the device worker lags
behind. Once it has caught up, it holds what the status shows, neither more nor less: memory that
nobody can name is lost, and memory that has two names is used twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.core.actions import (
    Action,
    MapTensors,
    ReleaseTensors,
    SendMessage,
    TensorsMapped,
    TensorsUnmapped,
    UnmapTensors,
)
from kvferry.daemon.core.core import Core
from kvferry.daemon.core.status import DaemonIdentity
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef

ENGINES = "abc"
LAYOUTS = tuple(KVLayout((TensorLayout(n, 1024, 1024),), ((TensorRef(0, 1024),),)) for n in (2, 3))
POOL = 16 << 10
PROFILE = settings(max_examples=400)

Step = tuple[str, str, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "keep", "keep", "own", "leave", "leave", "release", "lag"]),
        st.sampled_from(ENGINES),
        st.integers(0, 1),
        st.integers(1, 12),
    ),
    max_size=40,
)


@dataclass(eq=False)
class ModelMemory:
    """What one Map allocated, and for whom."""

    layout: KVLayout
    engine: str


@dataclass
class KeptTensorsModel:
    core: Core
    orders: deque[Action] = field(default_factory=deque)
    held: dict[int, ModelMemory] = field(default_factory=dict)
    """What the device worker holds, by registration."""
    mapped: dict[int, ModelMemory] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    """The session of each engine that is here."""
    numbers: count[int] = field(default_factory=lambda: count(1))
    failing: bool = False

    def session(self, engine: str) -> str:
        if engine not in self.sessions:
            session = self.sessions[engine] = f"{engine}/{next(self.numbers)}"
            self.core.open_session(session, wire.Hello(1, 1, session, engine))
        return self.sessions[engine]

    def take(self, step: Step) -> None:
        verb, engine, choice, size = step
        layout, room, number = LAYOUTS[choice], size << 10, next(self.numbers)
        match verb:
            case "allocate" | "keep":
                keep = verb == "keep"
                self.send(engine, wire.AllocateKVCaches(number, layout, room, None, keep))
            case "own":
                where = (FdAllocation(1, 1 << 20),), (Location(0, 0),)
                self.send(engine, wire.RegisterKVCaches(number, layout, *where, room))
            case "leave" if engine in self.sessions:
                self.obey(self.core.close_session(self.sessions.pop(engine)))
            case "release":
                self.send(engine, wire.ReleaseKVCaches(number, ENGINES[choice]))
            case "lag":
                self.failing = size > 9
                for _ in range(min(size, len(self.orders))):
                    self.work()
                self.failing = False

    def send(self, engine: str, message: wire.ClientMessage) -> None:
        self.obey(self.core.handle(self.session(engine), message, 1.0))

    def obey(self, actions: list[Action]) -> None:
        self.orders.extend(
            a for a in actions if isinstance(a, MapTensors | UnmapTensors | ReleaseTensors)
        )
        for action in actions:
            if isinstance(action, SendMessage) and isinstance(action.message, wire.Released):
                assert action.message.nbytes > 0

    def work(self) -> None:
        """The device worker does its oldest order."""
        match self.orders.popleft():
            case MapTensors() as wanted:
                self.obey(self.core.report(self.map(wanted)))
            case UnmapTensors(number):
                self.mapped.pop(number, None)
                self.obey(self.core.report(TensorsUnmapped(number)))
            case ReleaseTensors(number):
                self.held.pop(number, None)

    def map(self, wanted: MapTensors) -> TensorsMapped:
        number = wanted.registration
        layout = msgspec.convert(wanted.layout.layout_arrays.to_lists(), KVLayout)
        if self.failing:
            return TensorsMapped(number, wanted.session, ErrorInfo(Code.DRIVER, "out of memory"))
        memory, reused = ModelMemory(layout, wanted.session[0]), False
        if wanted.reuse is not None and wanted.reuse in self.held:
            memory, reused = self.held[wanted.reuse], True
            assert (memory.layout, memory.engine) == (layout, wanted.session[0])
        if wanted.locations is None:
            assert memory not in self.mapped.values()  # the very same: nobody else writes to it
        self.mapped[number] = memory
        if wanted.keep:
            self.held[number] = memory
        where = (FdAllocation(1, 1 << 20),) if wanted.locations is None else ()
        return TensorsMapped(number, wanted.session, None, where, reused=reused)

    def check(self) -> None:
        """With a device worker that has caught up."""
        while self.orders:
            self.work()
        status = {engine.name: engine for engine in self.core.status(1.0).engines}
        kept = {name: e.kept_bytes for name, e in status.items() if e.kept_bytes}
        held = dict.fromkeys({memory.engine for memory in self.held.values()}, 0)
        for memory in self.held.values():
            held[memory.engine] += 1 << 20
        assert kept == held


@PROFILE
@given(steps)
def test_the_device_worker_holds_what_the_status_shows(script: list[Step]) -> None:
    device = proto_status.DeviceInfo("cpu", "cpu", "host memory")
    limits = proto_status.Limits(1 << 20, 1 << 10, 8)
    model = KeptTensorsModel(Core(DaemonIdentity("0.1", "boot", 1, device, limits, 0.0), POOL))
    for step in script:
        model.take(step)
    model.check()
    for engine in tuple(model.sessions):
        model.take(("leave", engine, 0, 0))
    model.check()
    for engine in "ab":
        model.take(("release", "c", ENGINES.index(engine), 0))
    model.check()
    assert not [memory for memory in model.held.values() if memory.engine != "c"]
