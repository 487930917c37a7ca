"""When kernels are launched, and which together: pieces and events without a device."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.engine.cuda.kernel_batching import KernelBatching
from kvferry.daemon.engine.cuda.piece import PageTable, Piece, Stage
from kvferry.daemon.engine.cuda.staging import Slot
from kvferry.proto.specs import Direction

STORE, LOAD = Direction.STORE, Direction.LOAD
BEGUN, DONE, LATER, EVEN_LATER = "begun", "done", "later", "even later"
NO_TABLE = PageTable(0, 0, 0, 0, 0)
NOTHING = cast(Any, np.empty(0, dtype=np.int64))


class Device:
    """Events are anything; those in `past` were reached."""

    def __init__(self) -> None:
        self.past: set[Any] = set()

    def batching(self, direction: Direction) -> KernelBatching:
        return KernelBatching(direction, lambda event: event in self.past)


@pytest.fixture
def device() -> Device:
    return Device()


def piece(direction: Direction, units: int = 8, moved: object = "moved") -> Piece:
    stage = Stage(Slot(0, units, 0), NO_TABLE, NOTHING, NOTHING)
    return Piece(direction, units, stage, moved=cast(Any, moved))


def add(batching: KernelBatching, pieces: list[Piece]) -> list[Piece]:
    for one in pieces:
        batching.add(one)
    return pieces


def launched(batching: KernelBatching, pieces: list[Piece], begun: object, done: object) -> None:
    batching.launched(pieces, cast(Any, begun), cast(Any, done))


def test_stores_are_never_held_back(device: Device) -> None:
    batching = device.batching(STORE)
    pieces = add(batching, [piece(STORE) for _ in range(3)])
    assert batching.ahead == 24
    assert batching.due(more=True) == pieces
    assert batching.due(more=True) == []


def test_units_are_ahead_until_their_turn_has_come(device: Device) -> None:
    batching = device.batching(STORE)
    launched(batching, [piece(STORE, 5)], BEGUN, DONE)
    assert batching.awaited
    assert batching.ahead == 5
    launched(batching, [piece(STORE, 2)], None, LATER)
    assert batching.ahead == 7
    device.past.add(BEGUN)
    assert not batching.awaited
    assert batching.ahead == 0
    launched(batching, [piece(STORE, 3)], LATER, EVEN_LATER)
    assert batching.ahead == 3


def test_all_but_a_third_of_the_loads_are_one_turn_while_more_come(device: Device) -> None:
    batching = device.batching(LOAD)
    pieces = add(batching, [piece(LOAD) for _ in range(8)])
    assert batching.due(more=True) == pieces[:6]
    launched(batching, pieces[:6], BEGUN, DONE)
    assert batching.due(more=True) == []
    device.past |= {BEGUN, DONE}
    assert batching.due(more=True) == pieces[6:]


def test_loads_that_arrive_while_a_turn_is_awaited_join_it(device: Device) -> None:
    batching = device.batching(LOAD)
    launched(batching, [piece(LOAD)], BEGUN, DONE)
    pieces = add(batching, [piece(LOAD, moved=number) for number in range(3)])
    device.past |= {0, 2}
    assert batching.due(more=True) == pieces[:1]
    device.past.add(1)
    device.past.add(BEGUN)  # it has come: for the next one
    assert batching.due(more=True) == []


def test_loads_that_are_the_last_are_not_held_back(device: Device) -> None:
    batching = device.batching(LOAD)
    launched(batching, [piece(LOAD)], BEGUN, DONE)
    pieces = add(batching, [piece(LOAD), piece(LOAD)])
    assert batching.due(more=True) == []
    assert batching.due(more=False) == pieces


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["add", "push", "reach"]), st.integers(1, 8))))
def test_what_waits_is_launched_once_in_order_as_soon_as_no_turn_is_under_way(
    steps: list[tuple[str, int]],
) -> None:
    device = Device()
    batching = device.batching(LOAD)
    added: list[Piece] = []
    so_far: list[Piece] = []
    events: list[object] = []
    for what, number in steps:
        if what == "add":
            added += add(batching, [piece(LOAD, number, moved=len(added))])
            device.past.add(len(added) - number)
        elif what == "reach" and events:
            device.past.update(events[: number * 2])
            del events[: number * 2]
        else:
            idle = not events
            due = batching.due(more=True)
            assert due or not idle or len(so_far) == len(added)
            if due:
                begun, done = object(), object()
                events += [begun, done]
                launched(batching, due, None if batching.awaited else begun, done)
            so_far += due
        assert so_far == added[: len(so_far)]
    so_far += batching.due(more=False)
    assert so_far == added
