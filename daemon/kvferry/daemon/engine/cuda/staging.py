"""The staging buffer: device memory that small fragments are copied through, in units.

A piece takes some units in a row, so that its blocks are contiguous there, and gives them back
when it is done. A kernel in the daemon's process makes the GPU change contexts, which costs a busy
engine about half a millisecond whatever the kernel does: so pieces are as large as they can be.
Alone, a direction takes half of the buffer for a piece while the other half is on the link; where
both directions have work each has half of the buffer, in two pieces. Stores always leave a little
for loads, which somebody waits for: a small load never waits for a store's piece to end.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.proto.libcuda import Driver
from kvferry.proto.specs import Direction

UNITS = 16
FOR_LOADS = 2
"""Units that stores do not take."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Some units in a row, at `address` in device memory."""

    start: int
    units: int
    address: int


class Staging:
    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.unit_bytes = nbytes // UNITS
        self.address = driver.allocate(nbytes)
        self._owner: list[Direction | None] = [None] * UNITS

    def room(self, direction: Direction, nbytes: int, contended: bool) -> int:
        """Bytes for the next piece of a direction that has `nbytes` to move; 0 for none now.

        A piece that finds less than it could use waits: small turns cost the engine.
        """
        mine = UNITS // 2 if contended else UNITS
        if direction is Direction.STORE:
            mine = min(mine, UNITS - FOR_LOADS)
        units = min(mine // 2, self._units(nbytes))
        if self._owner.count(direction) + units > mine or self._find(direction, units) is None:
            return 0
        return units * self.unit_bytes

    def take(self, direction: Direction, nbytes: int) -> Slot:
        """A slot for a piece that `room` allowed."""
        units = self._units(nbytes)
        start = self._find(direction, units)
        assert start is not None
        self._owner[start : start + units] = [direction] * units
        return Slot(start, units, self.address + start * self.unit_bytes)

    def give_back(self, slot: Slot) -> None:
        self._owner[slot.start : slot.start + slot.units] = [None] * slot.units

    def _units(self, nbytes: int) -> int:
        return -(-nbytes // self.unit_bytes)

    def _find(self, direction: Direction, units: int) -> int | None:
        """The first of `units` free units in a row; loads look from the other end."""
        starts = range(UNITS - units + 1)
        for start in starts if direction is Direction.STORE else reversed(starts):
            if all(owner is None for owner in self._owner[start : start + units]):
                return start
        return None
