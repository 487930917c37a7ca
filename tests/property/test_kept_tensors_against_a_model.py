"""Kept tensors, compared with a device worker that releases only memory of ReleaseTensors.

Engines connect, allocate, disconnect and are released in any order, while the device worker is
behind. After it has processed all commands, it holds exactly the memory that the status shows.
Otherwise memory would be lost, or used by two engines.
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
from kvferry.daemon.core.core import Core, PoolBounds
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.ports import Ports
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.protocol import make_hello
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from support.own_epochs import OwnEpochs

ENGINES = "abc"
LAYOUTS = tuple(KVLayout((TensorLayout(n, 1024, 1024),), ((TensorRef(0, 1024),),)) for n in (2, 3))
POOL = 16 << 10
PROFILE = settings(max_examples=200)

Step = tuple[str, str, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["allocate", "keep", "keep", "register", "disconnect", "disconnect", "release", "work"]
        ),
        st.sampled_from(ENGINES),
        st.integers(0, 1),
        st.integers(1, 12),
    ),
    max_size=40,
)


@dataclass(eq=False)
class ModelMemory:
    """The memory that a MapTensors allocated, and its engine."""

    layout: KVLayout
    engine: str


@dataclass
class KeptTensorsModel:
    core: Core
    # Commands that the device worker has not processed.
    commands: deque[Action] = field(default_factory=deque)
    # Memory that the device worker holds, by registration.
    held: dict[int, ModelMemory] = field(default_factory=dict)
    mapped: dict[int, ModelMemory] = field(default_factory=dict)
    # The session of each connected engine.
    sessions: dict[str, str] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=lambda: count(1))
    failing: bool = False

    def session(self, engine: str) -> str:
        if engine not in self.sessions:
            session = self.sessions[engine] = f"{engine}/{next(self.numbers)}"
            self.core.open_session(session, make_hello(session, engine))
        return self.sessions[engine]

    def run_step(self, step: Step) -> None:
        verb, engine, choice, size = step
        layout, host_bytes, number = LAYOUTS[choice], size << 10, next(self.numbers)
        match verb:
            case "allocate" | "keep":
                keep = verb == "keep"
                self.send(engine, wire.AllocateKVCaches(number, layout, host_bytes, None, keep))
            case "register":
                memories = (FdAllocation(1, 1 << 20),), (Location(0, 0),)
                self.send(engine, wire.RegisterKVCaches(number, layout, *memories, host_bytes))
            case "disconnect" if engine in self.sessions:
                self.perform(self.core.close_session(self.sessions.pop(engine)))
            case "release":
                self.send(engine, wire.ReleaseKVCaches(number, ENGINES[choice]))
            case "work":
                self.failing = size > 9
                for _ in range(min(size, len(self.commands))):
                    self.work()
                self.failing = False

    def send(self, engine: str, message: wire.ClientMessage) -> None:
        self.perform(self.core.handle(self.session(engine), message, 1.0))

    def perform(self, actions: list[Action]) -> None:
        self.commands.extend(
            a for a in actions if isinstance(a, MapTensors | UnmapTensors | ReleaseTensors)
        )
        for action in actions:
            if isinstance(action, SendMessage) and isinstance(action.message, wire.Released):
                assert action.message.nbytes > 0

    def work(self) -> None:
        """Process the oldest command of the device worker."""
        match self.commands.popleft():
            case MapTensors() as command:
                self.perform(self.core.report(self.map(command)))
            case UnmapTensors(number):
                self.mapped.pop(number, None)
                self.perform(self.core.report(TensorsUnmapped(number)))
            case ReleaseTensors(number):
                self.held.pop(number, None)

    def map(self, command: MapTensors) -> TensorsMapped:
        number = command.registration
        layout = msgspec.convert(command.layout.layout_arrays.to_lists(), KVLayout)
        if self.failing:
            return TensorsMapped(number, command.session, ErrorInfo(Code.DRIVER, "out of memory"))
        memory, reused = ModelMemory(layout, command.session[0]), False
        if command.reuse is not None and command.reuse in self.held:
            memory, reused = self.held[command.reuse], True
            assert (memory.layout, memory.engine) == (layout, command.session[0])
        if command.locations is None:
            assert memory not in self.mapped.values()  # no other registration may write to it
        self.mapped[number] = memory
        if command.keep:
            self.held[number] = memory
        allocations = (FdAllocation(1, 1 << 20),) if command.locations is None else ()
        return TensorsMapped(number, command.session, None, allocations, reused=reused)

    def check(self) -> None:
        """Process all commands, and compare the held memory with the status."""
        while self.commands:
            self.work()
        status = {engine.name: engine for engine in self.core.engines()}
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
    model = KeptTensorsModel(
        Core(
            DaemonIdentity("0.1", "boot", 1, device, limits, 0.0),
            PoolBounds(POOL),
            Ports(OwnEpochs()),
        )
    )
    for step in script:
        model.run_step(step)
    model.check()
    for engine in tuple(model.sessions):
        model.run_step(("disconnect", engine, 0, 0))
    model.check()
    for engine in "ab":
        model.run_step(("release", "c", ENGINES.index(engine), 0))
    model.check()
    assert not [memory for memory in model.held.values() if memory.engine != "c"]
