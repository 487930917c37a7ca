"""The slots of a namespace on disk."""

from __future__ import annotations

import numpy as np

from kvferry.daemon.tiers.disk.slot_table import SlotTable


def test_a_slot_that_is_freed_while_the_table_is_restored_is_free_once() -> None:
    """A block that is fetched meanwhile may be bad, and is forgotten."""
    table = SlotTable(4, 2)
    table.add_slots(range(4))
    table.restore_slots([b"aa", b"bb"], np.array([0, 2]), np.array([1, 2]))
    table.free_slot(2)
    table.end_restore()
    assert sorted(table.take_free(9)) == [1, 2, 3]
