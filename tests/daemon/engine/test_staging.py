"""The staging buffer's bookkeeping: who gets how much of it. No device is needed for that."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.engine.cuda.staging import FOR_LOADS, UNITS, Slot, Staging
from kvferry.proto.specs import Direction

UNIT = 1 << 20
STORE, LOAD = Direction.STORE, Direction.LOAD


class Memory:
    """Stands in for the driver: Staging asks it for one address."""

    def allocate(self, nbytes: int) -> int:
        return 1 << 30


@pytest.fixture
def staging() -> Staging:
    return Staging(cast(Any, Memory()), UNITS * UNIT)


def test_alone_a_direction_uses_two_halves(staging: Staging) -> None:
    pieces = []
    while room := staging.room(LOAD, 1 << 40, contended=False):
        pieces.append(room)
        staging.take(LOAD, room)
    assert pieces == [UNITS // 2 * UNIT] * 2


def test_stores_leave_room_for_a_small_load(staging: Staging) -> None:
    while room := staging.room(STORE, 1 << 40, contended=False):
        staging.take(STORE, room)
    assert staging.room(LOAD, FOR_LOADS * UNIT, contended=True) == FOR_LOADS * UNIT
    assert staging.room(LOAD, 1, contended=True) == UNIT


def test_where_both_have_work_each_gets_half(staging: Staging) -> None:
    taken = {STORE: 0, LOAD: 0}
    for direction in (STORE, LOAD) * 4:
        room = staging.room(direction, 1 << 40, contended=True)
        if room:
            taken[direction] += staging.take(direction, room).units
    assert taken == {STORE: UNITS // 2, LOAD: UNITS // 2}


def test_a_piece_waits_for_full_size_rather_than_take_less(staging: Staging) -> None:
    slots = [staging.take(LOAD, UNIT) for _ in range(UNITS // 2 + 1)]
    assert staging.room(LOAD, 1 << 40, contended=False) == 0
    staging.give_back(slots[-1])
    assert staging.room(LOAD, 1 << 40, contended=False) == UNITS // 2 * UNIT


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 40 * UNIT)), max_size=60))
def test_no_unit_is_ever_in_two_slots(steps: list[tuple[bool, bool, int]]) -> None:
    staging = Staging(cast(Any, Memory()), UNITS * UNIT)
    slots: list[Slot] = []
    for store, contended, nbytes in steps:
        direction = STORE if store else LOAD
        room = staging.room(direction, nbytes, contended)
        if room:
            slots.append(staging.take(direction, min(room, nbytes)))
        elif slots:
            staging.give_back(slots.pop(0))
        used = [unit for slot in slots for unit in range(slot.start, slot.start + slot.units)]
        assert len(used) == len(set(used)) <= UNITS
        assert all(0 <= unit < UNITS for unit in used)
