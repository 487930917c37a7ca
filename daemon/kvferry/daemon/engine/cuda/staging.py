"""The staging buffer: device memory that small fragments are copied through, in units.

A piece takes some units in a row, so that its blocks are contiguous there, and gives them back
when it is done. Each direction goes round the buffer, so pieces that follow each other lie one
behind the other. Alone, a direction may have all of it; where both have work, half each. Stores
always leave a little for loads, which somebody waits for: a small load never waits for stores.

Kernels run in turns (kernel_batching.py), and a store's turn is worth the more the more room there
is to gather into. So stores get room only when no more than a third of theirs is left to drain,
about as much as the link moves until the turn has come; then all that is free, and what becomes
free until that.
"""

from __future__ import annotations

import msgspec

from kvferry.cuda.driver import Driver
from kvferry.daemon.engine.base import ChunkRequest
from kvferry.proto.specs import Direction

UNITS = 64
ALIGNED = 256
"""Bytes that a unit is a multiple of: kernels read and write 16 at once, at addresses that are
multiples of that."""
PIECE = 8
"""Units of the largest piece: a piece that is done makes room for another before the link has
emptied the next one."""
LEAST = 2
"""A piece that could be larger takes no fewer units."""
FOR_LOADS = 2
"""Units that stores do not take."""
LAG = 3
"""A turn is asked for when one part in so many of the buffer is left for the link to move until it
comes: 96 of 256 MiB are 1.9 ms."""


class Slot(msgspec.Struct, frozen=True):
    """Some units in a row, at `address` in device memory."""

    start: int
    units: int
    address: int

    @property
    def mask(self) -> int:
        return ((1 << self.units) - 1) << self.start


class Staging:
    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.unit_bytes = nbytes // UNITS // ALIGNED * ALIGNED
        self.piece_bytes = PIECE * self.unit_bytes
        self.address = driver.allocate(nbytes)
        self._used = dict.fromkeys(Direction, 0)
        self._next = {Direction.STORE: 0, Direction.LOAD: UNITS // 2}

    def room(
        self,
        direction: Direction,
        request: ChunkRequest,
        block_bytes: int,
        ahead: int,
    ) -> int:
        """Bytes for the next piece of a direction, of one block at least; 0 for none now.

        ahead: units of stores whose turn has not come; they are not on the link yet.
        """
        mine, used = self._share(direction, request.contended), self._used[direction].bit_count()
        if direction is Direction.STORE and used - ahead > _low(mine):
            return 0
        most = min(PIECE, self._units(request.nbytes))
        least = max(min(most, LEAST), self._units(block_bytes))
        return self._gap(direction, min(most, mine - used), least) * self.unit_bytes

    def take(self, direction: Direction, nbytes: int) -> Slot:
        """A slot for a piece that `room` allowed."""
        units = self._units(nbytes)
        start = self._find(direction, units)
        assert start is not None
        slot = Slot(start, units, self.address + start * self.unit_bytes)
        self._used[direction] |= slot.mask
        self._next[direction] = (start + units) % UNITS
        return slot

    def give_back(self, slot: Slot) -> None:
        for direction in Direction:
            self._used[direction] &= ~slot.mask

    def _share(self, direction: Direction, contended: bool) -> int:
        if contended:
            return UNITS // 2
        return UNITS - FOR_LOADS if direction is Direction.STORE else UNITS

    def _units(self, nbytes: int) -> int:
        return -(-nbytes // self.unit_bytes)

    @property
    def _free(self) -> int:
        """A bit for each unit."""
        return ~(self._used[Direction.STORE] | self._used[Direction.LOAD]) & ((1 << UNITS) - 1)

    def _gap(self, direction: Direction, most: int, least: int) -> int:
        """How many units in a row there are, `most` at most; 0 where not even `least`."""
        if most < least:
            return 0
        if self._find(direction, most) is not None:
            return most
        starts, units = self._free, 0
        while starts:  # those where a row of one more begins
            starts &= starts >> 1
            units += 1
        return units if units >= least else 0

    def _find(self, direction: Direction, units: int) -> int | None:
        """Where the next so many free units in a row begin, from where the last piece ended."""
        starts, have = self._free, 1
        while have < units:
            step = min(have, units - have)
            starts &= starts >> step
            have += step
        later = starts >> self._next[direction] << self._next[direction]
        first = later or starts
        return (first & -first).bit_length() - 1 if first else None


def _low(share: int) -> int:
    """The part that a turn is asked for ahead, in whole pieces."""
    return -(-share // (LAG * PIECE)) * PIECE
