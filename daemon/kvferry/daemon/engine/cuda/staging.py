"""The staging buffer: device memory that small fragments are copied through, in units.

A chunk reserves contiguous units, and releases them when it is done. Each direction goes round the
buffer, so chunks that follow each other are adjacent, and one kernel can serve them. A direction
may use the whole buffer if the other has no work, and half of it otherwise. Stores always leave
FOR_LOADS units free: a small load never waits for stores.

Kernels run in turns (kernel_batching.py), and a store's turn should gather as much as possible. So
stores get room only when at most a third of theirs is left to write back, which is about as much as
the link moves until the next turn; then they get all that is free, and all that becomes free before
that turn.
"""

from __future__ import annotations

import msgspec

from kvferry.cuda.driver import Driver
from kvferry.daemon.engine.base import ChunkRequest
from kvferry.proto.specs import Direction

UNITS = 64
# A unit is a multiple of so many bytes: kernels access 16 bytes at once, at aligned addresses.
ALIGNED = 256
# Units of the largest chunk. A chunk that is done makes room for another while the link is busy
# with the next one.
CHUNK_UNITS = 8
# A chunk that could be larger has at least so many units.
LEAST = 2
# Units that stores leave free.
FOR_LOADS = 2
# A turn is asked for when one part in LAG of the buffer is left to move: 96 of 256 MiB take 1.9 ms.
LAG = 3


class Slot(msgspec.Struct, frozen=True):
    """Contiguous units, at `address` in device memory."""

    start: int
    units: int
    address: int

    @property
    def mask(self) -> int:
        return ((1 << self.units) - 1) << self.start


class Staging:
    """Which units of the buffer are in use, and by which direction."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.unit_bytes = nbytes // UNITS // ALIGNED * ALIGNED
        self.chunk_bytes = CHUNK_UNITS * self.unit_bytes
        self.address = driver.allocate(nbytes)
        self._used = dict.fromkeys(Direction, 0)
        self._next = {Direction.STORE: 0, Direction.LOAD: UNITS // 2}

    def max_slot_bytes(
        self,
        direction: Direction,
        request: ChunkRequest,
        block_bytes: int,
        ahead: int,
    ) -> int:
        """Bytes that the next chunk of a direction may have, at least one block; 0: no room.

        ahead: units of stores whose turn has not come; they are not on the link yet.
        """
        mine, used = self._share(direction, request.contended), self._used[direction].bit_count()
        if direction is Direction.STORE and used - ahead > _low(mine):
            return 0
        most = min(CHUNK_UNITS, self._units(request.nbytes))
        least = max(min(most, LEAST), self._units(block_bytes))
        return self._gap(direction, min(most, mine - used), least) * self.unit_bytes

    def take_slot(self, direction: Direction, nbytes: int) -> Slot:
        """A slot for a chunk that `room` allowed."""
        units = self._units(nbytes)
        start = self._find_slot(direction, units)
        assert start is not None
        slot = Slot(start, units, self.address + start * self.unit_bytes)
        self._used[direction] |= slot.mask
        self._next[direction] = (start + units) % UNITS
        return slot

    def free_slot(self, slot: Slot) -> None:
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
        if self._find_slot(direction, most) is not None:
            return most
        starts, units = self._free, 0
        while starts:  # those where a row of one more begins
            starts &= starts >> 1
            units += 1
        return units if units >= least else 0

    def _find_slot(self, direction: Direction, units: int) -> int | None:
        """Where the next so many free units in a row begin, from where the last chunk ended."""
        starts, have = self._free, 1
        while have < units:
            step = min(have, units - have)
            starts &= starts >> step
            have += step
        later = starts >> self._next[direction] << self._next[direction]
        first = later or starts
        return (first & -first).bit_length() - 1 if first else None


def _low(share: int) -> int:
    """The part that a turn is asked for ahead, in whole chunks."""
    return -(-share // (LAG * CHUNK_UNITS)) * CHUNK_UNITS
