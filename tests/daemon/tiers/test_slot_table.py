"""The memory that the disk tier needs for its keys, and the slots that it evicts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.daemon.tiers.disk.hints import Hints
from kvferry.daemon.tiers.disk.slot_table import Entry, SlotTable

KEYS = 20_000
SLAB = 2_000


def key_of(slot: int) -> bytes:
    return slot.to_bytes(36, "big")


def insert_all() -> SlotTable:
    table = SlotTable(KEYS)
    for start in range(0, KEYS, SLAB):
        table.add_slots(range(start, start + SLAB))
        for slot in table.take_free(SLAB):
            assert table.occupy_slot(Entry(slot, key_of(slot), table.next_stamp())) is None
    return table


def restore_all() -> SlotTable:
    table = SlotTable(KEYS)
    for start in range(0, KEYS, SLAB):
        slots = range(start, start + SLAB)
        table.restore_slots(slots, Hints([*map(key_of, slots)], np.arange(1, SLAB + 1) + start))
    assert table.end_restore() == []
    return table


def measured(fill: Callable[[], SlotTable]) -> tuple[SlotTable, int]:
    """A table, and the bytes that it holds."""
    SlotTable(1)  # modules that are imported with the first one do not count
    tracemalloc.start()
    try:
        return fill(), tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fill", [insert_all, restore_all])
def test_a_key_takes_at_most_40_bytes(fill: Callable[[], SlotTable]) -> None:
    """29 on average at most; the parts of the index are doubled one by one."""
    table, held = measured(fill)
    assert table.used == KEYS
    assert held < 40 * KEYS
    assert table.find([key_of(0), key_of(KEYS - 1), key_of(KEYS)]) == [0, KEYS - 1, None]


def test_slots_that_were_freed_take_little_memory() -> None:
    def free_all() -> SlotTable:
        table = insert_all()
        for slot in range(KEYS):
            table.free_slot(slot)
        return table

    table, held = measured(free_all)
    assert table.used == 0
    assert held < 50 * KEYS


def test_a_victim_that_was_not_written_has_its_key_as_before() -> None:
    table = restore_all()
    (slot,) = table.take_victims(1)
    assert table.find([key_of(slot)]) == [None]
    assert table.in_use(range(slot, slot + 1))
    table.keep_victim(slot)
    assert table.find([key_of(slot)]) == [slot]
    assert table.used == KEYS
    assert not table.in_use(range(KEYS))


def test_a_slot_that_is_read_is_no_victim() -> None:
    table = SlotTable(2)
    table.add_slots(range(2))
    for slot in table.take_free(2):
        table.occupy_slot(Entry(slot, key_of(slot), table.next_stamp()))
    for _ in range(2):
        table.begin_read(0)
    table.end_read(0)
    assert table.take_victims(2) == [1]
    table.end_read(0)
    assert table.take_victims(2) == [0]
