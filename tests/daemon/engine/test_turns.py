"""When kernels are launched, and which together: pieces and events without a device."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.engine.cuda.piece import PageTable, Piece, Stage
from kvferry.daemon.engine.cuda.staging import Slot
from kvferry.daemon.engine.cuda.turns import REMEMBERED, SLOW, Turns
from kvferry.proto.specs import Direction

STORE, LOAD = Direction.STORE, Direction.LOAD
BEGUN, DONE, LATER, EVEN_LATER = "begun", "done", "later", "even later"
NO_TABLE = PageTable(0, 0, 0, 0, 0)
NOTHING = cast(Any, np.empty(0, dtype=np.int64))


class Device:
    """Events are anything; those in `past` were reached."""

    def __init__(self) -> None:
        self.past: set[Any] = set()

        self.now = 0.0

    def turns(self, direction: Direction) -> Turns:
        return Turns(direction, lambda event: event in self.past, lambda: self.now)


@pytest.fixture
def device() -> Device:
    return Device()


def piece(direction: Direction, units: int = 8, moved: object = "moved") -> Piece:
    stage = Stage(Slot(0, units, 0), NO_TABLE, NOTHING, NOTHING)
    return Piece(direction, units, stage, moved=cast(Any, moved))


def add(turns: Turns, pieces: list[Piece]) -> list[Piece]:
    for one in pieces:
        turns.add(one)
    return pieces


def ask(turns: Turns, pieces: list[Piece], begun: object, done: object) -> None:
    turns.ask(pieces, cast(Any, begun), cast(Any, done))


def test_stores_are_never_held_back(device: Device) -> None:
    turns = device.turns(STORE)
    pieces = add(turns, [piece(STORE) for _ in range(3)])
    assert turns.ahead == 24
    assert turns.due(more=True) == pieces
    assert turns.due(more=True) == []


def test_units_are_ahead_until_their_turn_has_come(device: Device) -> None:
    turns = device.turns(STORE)
    ask(turns, [piece(STORE, 5)], BEGUN, DONE)
    assert turns.awaited
    assert turns.ahead == 5
    ask(turns, [piece(STORE, 2)], None, LATER)
    assert turns.ahead == 7
    device.past.add(BEGUN)
    assert not turns.awaited
    assert turns.ahead == 0
    ask(turns, [piece(STORE, 3)], LATER, EVEN_LATER)
    assert turns.ahead == 3


def test_turns_that_take_long_are_remembered(device: Device) -> None:
    """Only who looks meanwhile can tell."""
    turns = device.turns(STORE)
    assert turns.at_once
    ask(turns, [piece(STORE)], BEGUN, DONE)
    device.now = 0.9 * SLOW
    turns.watch()
    assert turns.at_once
    ask(turns, [piece(STORE)], None, DONE)  # it joins
    device.now = 1.1 * SLOW
    turns.watch()
    assert not turns.at_once
    device.past.add(BEGUN)
    for _ in range(REMEMBERED):
        assert not turns.at_once
        ask(turns, [piece(STORE)], BEGUN, DONE)
        device.now += 2 * SLOW
        turns.watch()
    assert turns.at_once


def test_three_quarters_of_the_loads_are_one_turn_while_more_come(device: Device) -> None:
    turns = device.turns(LOAD)
    pieces = add(turns, [piece(LOAD) for _ in range(8)])
    assert turns.due(more=True) == pieces[:6]
    ask(turns, pieces[:6], BEGUN, DONE)
    assert turns.due(more=True) == []
    device.past |= {BEGUN, DONE}
    assert turns.due(more=True) == pieces[6:]


def test_loads_that_arrive_while_a_turn_is_awaited_join_it(device: Device) -> None:
    turns = device.turns(LOAD)
    ask(turns, [piece(LOAD)], BEGUN, DONE)
    pieces = add(turns, [piece(LOAD, moved=number) for number in range(3)])
    device.past |= {0, 2}
    assert turns.due(more=True) == pieces[:1]
    device.past.add(1)
    device.past.add(BEGUN)  # it has come: for the next one
    assert turns.due(more=True) == []


def test_loads_that_are_the_last_are_not_held_back(device: Device) -> None:
    turns = device.turns(LOAD)
    ask(turns, [piece(LOAD)], BEGUN, DONE)
    pieces = add(turns, [piece(LOAD), piece(LOAD)])
    assert turns.due(more=True) == []
    assert turns.due(more=False) == pieces


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["add", "push", "reach"]), st.integers(1, 8))))
def test_what_waits_is_launched_once_in_order_as_soon_as_no_turn_is_under_way(
    steps: list[tuple[str, int]],
) -> None:
    device = Device()
    turns = device.turns(LOAD)
    added: list[Piece] = []
    launched: list[Piece] = []
    events: list[object] = []
    for what, number in steps:
        if what == "add":
            added += add(turns, [piece(LOAD, number, moved=len(added))])
            device.past.add(len(added) - number)
        elif what == "reach" and events:
            device.past.update(events[: number * 2])
            del events[: number * 2]
        else:
            idle = not events
            due = turns.due(more=True)
            assert due or not idle or len(launched) == len(added)
            if due:
                begun, done = object(), object()
                events += [begun, done]
                ask(turns, due, None if turns.awaited else begun, done)
            launched += due
        assert launched == added[: len(launched)]
    launched += turns.due(more=False)
    assert launched == added
