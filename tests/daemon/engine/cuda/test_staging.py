"""The staging buffer: how many units each direction gets. No device is needed."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.engine.base import ChunkRequest
from kvferry.daemon.engine.cuda.staging import (
    CHUNK_UNITS,
    FOR_LOADS,
    MIN_CHUNK_UNITS,
    UNITS,
    Slot,
    Staging,
)
from kvferry.proto.specs import Direction

UNIT = 1 << 20
STORE, LOAD = Direction.STORE, Direction.LOAD
ALL = 1 << 40


class FakeAllocator:
    """Replaces the driver, from which Staging allocates one address."""

    def allocate(self, nbytes: int) -> int:
        return 1 << 30


@pytest.fixture
def staging() -> Staging:
    return Staging(cast(Any, FakeAllocator()), UNITS * UNIT)


def room(
    staging: Staging,
    direction: Direction,
    nbytes: int = ALL,
    contended: bool = False,
    ahead: int = 0,
    block: int = 1,
) -> int:
    return staging.max_slot_bytes(direction, ChunkRequest(0, nbytes, contended), block, ahead)


def fill(staging: Staging, direction: Direction, contended: bool = False) -> list[Slot]:
    """Take all slots that there is room for. No time slice starts."""
    slots: list[Slot] = []
    while nbytes := room(staging, direction, ALL, contended, sum(slot.units for slot in slots)):
        slots.append(staging.take_slot(direction, nbytes))
    return slots


@pytest.mark.parametrize("nbytes", [256 << 20, 300_000_000, int(0.1 * 2**30)])
def test_slots_are_aligned_for_kernels(nbytes: int) -> None:
    staging = Staging(cast(Any, FakeAllocator()), nbytes)
    slots = fill(staging, LOAD)
    assert {slot.address % 256 for slot in slots} == {0}
    assert slots[-1].address + slots[-1].units * staging.unit_bytes <= staging.address + nbytes


def test_stores_leave_room_for_a_small_load(staging: Staging) -> None:
    assert sum(slot.units for slot in fill(staging, STORE)) == UNITS - FOR_LOADS
    assert room(staging, LOAD, FOR_LOADS * UNIT, contended=True) == FOR_LOADS * UNIT
    assert room(staging, LOAD, 1, contended=True) == UNIT


def test_each_direction_gets_half_of_the_staging_if_both_have_work(staging: Staging) -> None:
    for direction in (STORE, LOAD):
        assert sum(slot.units for slot in fill(staging, direction, contended=True)) == UNITS // 2


def test_stores_get_units_when_a_third_of_theirs_is_left(
    staging: Staging,
) -> None:
    slots = fill(staging, STORE)
    assert room(staging, STORE) == 0
    while sum(slot.units for slot in slots) > 3 * CHUNK_UNITS:  # in whole chunks
        assert room(staging, STORE) == 0
        staging.free_slot(slots.pop(0))
    free = UNITS - FOR_LOADS - sum(slot.units for slot in slots)
    taken = 0
    while nbytes := room(staging, STORE, ahead=taken):
        taken += staging.take_slot(STORE, nbytes).units
    assert taken == free > UNITS // 2


def test_a_chunk_ends_with_the_buffer_and_the_next_starts_at_its_start(
    staging: Staging,
) -> None:
    for slot in (
        staging.take_slot(STORE, CHUNK_UNITS * UNIT) for _ in range(UNITS // CHUNK_UNITS - 1)
    ):
        staging.free_slot(slot)
    staging.free_slot(staging.take_slot(STORE, (CHUNK_UNITS - 3) * UNIT))
    last = staging.take_slot(STORE, room(staging, STORE, 3 * UNIT))
    assert last.start + last.units == UNITS
    assert staging.take_slot(STORE, room(staging, STORE)).start == 0


def test_free_units_in_fragments_are_used(staging: Staging) -> None:
    slots = [staging.take_slot(LOAD, UNIT) for _ in range(UNITS)]
    for slot in slots[::2]:
        staging.free_slot(slot)
    assert room(staging, LOAD) == 0
    staging.free_slot(slots[1])
    assert room(staging, LOAD) == 3 * UNIT
    assert room(staging, LOAD, block=4 * UNIT) == 0


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.integers(1, 40 * UNIT), st.integers(1, 8)),
        max_size=80,
    )
)
def test_no_unit_is_in_two_slots(steps: list[tuple[bool, bool, int, int]]) -> None:
    staging = Staging(cast(Any, FakeAllocator()), UNITS * UNIT)
    slots: dict[Direction, list[Slot]] = {STORE: [], LOAD: []}
    for store, contended, nbytes, block in steps:
        direction = STORE if store else LOAD
        own, ahead = slots[direction], sum(slot.units for slot in slots[direction])
        nbytes = max(nbytes, block * UNIT)
        granted = room(staging, direction, nbytes, contended, ahead, block * UNIT)
        if granted:
            assert block * UNIT <= granted <= max(CHUNK_UNITS * UNIT, nbytes)
            own.append(staging.take_slot(direction, min(granted, nbytes)))
        elif own:
            staging.free_slot(own.pop(0))
        used = [unit for held in slots.values() for slot in held for unit in _units(slot)]
        assert len(used) == len(set(used)) <= UNITS
        assert all(0 <= unit < UNITS for unit in used)
        assert sum(slot.units for slot in slots[STORE]) <= UNITS - FOR_LOADS
    for slot in [*slots[STORE], *slots[LOAD]]:
        staging.free_slot(slot)
    assert sum(slot.units for slot in fill(staging, LOAD)) > UNITS - MIN_CHUNK_UNITS


def _units(slot: Slot) -> range:
    assert slot.address == (1 << 30) + slot.start * UNIT
    return range(slot.start, slot.start + slot.units)
