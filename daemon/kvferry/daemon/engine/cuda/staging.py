"""The staging buffer: device memory that small fragments are copied through, in units.

A piece takes some units in a row, so that its blocks are contiguous there, and gives them back
when it is done. A kernel in the daemon's process makes the GPU change contexts, which costs a busy
engine about half a millisecond whatever the kernel does: so pieces are as large as they can be.
Alone, a direction takes half of the buffer for a piece while the other half is on the link; where
both directions have work each has half of the buffer, in two pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.daemon.core.geometry import Int64s
from kvferry.proto.libcuda import Driver
from kvferry.proto.specs import Direction

UNITS = 16
UNIT_BLOCKS = 8192
"""GPU blocks whose ids fit beside one unit."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Some units in a row: `address` in device memory, and places for the block ids of a piece."""

    start: int
    units: int
    address: int
    ids: int
    """Device address."""
    host_ids: Int64s
    """Pinned host memory of the same size."""


class Staging:
    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.unit_bytes = nbytes // UNITS
        self._driver = driver
        self.address = driver.allocate(nbytes)
        ids_bytes = UNITS * UNIT_BLOCKS * 8
        self._ids = driver.allocate(ids_bytes)
        self._host_ids_address = driver.allocate_host(ids_bytes)
        self._host_ids = driver.host_array(self._host_ids_address, UNITS * UNIT_BLOCKS)
        self._owner: list[Direction | None] = [None] * UNITS

    def room(self, direction: Direction, nbytes: int, contended: bool) -> int:
        """Units for the next piece of a direction that has `nbytes` to move; 0 for none now.

        A piece that the rest would not fit into waits for full size: small turns cost the engine.
        """
        most = UNITS // 4 if contended else UNITS // 2
        held = self._owner.count(direction)
        units = min(most, -(-nbytes // self.unit_bytes))
        if held + units > 2 * most or self._find(units) is None:
            return 0
        return units

    def take(self, direction: Direction, nbytes: int, blocks: int) -> Slot:
        """A slot for a piece that `room` allowed."""
        units = max(-(-nbytes // self.unit_bytes), -(-blocks // UNIT_BLOCKS))
        start = self._find(units)
        assert start is not None
        self._owner[start : start + units] = [direction] * units
        first, end = start * UNIT_BLOCKS, (start + units) * UNIT_BLOCKS
        return Slot(
            start,
            units,
            self.address + start * self.unit_bytes,
            self._ids + first * 8,
            np.asarray(self._host_ids[first:end]),
        )

    def give_back(self, slot: Slot) -> None:
        self._owner[slot.start : slot.start + slot.units] = [None] * slot.units

    def close(self) -> None:
        self._driver.call("cuMemFree_v2", self.address)
        self._driver.call("cuMemFree_v2", self._ids)
        self._driver.call("cuMemFreeHost", self._host_ids_address)

    def _find(self, units: int) -> int | None:
        """The first of `units` free units in a row."""
        run = 0
        for index, owner in enumerate(self._owner):
            run = 0 if owner is not None else run + 1
            if run == units:
                return index - units + 1
        return None
