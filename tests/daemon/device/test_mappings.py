"""Mapped and allocated memory of registrations: when it is released, and when it is held.

The tests count open memfds by their names.
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
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, Failed
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.memory import Location
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from kvferry.shm.memfd import sealed_memfd

pytestmark = pytest.mark.usefixtures("close_without_thread")

LAYOUT = KVLayout((TensorLayout(4, 64, 64),), ((TensorRef(0, 64),),))
TENSORS, TIMELINE = "kvferry-test-tensors", "kvferry-test-timeline"


def count_tensor_fds() -> int:
    """The number of open descriptors of TENSORS."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(TENSORS in os.readlink(link) for link in links if os.path.lexists(link))


def count_timelines() -> int:
    """The number of mapped timelines."""
    with open("/proc/self/maps") as maps:
        return sum(TIMELINE in line for line in maps)


class FakeCopyEngine:
    """An engine that allocates a memfd, and maps kept memory again unless an error is set."""

    def __init__(self) -> None:
        self.mapped: list[Mapping] = []
        # The kept descriptors of each allocation.
        self.kept: list[tuple[int, ...]] = []
        # Errors that the next calls raise.
        self.errors: list[Exception] = []

    def map_tensors(self, layout: BlockLayout, *_: object) -> Mapping:
        return self._mapping(layout)

    def allocate_tensors(self, layout: BlockLayout, kept: Sequence[int] = ()) -> AllocatedTensors:
        self.kept.append(tuple(kept))
        return AllocatedTensors(self._mapping(layout), (), (), (os.memfd_create(TENSORS),))

    def copying(self, mapping: Mapping) -> tuple[Any, ...]:
        return ()

    def unmap_tensors(self, mapping: Mapping) -> None:
        self.mapped.remove(mapping)

    def _mapping(self, layout: BlockLayout) -> Mapping:
        if self.errors:
            raise self.errors.pop(0)
        mapping = Mapping(layout, np.zeros(1, dtype=np.int64))
        self.mapped.append(mapping)
        return mapping


class MappingsFixture:
    def __init__(self) -> None:
        self.engine = FakeCopyEngine()
        self.mappings = Mappings(cast(Any, self.engine))
        self.layout = BlockLayout(LayoutArrays.from_layout(LAYOUT), 0, 4)

    def map(
        self,
        number: int = 1,
        *,
        registered: bool = False,
        has_timeline: bool = False,
        **options: Any,
    ) -> TensorsMapped:
        """registered: the tensors are the engine's. Otherwise they are allocated."""
        locations = (Location(0, 0),) if registered else None
        timeline = sealed_memfd(TIMELINE, PAGE) if has_timeline else None
        action = MapTensors(number, "session", self.layout, (), locations, timeline, **options)
        received = (os.memfd_create(TENSORS),) if registered else ()
        report = self.mappings.map_tensors(MapCommand(action, received, timeline))
        for descriptor in report.descriptors:  # the server passes them to the client
            os.close(descriptor)
        return report


@pytest.fixture
def fixture() -> Iterator[MappingsFixture]:
    fixture = MappingsFixture()
    yield fixture
    fixture.mappings.release_all_memory()
    for number in tuple(fixture.mappings.queues):
        fixture.mappings.unmap_tensors(number)
    assert (fixture.engine.mapped, count_timelines(), count_tensor_fds()) == ([], 0, 0)


@pytest.mark.parametrize("registered", [True, False])
def test_a_closed_mapping_releases_its_timeline(fixture: MappingsFixture, registered: bool) -> None:
    fixture.map(registered=registered, has_timeline=True)
    assert (len(fixture.engine.mapped), count_timelines(), count_tensor_fds()) == (1, 1, 0)
    fixture.mappings.unmap_tensors(1)
    assert (fixture.engine.mapped, count_timelines(), fixture.mappings.queues) == ([], 0, {})


@pytest.mark.parametrize(
    "error", [Failed(Code.MAP_FAILED, "no"), OSError(12, "no"), ValueError("no"), OverflowError()]
)
@pytest.mark.parametrize("registered", [True, False])
def test_a_failed_mapping_releases_everything(
    fixture: MappingsFixture, registered: bool, error: Exception
) -> None:
    fixture.engine.errors.append(error)
    report = fixture.map(registered=registered, has_timeline=True)
    assert report.error is not None
    assert report.error.code == Code.MAP_FAILED
    assert (fixture.mappings.queues, count_timelines(), count_tensor_fds()) == ({}, 0, 0)


def test_kept_memory_is_held_until_it_is_released(fixture: MappingsFixture) -> None:
    assert fixture.map(1).held == ()
    (held,) = fixture.map(2, keep=True).held
    fixture.map(3, keep=True)
    assert count_tensor_fds() == 2
    fixture.mappings.unmap_tensors(2)
    os.fstat(held)
    fixture.mappings.release_memory(2)
    fixture.mappings.release_memory(2)
    fixture.mappings.release_memory(1)
    assert count_tensor_fds() == 1


def test_held_memory_is_mapped_again_if_possible(fixture: MappingsFixture) -> None:
    kept_fd = os.memfd_create(TENSORS)
    fixture.mappings.hold_memory(1, kept_fd)
    assert fixture.map(2, reuse=1).reused
    assert fixture.engine.kept == [(kept_fd,)]
    fixture.engine.errors.append(Failed(Code.MAP_FAILED, "not these"))
    report = fixture.map(3, reuse=1)
    assert (report.error, report.reused) == (None, False)
    assert not fixture.map(4, reuse=77).reused
    assert fixture.engine.kept[1:] == [(kept_fd,), (), ()]
    os.fstat(kept_fd)


def test_memory_that_cannot_be_held_is_not_allocated(
    fixture: MappingsFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", fail)
    report = fixture.map(keep=True, has_timeline=True)
    assert report.error is not None
    assert (fixture.engine.mapped, count_timelines(), count_tensor_fds()) == ([], 0, 0)
