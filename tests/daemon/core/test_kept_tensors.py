"""Tensors that outlast the engine they were allocated for: when they are held, when they go."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.daemon.core.actions import (
    Action,
    KeepTensors,
    MapTensors,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
    ReleaseTensors,
    SendMessage,
    TensorsMapped,
    TensorsUnmapped,
    UnmapTensors,
)
from kvferry.daemon.core.core import Core
from kvferry.daemon.core.records import (
    KeptTensorsRecord,
    RecoveredRegion,
    RegionRecord,
    engine_owner,
)
from kvferry.daemon.core.status import DaemonIdentity
from kvferry.proto import memory
from kvferry.proto import messages as wire
from kvferry.proto import status as proto_status
from kvferry.proto.errors import Code, ErrorInfo, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef

POOL = 16384
SIZE = 1 << 20


def layout(blocks: int = 8) -> KVLayout:
    return KVLayout((TensorLayout(blocks, 1024, 1024),), ((TensorRef(0, 1024),),), 2)


def unrecorded(actions: list[Action]) -> list[Action]:
    """Without what is said to the records of the host pool, and to the shelf."""
    return [
        a
        for a in actions
        if not isinstance(a, RegionCreated | RegionUpdated | RegionFreed | KeepTensors)
    ]


class KeptTensorsFixture:
    """A core, and what its sessions say. Sessions are named engine/process."""

    def __init__(self) -> None:
        device = proto_status.DeviceInfo("cpu", "cpu", "host memory")
        self.core = Core(
            DaemonIdentity("0.1", "boot", 1, device, proto_status.Limits(1 << 20, 1 << 10, 8), 0.0),
            POOL,
        )

    def open_sessions(self, session: str) -> None:
        self.core.open_session(session, wire.Hello(1, 1, session, session.partition("/")[0]))

    def send(self, session: str, message: wire.ClientMessage) -> list[Action]:
        return unrecorded(self.core.handle(session, message, now=1.0))

    def wish(self, session: str, keep: bool, shape: KVLayout, **more: Any) -> list[Action]:
        self.open_sessions(session)
        return self.send(session, wire.AllocateKVCaches(1, shape, keep=keep, **more))

    def allocate(self, session: str, *, keep: bool = True, shape: KVLayout | None = None) -> Any:
        """Allocate, with 4096 bytes of the pool; the lane does as it is told. Returns
        (what was dropped, the Map, the reply)."""
        *before, mapping = self.wish(session, keep, shape or layout(), host_bytes=4096)
        assert isinstance(mapping, MapTensors)
        *after, reply = self.mapped(mapping)
        assert isinstance(reply, SendMessage)
        assert isinstance(reply.message, wire.Allocated)
        return [*before, *after], mapping, reply.message

    def mapped(self, mapping: MapTensors, error: ErrorInfo | None = None) -> list[Action]:
        where = () if error else (memory.FdAllocation(1, SIZE),)
        reused = mapping.reuse is not None
        report = TensorsMapped(mapping.registration, mapping.session, error, where, reused=reused)
        return unrecorded(self.core.report(report))

    def leave(self, session: str) -> list[Action]:
        """A session goes, and the lane unmaps what it had; what follows from that."""
        unmaps = [a for a in self.core.close_session(session) if isinstance(a, UnmapTensors)]
        reports = [self.core.report(TensorsUnmapped(unmap.registration)) for unmap in unmaps]
        return unrecorded([action for actions in reports for action in actions])

    def kept(self) -> dict[str, tuple[bool, int]]:
        """Engine -> (is it here, bytes kept), of those with any."""
        engines = self.core.status(1.0).engines
        return {e.name: (e.present, e.kept_bytes) for e in engines if e.kept_bytes}


@pytest.fixture
def fixture() -> KeptTensorsFixture:
    return KeptTensorsFixture()


def test_a_reconnected_engine_gets_its_tensors(fixture: KeptTensorsFixture) -> None:
    dropped, mapping, reply = fixture.allocate("a/1")
    assert (dropped, mapping.keep, mapping.reuse, reply.kept) == ([], True, None, False)
    assert fixture.kept() == {"a": (True, SIZE)}
    assert fixture.leave("a/1") == []
    assert fixture.kept() == {"a": (False, SIZE)}
    dropped, mapping, reply = fixture.allocate("a/2")
    assert (mapping.reuse, reply.kept) == (1, True)
    assert dropped == [ReleaseTensors(1)]
    assert fixture.kept() == {"a": (True, SIZE)}


def test_another_part_of_the_pool_changes_nothing(fixture: KeptTensorsFixture) -> None:
    """The engine's host blocks are gone, as it wants more of them; its tensors are not."""
    fixture.allocate("a/1")
    fixture.leave("a/1")
    (mapping,) = fixture.wish("a/2", True, layout(), host_bytes=8192)
    assert isinstance(mapping, MapTensors)
    assert mapping.reuse == 1


def test_without_keep_no_tensors_are_kept(fixture: KeptTensorsFixture) -> None:
    _, mapping, _ = fixture.allocate("a/1", keep=False)
    assert not mapping.keep
    assert fixture.kept() == {}
    assert fixture.leave("a/1") == []
    assert fixture.kept() == {}
    assert fixture.allocate("a/2")[1].reuse is None


def test_tensors_allocated_again_without_keep_are_not_kept(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1")
    fixture.leave("a/1")
    dropped, mapping, reply = fixture.allocate("a/2", keep=False)
    assert (dropped, mapping.reuse, reply.kept) == ([ReleaseTensors(1)], 1, True)
    assert fixture.leave("a/2") == []
    assert fixture.kept() == {}


def test_another_layout_frees_them_before_it_is_mapped(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1")
    fixture.leave("a/1")
    actions = fixture.wish("a/2", True, layout(4), host_bytes=4096)
    assert actions[0] == ReleaseTensors(1)
    assert isinstance(actions[1], MapTensors)
    assert actions[1].reuse is None
    assert fixture.kept() == {}


def test_an_engine_that_waits_for_the_old_mapping_gets_its_tensors(
    fixture: KeptTensorsFixture,
) -> None:
    fixture.allocate("a/1")
    fixture.core.close_session("a/1")
    assert fixture.wish("a/2", True, layout(), host_bytes=4096) == []
    (mapping,) = fixture.core.report(TensorsUnmapped(1))
    assert isinstance(mapping, MapTensors)
    assert mapping.reuse == 1


def test_kept_tensors_stay_if_they_cannot_be_mapped(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1")
    fixture.leave("a/1")
    (mapping,) = fixture.wish("a/2", True, layout(), host_bytes=4096)
    assert isinstance(mapping, MapTensors)
    (reply,) = fixture.mapped(mapping, ErrorInfo(Code.NOT_SHAREABLE, "the page is not sealed"))
    assert isinstance(reply, SendMessage)
    assert isinstance(reply.message, wire.Error)
    assert fixture.kept() == {"a": (False, SIZE)}
    fixture.leave("a/2")
    assert fixture.allocate("a/3")[1].reuse == 1


def test_kept_tensors_stay_if_the_engine_disconnects_before_they_are_mapped(
    fixture: KeptTensorsFixture,
) -> None:
    """What the lane may have made of them under the new number goes."""
    fixture.allocate("a/1")
    fixture.leave("a/1")
    (mapping,) = fixture.wish("a/2", True, layout(), host_bytes=4096)
    assert isinstance(mapping, MapTensors)
    assert UnmapTensors(2) in fixture.core.close_session("a/2")
    assert fixture.mapped(mapping) == []
    assert fixture.core.report(TensorsUnmapped(2)) == [ReleaseTensors(2)]
    assert fixture.kept() == {"a": (False, SIZE)}
    assert fixture.allocate("a/3")[1].reuse == 1


def test_kept_tensors_are_freed_with_the_region_of_their_engine(
    fixture: KeptTensorsFixture,
) -> None:
    """A newcomer takes the room, by its registration or by its namespace."""
    for number, session in enumerate(("b/1", "c/1"), 1):
        fixture.allocate(f"a/{number}")
        fixture.leave(f"a/{number}")
        assert fixture.kept() == {"a": (False, SIZE)}
        if session == "b/1":
            actions = fixture.wish(session, False, layout(), host_bytes=POOL)
            assert ReleaseTensors(1) in actions
        else:
            fixture.open_sessions(session)
            fingerprint = proto_status.Fingerprint("model", 2048)
            actions = fixture.send(session, wire.OpenNamespace(1, fingerprint, POOL))
            assert any(isinstance(action, ReleaseTensors) for action in actions)
        assert fixture.kept() == {}
        fixture.leave(session)


def test_tensors_are_kept_as_long_as_their_namespace(
    fixture: KeptTensorsFixture,
) -> None:
    fingerprint = proto_status.Fingerprint("model", 2048)
    for session in ("a/1", "a/2"):
        fixture.open_sessions(session)
        fixture.send(session, wire.OpenNamespace(1, fingerprint, 8192))
        (*_, mapping) = fixture.send(session, wire.AllocateKVCaches(2, layout(), keep=True))
        assert isinstance(mapping, MapTensors)
        assert mapping.reuse == (1 if session == "a/2" else None)
        fixture.mapped(mapping)
        fixture.leave(session)
    assert fixture.kept() == {"a": (False, SIZE)}


def test_kept_tensors_belong_to_one_namespace(fixture: KeptTensorsFixture) -> None:
    """The same shape, another model's bytes."""
    for session, model in (("a/1", "model"), ("a/2", "another")):
        fixture.open_sessions(session)
        fixture.send(session, wire.OpenNamespace(1, proto_status.Fingerprint(model, 2048), 8192))
        actions = fixture.send(session, wire.AllocateKVCaches(2, layout(), keep=True))
        assert isinstance(actions[-1], MapTensors)
        assert actions[-1].reuse is None
        fixture.mapped(actions[-1])
        fixture.leave(session)
    assert ReleaseTensors(1) in actions


def test_an_engine_with_tensors_of_its_own_needs_none(fixture: KeptTensorsFixture) -> None:
    """Unless they may be the very same: behind descriptors, in the same layout."""
    brought: tuple[memory.Allocation, ...] = (
        memory.FdAllocation(1, SIZE),
        memory.CudaAllocation("GPU-1", bytes(64), SIZE),
    )
    for number, allocation in enumerate(brought):
        fixture.allocate(f"a/{number}")
        fixture.leave(f"a/{number}")
        fixture.open_sessions(f"a/own-{number}")
        where = (allocation,), (memory.Location(0, 0),)
        actions = fixture.send(
            f"a/own-{number}", wire.RegisterKVCaches(1, layout(), *where, host_bytes=4096)
        )
        assert isinstance(actions[-1], MapTensors)
        dropped = any(isinstance(action, ReleaseTensors) for action in actions)
        assert dropped == isinstance(allocation, memory.CudaAllocation)
        fixture.core.report(TensorsMapped(actions[-1].registration, f"a/own-{number}"))
        fixture.leave(f"a/own-{number}")
        assert ("a" in fixture.kept()) != dropped


def test_kept_tensors_are_released_by_name(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1")
    fixture.leave("a/1")
    fixture.open_sessions("b/1")
    reply = SendMessage("b/1", wire.Released(5, SIZE))
    assert fixture.send("b/1", wire.ReleaseKVCaches(5, "a")) == [ReleaseTensors(1), reply]
    assert fixture.kept() == {}
    (refused,) = fixture.send("b/1", wire.ReleaseKVCaches(6, "a"))
    assert isinstance(refused, SendMessage)
    assert isinstance(refused.message, wire.Error)
    assert (refused.message.error.code, refused.message.error.value) == (Code.NOT_REGISTERED, "a")


def test_released_tensors_of_a_connected_engine_are_freed_when_it_disconnects(
    fixture: KeptTensorsFixture,
) -> None:
    fixture.allocate("a/1")
    reply = SendMessage("a/1", wire.Released(5, SIZE))
    assert fixture.send("a/1", wire.ReleaseKVCaches(5, "a")) == [ReleaseTensors(1), reply]
    assert fixture.kept() == {}
    assert fixture.leave("a/1") == [ReleaseTensors(1)]
    assert fixture.allocate("a/2")[1].reuse is None


def test_releasing_without_kept_tensors_is_refused(fixture: KeptTensorsFixture) -> None:
    fixture.allocate("a/1", keep=False)
    (refused,) = fixture.send("a/1", wire.ReleaseKVCaches(5, "a"))
    assert isinstance(refused, SendMessage)
    assert isinstance(refused.message, wire.Error)


def test_restored_tensors_belong_to_their_engine_if_its_region_was_restored(
    fixture: KeptTensorsFixture,
) -> None:
    kept = KeptTensorsRecord("a", LayoutArrays.from_layout(layout()), SIZE, engine_owner("a"))
    with pytest.raises(Refused) as refused:
        fixture.core.restore_kept_tensors(kept)
    assert (refused.value.code, refused.value.value) == (Code.NOT_REGISTERED, "a")
    fixture.core.restore_region(
        RecoveredRegion(RegionRecord("a", 0, 4096, LayoutArrays.from_layout(layout())))
    )
    assert fixture.core.restore_kept_tensors(kept) == 1
    with pytest.raises(Refused):
        fixture.core.restore_kept_tensors(kept)
    assert fixture.kept() == {"a": (False, SIZE)}
    dropped, mapping, reply = fixture.allocate("a/1")
    assert (mapping.reuse, reply.kept, dropped) == (1, True, [ReleaseTensors(1)])
