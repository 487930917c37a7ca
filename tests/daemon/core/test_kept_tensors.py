"""Tensors that outlive their engine: when they are kept and when they are freed."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.daemon.core.actions import (
    Action,
    KeepTensors,
    MapTensors,
    ReleaseTensors,
    Report,
    SendMessage,
    TensorsMapped,
    TensorsUnmapped,
    UnmapTensors,
)
from kvferry.daemon.core.records import (
    KeptTensorsRecord,
    RecoveredRegion,
    RegionRecord,
    engine_owner,
)
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, ErrorInfo, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.protocol import make_hello
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from support.core_fixture import LAYOUT, CoreFixture

POOL = 16384
SIZE = 1 << 20
FEWER = KVLayout((TensorLayout(4, 1024, 1024),), ((TensorRef(0, 1024),),), 2)


def without_records(actions: list[Any]) -> list[Any]:
    """Actions except those for the records of kept tensors."""
    return [action for action in actions if not isinstance(action, KeepTensors)]


class KeptTensorsFixture(CoreFixture):
    """Adds allocations, and leaves out KeepTensors. Sessions are named engine/process."""

    def __init__(self) -> None:
        super().__init__(pool_bytes=POOL)

    def send(self, session: str, message: wire.ClientMessage) -> list[Any]:
        """Send a message. The first one opens its session."""
        if session not in self.core.sessions:
            self.core.open_session(session, make_hello(session, session.partition("/")[0]))
        return without_records(super().send(session, message))

    def report(self, report: Report) -> list[Any]:
        return without_records(super().report(report))

    def send_allocate(self, session: str, keep: bool, shape: KVLayout, **more: Any) -> list[Any]:
        return self.send(session, wire.AllocateKVCaches(1, shape, keep=keep, **more))

    def allocate(self, session: str, *, keep: bool = True, shape: KVLayout = LAYOUT) -> Any:
        """Allocate tensors with 4096 bytes of the pool, and map them.

        Returns the actions before and after MapTensors, MapTensors, and the reply.
        """
        *before, mapping = self.send_allocate(session, keep, shape, host_bytes=4096)
        *after, reply = self.report_mapped(mapping)
        assert isinstance(reply.message, wire.Allocated)
        return [*before, *after], mapping, reply.message

    def report_mapped(self, mapping: MapTensors, error: ErrorInfo | None = None) -> list[Any]:
        allocations = () if error else (memory.FdAllocation(1, SIZE),)
        reused = mapping.reuse is not None
        number, session = mapping.registration, mapping.session
        return self.report(TensorsMapped(number, session, error, allocations, reused=reused))

    def disconnect(self, session: str) -> list[Action]:
        """Close a session and unmap its tensors. Returns the actions that follow."""
        unmaps = [a for a in self.core.close_session(session) if isinstance(a, UnmapTensors)]
        reports = [self.report(TensorsUnmapped(unmap.registration)) for unmap in unmaps]
        return [action for actions in reports for action in actions]

    def kept(self) -> dict[str, tuple[bool, int]]:
        """Engine -> (is connected, kept bytes), if it has kept tensors."""
        engines = self.core.engines()
        return {e.name: (e.present, e.kept_bytes) for e in engines if e.kept_bytes}


@pytest.fixture
def fixture() -> KeptTensorsFixture:
    return KeptTensorsFixture()


def test_a_reconnected_engine_gets_its_tensors(fixture: KeptTensorsFixture) -> None:
    released, mapping, reply = fixture.allocate("a/1")
    assert (released, mapping.keep, mapping.reuse, reply.kept) == ([], True, None, False)
    assert fixture.kept() == {"a": (True, SIZE)}
    assert fixture.disconnect("a/1") == []
    assert fixture.kept() == {"a": (False, SIZE)}
    released, mapping, reply = fixture.allocate("a/2")
    assert (mapping.reuse, reply.kept) == (1, True)
    assert released == [ReleaseTensors(1)]
    assert fixture.kept() == {"a": (True, SIZE)}


def test_tensors_are_kept_if_the_engine_gets_other_host_blocks(fixture: KeptTensorsFixture) -> None:
    """Another number of bytes frees the engine's region of the pool, but not its tensors."""
    fixture.allocate("a/1")
    fixture.disconnect("a/1")
    (mapping,) = fixture.send_allocate("a/2", True, LAYOUT, host_bytes=8192)
    assert mapping.reuse == 1


def test_without_keep_no_tensors_are_kept(fixture: KeptTensorsFixture) -> None:
    _, mapping, _ = fixture.allocate("a/1", keep=False)
    assert not mapping.keep
    assert fixture.kept() == {}
    assert fixture.disconnect("a/1") == []
    assert fixture.kept() == {}
    assert fixture.allocate("a/2")[1].reuse is None


def test_tensors_allocated_again_without_keep_are_not_kept(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1")
    fixture.disconnect("a/1")
    released, mapping, reply = fixture.allocate("a/2", keep=False)
    assert (released, mapping.reuse, reply.kept) == ([ReleaseTensors(1)], 1, True)
    assert fixture.disconnect("a/2") == []
    assert fixture.kept() == {}


def test_another_layout_frees_kept_tensors_before_it_is_mapped(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1")
    fixture.disconnect("a/1")
    actions = fixture.send_allocate("a/2", True, FEWER, host_bytes=4096)
    assert actions[0] == ReleaseTensors(1)
    assert actions[1].reuse is None
    assert fixture.kept() == {}


def test_an_engine_that_waits_for_the_old_mapping_gets_its_tensors(
    fixture: KeptTensorsFixture,
) -> None:
    fixture.allocate("a/1")
    fixture.core.close_session("a/1")
    assert fixture.send_allocate("a/2", True, LAYOUT, host_bytes=4096) == []
    (mapping,) = fixture.report(TensorsUnmapped(1))
    assert mapping.reuse == 1


def test_kept_tensors_stay_if_they_cannot_be_mapped(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1")
    fixture.disconnect("a/1")
    (mapping,) = fixture.send_allocate("a/2", True, LAYOUT, host_bytes=4096)
    (reply,) = fixture.report_mapped(
        mapping, ErrorInfo(Code.NOT_SHAREABLE, "the page is not sealed")
    )
    assert isinstance(reply.message, wire.Error)
    assert fixture.kept() == {"a": (False, SIZE)}
    fixture.disconnect("a/2")
    assert fixture.allocate("a/3")[1].reuse == 1


def test_kept_tensors_stay_if_the_engine_disconnects_before_they_are_mapped(
    fixture: KeptTensorsFixture,
) -> None:
    """The device worker may have mapped them with the new number. That mapping is released."""
    fixture.allocate("a/1")
    fixture.disconnect("a/1")
    (mapping,) = fixture.send_allocate("a/2", True, LAYOUT, host_bytes=4096)
    assert UnmapTensors(2) in fixture.core.close_session("a/2")
    assert fixture.report_mapped(mapping) == []
    assert fixture.report(TensorsUnmapped(2)) == [ReleaseTensors(2)]
    assert fixture.kept() == {"a": (False, SIZE)}
    assert fixture.allocate("a/3")[1].reuse == 1


def test_kept_tensors_are_freed_with_the_region_of_their_engine(
    fixture: KeptTensorsFixture,
) -> None:
    """A registration or a namespace of another engine needs the room."""
    for number, session in enumerate(("b/1", "c/1"), 1):
        fixture.allocate(f"a/{number}")
        fixture.disconnect(f"a/{number}")
        assert fixture.kept() == {"a": (False, SIZE)}
        if session == "b/1":
            actions = fixture.send_allocate(session, False, LAYOUT, host_bytes=POOL)
            assert ReleaseTensors(1) in actions
        else:
            fingerprint = Fingerprint("model", 2048)
            actions = fixture.send(session, wire.OpenNamespace(1, fingerprint, POOL))
            assert any(isinstance(action, ReleaseTensors) for action in actions)
        assert fixture.kept() == {}
        fixture.disconnect(session)


def test_tensors_are_kept_as_long_as_their_namespace(
    fixture: KeptTensorsFixture,
) -> None:
    fingerprint = Fingerprint("model", 2048)
    for session in ("a/1", "a/2"):
        fixture.send(session, wire.OpenNamespace(1, fingerprint, 8192))
        (*_, mapping) = fixture.send(session, wire.AllocateKVCaches(2, LAYOUT, keep=True))
        assert mapping.reuse == (1 if session == "a/2" else None)
        fixture.report_mapped(mapping)
        fixture.disconnect(session)
    assert fixture.kept() == {"a": (False, SIZE)}


def test_kept_tensors_belong_to_one_namespace(fixture: KeptTensorsFixture) -> None:
    """Equal layouts of two models are not interchangeable."""
    for session, model in (("a/1", "model"), ("a/2", "another")):
        fixture.send(session, wire.OpenNamespace(1, Fingerprint(model, 2048), 8192))
        actions = fixture.send(session, wire.AllocateKVCaches(2, LAYOUT, keep=True))
        assert actions[-1].reuse is None
        fixture.report_mapped(actions[-1])
        fixture.disconnect(session)
    assert ReleaseTensors(1) in actions


def test_registered_tensors_of_an_engine_free_its_kept_ones(fixture: KeptTensorsFixture) -> None:
    """Registered tensors with descriptors and an equal layout may be the kept ones: they stay."""
    allocations: tuple[memory.Allocation, ...] = (
        memory.FdAllocation(1, SIZE),
        memory.CudaAllocation("GPU-1", bytes(64), SIZE),
    )
    for number, allocation in enumerate(allocations):
        fixture.allocate(f"a/{number}")
        fixture.disconnect(f"a/{number}")
        memories = (allocation,), (memory.Location(0, 0),)
        actions = fixture.send(
            f"a/own-{number}", wire.RegisterKVCaches(1, LAYOUT, *memories, host_bytes=4096)
        )
        released = any(isinstance(action, ReleaseTensors) for action in actions)
        assert released == isinstance(allocation, memory.CudaAllocation)
        fixture.report(TensorsMapped(actions[-1].registration, f"a/own-{number}"))
        fixture.disconnect(f"a/own-{number}")
        assert ("a" in fixture.kept()) != released


def test_kept_tensors_are_released_by_name(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1")
    fixture.disconnect("a/1")
    reply = SendMessage("b/1", wire.Released(5, SIZE))
    assert fixture.send("b/1", wire.ReleaseKVCaches(5, "a")) == [ReleaseTensors(1), reply]
    assert fixture.kept() == {}
    assert fixture.error("b/1", wire.ReleaseKVCaches(6, "a")) == Code.NOT_REGISTERED


def test_released_tensors_of_a_connected_engine_are_freed_when_it_disconnects(
    fixture: KeptTensorsFixture,
) -> None:
    fixture.allocate("a/1")
    reply = SendMessage("a/1", wire.Released(5, SIZE))
    assert fixture.send("a/1", wire.ReleaseKVCaches(5, "a")) == [ReleaseTensors(1), reply]
    assert fixture.kept() == {}
    assert fixture.disconnect("a/1") == [ReleaseTensors(1)]
    assert fixture.allocate("a/2")[1].reuse is None


def test_host_memory_is_released_with_the_tensors(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1")
    host_bytes = fixture.core.reserved_bytes
    fixture.disconnect("a/1")
    actions = fixture.send("b/1", wire.ReleaseKVCaches(5, "a", True))
    reply = SendMessage("b/1", wire.Released(5, SIZE + host_bytes))
    assert actions == [ReleaseTensors(1), reply]
    assert fixture.core.reserved_bytes == 0
    assert fixture.error("b/1", wire.ReleaseKVCaches(6, "a", True)) == Code.NOT_REGISTERED


def test_released_host_memory_of_a_connected_engine_is_freed_when_it_disconnects(
    fixture: KeptTensorsFixture,
) -> None:
    fixture.allocate("a/1", keep=False)
    host_bytes = fixture.core.reserved_bytes
    (reply,) = fixture.send("a/1", wire.ReleaseKVCaches(5, "a", True))
    assert reply == SendMessage("a/1", wire.Released(5, host_bytes))
    assert fixture.core.reserved_bytes == host_bytes
    fixture.disconnect("a/1")
    assert fixture.core.reserved_bytes == 0


def test_a_namespace_is_released_with_the_tensors_in_it_unless_it_is_in_use(
    fixture: KeptTensorsFixture,
) -> None:
    fingerprint = Fingerprint("model", 2048)
    release = wire.ReleaseKVCaches(5, fingerprint.name, True)
    fixture.send("a/1", wire.OpenNamespace(1, fingerprint, 8192))
    (*_, mapping) = fixture.send("a/1", wire.AllocateKVCaches(2, LAYOUT, keep=True))
    fixture.report_mapped(mapping)
    assert fixture.error("b/1", release) == Code.ALREADY_REGISTERED
    fixture.disconnect("a/1")
    actions = fixture.send("b/1", release)
    assert ReleaseTensors(mapping.registration) in actions
    assert SendMessage("b/1", wire.Released(5, 8192)) in actions
    assert (fixture.core.namespaces(), fixture.core.reserved_bytes) == ((), 0)


def test_releasing_without_kept_tensors_is_refused(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1", keep=False)
    assert fixture.error("a/1", wire.ReleaseKVCaches(5, "a")) == Code.NOT_REGISTERED


def test_restored_tensors_belong_to_their_engine_if_its_region_was_restored(
    fixture: KeptTensorsFixture,
) -> None:
    kept = KeptTensorsRecord("a", LayoutArrays.from_layout(LAYOUT), SIZE, engine_owner("a"))
    with pytest.raises(Refused) as refused:
        fixture.core.restore_kept_tensors(kept)
    assert (refused.value.code, refused.value.value) == (Code.NOT_REGISTERED, "a")
    fixture.core.restore_region(
        RecoveredRegion(RegionRecord("a", 0, 4096, LayoutArrays.from_layout(LAYOUT)))
    )
    assert fixture.core.restore_kept_tensors(kept) == 1
    with pytest.raises(Refused):
        fixture.core.restore_kept_tensors(kept)
    assert fixture.kept() == {"a": (False, SIZE)}
    released, mapping, reply = fixture.allocate("a/1")
    assert (mapping.reuse, reply.kept, released) == (1, True, [ReleaseTensors(1)])
