"""Memory that is mapped or allocated for registrations: what is closed, what is held, until when.

Descriptors are of memfds with a name of their own, so that "closed" is a fact.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from kvferry.daemon.core.actions import MapTensors, TensorsMapped
from kvferry.daemon.core.layout import BlockLayout
from kvferry.daemon.device.mappings import MapCommand, Mappings
from kvferry.daemon.engine.base import AllocatedTensors, Mapping
from kvferry.daemon.memory import fd_closer
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, Failed
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import Location
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from kvferry.shm.memfd import sealed_memfd

LAYOUT = KVLayout((TensorLayout(4, 64, 64),), ((TensorRef(0, 64),),))
TENSORS, CLOCK = "kvferry-test-tensors", "kvferry-test-clock"


def descriptors() -> int:
    """How many this process has of the test's tensors."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(TENSORS in os.readlink(link) for link in links if os.path.lexists(link))


def pages() -> int:
    """How many timelines are mapped."""
    with open("/proc/self/maps") as maps:
        return sum(CLOCK in line for line in maps)


class FakeCopyEngine:
    """Gives memory of one descriptor, and takes what is kept unless told otherwise."""

    def __init__(self) -> None:
        self.open_ones: list[Mapping] = []
        self.kept: list[tuple[int, ...]] = []
        """What it was given to map again."""
        self.errors: list[Exception] = []
        """What the next calls say."""

    def map_tensors(self, layout: BlockLayout, *_: object) -> Mapping:
        return self._mapping(layout)

    def allocate_tensors(self, layout: BlockLayout, kept: Sequence[int] = ()) -> AllocatedTensors:
        self.kept.append(tuple(kept))
        return AllocatedTensors(self._mapping(layout), (), (), (os.memfd_create(TENSORS),))

    def copying(self, mapping: Mapping) -> tuple[Any, ...]:
        return ()

    def unmap_tensors(self, mapping: Mapping) -> None:
        self.open_ones.remove(mapping)

    def _mapping(self, layout: BlockLayout) -> Mapping:
        if self.errors:
            raise self.errors.pop(0)
        mapping = Mapping(layout, np.zeros(1, dtype=np.int64))
        self.open_ones.append(mapping)
        return mapping


class MappingsFixture:
    def __init__(self) -> None:
        self.engine = FakeCopyEngine()
        self.mappings = Mappings(cast(Any, self.engine))
        self.layout = BlockLayout(LayoutArrays.from_layout(LAYOUT), 0, 4)

    def map(
        self, number: int = 1, *, own: bool = False, clock: bool = False, **how: Any
    ) -> TensorsMapped:
        """own: the engine's own tensors, behind a descriptor."""
        where = (Location(0, 0),) if own else None
        timeline = sealed_memfd(CLOCK, PAGE) if clock else None
        wanted = MapTensors(number, "session", self.layout, (), where, timeline, **how)
        given = (os.memfd_create(TENSORS),) if own else ()
        report = self.mappings.map_tensors(MapCommand(wanted, given, timeline))
        for descriptor in report.descriptors:  # the server makes tickets of them
            os.close(descriptor)
        return report


@pytest.fixture(autouse=True)
def closing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread closes, so that what is open now is a fact."""
    monkeypatch.setattr(fd_closer.Closer, "close_later", lambda _, close: close())


@pytest.fixture
def fixture() -> Iterator[MappingsFixture]:
    fixture = MappingsFixture()
    yield fixture
    fixture.mappings.release_all_memory()
    for number in tuple(fixture.mappings.queues):
        fixture.mappings.unmap_tensors(number)
    assert (fixture.engine.open_ones, pages(), descriptors()) == ([], 0, 0)


@pytest.mark.parametrize("own", [True, False])
def test_a_closed_mapping_releases_its_timeline(fixture: MappingsFixture, own: bool) -> None:
    fixture.map(own=own, clock=True)
    assert (len(fixture.engine.open_ones), pages(), descriptors()) == (1, 1, 0)
    fixture.mappings.unmap_tensors(1)
    assert (fixture.engine.open_ones, pages(), fixture.mappings.queues) == ([], 0, {})


@pytest.mark.parametrize(
    "error", [Failed(Code.MAP_FAILED, "no"), OSError(12, "no"), ValueError("no"), OverflowError()]
)
@pytest.mark.parametrize("own", [True, False])
def test_a_failed_mapping_leaves_nothing_behind(
    fixture: MappingsFixture, own: bool, error: Exception
) -> None:
    fixture.engine.errors.append(error)
    report = fixture.map(own=own, clock=True)
    assert report.error is not None
    assert report.error.code == Code.MAP_FAILED
    assert (fixture.mappings.queues, pages(), descriptors()) == ({}, 0, 0)


def test_kept_memory_is_held_until_it_is_released(fixture: MappingsFixture) -> None:
    assert fixture.map(1).held == ()
    (held,) = fixture.map(2, keep=True).held
    fixture.map(3, keep=True)
    assert descriptors() == 2
    fixture.mappings.unmap_tensors(2)
    os.fstat(held)
    fixture.mappings.release_memory(2)
    fixture.mappings.release_memory(2)
    fixture.mappings.release_memory(1)
    assert descriptors() == 1


def test_held_memory_is_mapped_again_if_possible(fixture: MappingsFixture) -> None:
    before = os.memfd_create(TENSORS)
    fixture.mappings.hold_memory(1, before)
    assert fixture.map(2, reuse=1).reused
    assert fixture.engine.kept == [(before,)]
    fixture.engine.errors.append(Failed(Code.MAP_FAILED, "not these"))
    report = fixture.map(3, reuse=1)
    assert (report.error, report.reused) == (None, False)
    assert not fixture.map(4, reuse=77).reused
    assert fixture.engine.kept[1:] == [(before,), (), ()]
    os.fstat(before)


def test_memory_that_cannot_be_held_is_not_allocated(
    fixture: MappingsFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(descriptor: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", none_left)
    report = fixture.map(keep=True, clock=True)
    assert report.error is not None
    assert (fixture.engine.open_ones, pages(), descriptors()) == ([], 0, 0)
