"""Kernel batching without a device: when kernels are launched, and which of them together."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.engine.cuda.chunk import Chunk, PageTable, Stage
from kvferry.daemon.engine.cuda.kernel_batching import KernelBatching
from kvferry.daemon.engine.cuda.staging import Slot
from kvferry.proto.specs import Direction

STORE, LOAD = Direction.STORE, Direction.LOAD
BEGUN, DONE, LATER, EVEN_LATER = "begun", "done", "later", "even later"
NO_TABLE = PageTable(0, 0, 0, 0, 0)
NO_IDS = cast(Any, np.empty(0, dtype=np.int64))


class FakeEvents:
    """Events are any objects. Those in `reached` were reached."""

    def __init__(self) -> None:
        self.reached: set[Any] = set()

    def batching(self, direction: Direction) -> KernelBatching:
        return KernelBatching(direction, lambda event: event in self.reached)


@pytest.fixture
def device() -> FakeEvents:
    return FakeEvents()


def chunk(direction: Direction, units: int = 8, moved: object = "moved") -> Chunk:
    stage = Stage(Slot(0, units, 0), NO_TABLE, NO_IDS, NO_IDS)
    return Chunk(direction, units, stage, moved=cast(Any, moved))


def add(batching: KernelBatching, chunks: list[Chunk]) -> list[Chunk]:
    for added in chunks:
        batching.add(added)
    return chunks


def launched(batching: KernelBatching, chunks: list[Chunk], begun: object, done: object) -> None:
    batching.launched(chunks, cast(Any, begun), cast(Any, done))


def test_stores_are_never_held_back(device: FakeEvents) -> None:
    batching = device.batching(STORE)
    chunks = add(batching, [chunk(STORE) for _ in range(3)])
    assert batching.ahead == 24
    assert batching.due(more=True) == chunks
    assert batching.due(more=True) == []


def test_units_are_ahead_until_their_time_slice_starts(device: FakeEvents) -> None:
    batching = device.batching(STORE)
    launched(batching, [chunk(STORE, 5)], BEGUN, DONE)
    assert batching.awaited
    assert batching.ahead == 5
    launched(batching, [chunk(STORE, 2)], None, LATER)
    assert batching.ahead == 7
    device.reached.add(BEGUN)
    assert not batching.awaited
    assert batching.ahead == 0
    launched(batching, [chunk(STORE, 3)], LATER, EVEN_LATER)
    assert batching.ahead == 3


def test_two_thirds_of_the_loads_are_one_launch_while_more_arrive(device: FakeEvents) -> None:
    batching = device.batching(LOAD)
    chunks = add(batching, [chunk(LOAD) for _ in range(8)])
    assert batching.due(more=True) == chunks[:6]
    launched(batching, chunks[:6], BEGUN, DONE)
    assert batching.due(more=True) == []
    device.reached |= {BEGUN, DONE}
    assert batching.due(more=True) == chunks[6:]


def test_loads_that_arrive_before_the_time_slice_starts_join_it(device: FakeEvents) -> None:
    batching = device.batching(LOAD)
    launched(batching, [chunk(LOAD)], BEGUN, DONE)
    chunks = add(batching, [chunk(LOAD, moved=number) for number in range(3)])
    device.reached |= {0, 2}
    assert batching.due(more=True) == chunks[:1]
    device.reached.add(1)
    device.reached.add(BEGUN)  # the time slice has started: the chunk waits for the next one
    assert batching.due(more=True) == []


def test_the_last_loads_are_not_held_back(device: FakeEvents) -> None:
    batching = device.batching(LOAD)
    launched(batching, [chunk(LOAD)], BEGUN, DONE)
    chunks = add(batching, [chunk(LOAD), chunk(LOAD)])
    assert batching.due(more=True) == []
    assert batching.due(more=False) == chunks


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["add", "push", "reach"]), st.integers(1, 8))))
def test_waiting_chunks_are_launched_once_and_in_order(
    steps: list[tuple[str, int]],
) -> None:
    device = FakeEvents()
    batching = device.batching(LOAD)
    added: list[Chunk] = []
    launched_chunks: list[Chunk] = []
    events: list[object] = []
    for step, number in steps:
        if step == "add":
            added += add(batching, [chunk(LOAD, number, moved=len(added))])
            device.reached.add(len(added) - number)
        elif step == "reach" and events:
            device.reached.update(events[: number * 2])
            del events[: number * 2]
        else:
            idle = not events
            due = batching.due(more=True)
            assert due or not idle or len(launched_chunks) == len(added)
            if due:
                begun, done = object(), object()
                events += [begun, done]
                launched(batching, due, None if batching.awaited else begun, done)
            launched_chunks += due
        assert launched_chunks == added[: len(launched_chunks)]
    launched_chunks += batching.due(more=False)
    assert launched_chunks == added
