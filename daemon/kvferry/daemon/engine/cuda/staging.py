"""The staging buffer: device memory through which small fragments are copied, divided into units.

A chunk reserves contiguous units, and releases them when it is done. Each direction allocates units
as in a ring buffer, so consecutive chunks are adjacent, and one kernel can copy several. If both
directions have work, each may use half of the buffer; otherwise one may use all of it. Stores
always leave FOR_LOADS units free, so that a small load does not wait for stores.

Kernels run in time slices (kernel_batching.py), and stores should gather as much as possible in
each. So stores get units only when at most a third of their share remains to be written back, which
is about what the link copies until the next time slice. Then they get all free units, and those
that become free before the time slice starts. Called by the device worker.
"""

from __future__ import annotations

import msgspec

from kvferry.cuda.driver import Driver
from kvferry.daemon.engine.base import ChunkRequest
from kvferry.proto.specs import Direction

UNITS = 64
# The size of a unit is a multiple of this: kernels access 16 bytes at aligned addresses.
ALIGNED = 256
# Units of the largest chunk. When a chunk is done, another one can use its units while the link
# copies the next one.
CHUNK_UNITS = 8
# Minimum of units of a chunk, unless the rest of its transfer needs fewer.
MIN_CHUNK_UNITS = 2
# Units that stores leave free.
FOR_LOADS = 2
# Kernels are launched when 1 / LAG of the buffer remains to be copied: 96 of 256 MiB take 1.9 ms.
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
        self.address, self.nbytes = driver.allocate(nbytes), nbytes
        self._used = dict.fromkeys(Direction, 0)
        self._next = {Direction.STORE: 0, Direction.LOAD: UNITS // 2}

    def max_slot_bytes(
        self,
        direction: Direction,
        request: ChunkRequest,
        block_bytes: int,
        ahead: int,
    ) -> int:
        """The largest number of bytes of the next chunk; 0 if not even one block fits now.

        ahead: units of stores whose kernels have not started; the link does not copy them yet.
        """
        share, used = self._share(direction, request.contended), self._used[direction].bit_count()
        if direction is Direction.STORE and used - ahead > _low(share):
            return 0
        most = min(CHUNK_UNITS, self._units(request.nbytes))
        least = max(min(most, MIN_CHUNK_UNITS), self._units(block_bytes))
        return self._gap(direction, min(most, share - used), least) * self.unit_bytes

    def take_slot(self, direction: Direction, nbytes: int) -> Slot:
        """Reserve a slot for a chunk within `max_slot_bytes`."""
        units = self._units(nbytes)
        start = self._find_slot(direction, units)
        assert start is not None
        slot = Slot(start, units, self.address + start * self.unit_bytes)
        self._used[direction] |= slot.mask
        self._next[direction] = (start + units) % UNITS
        return slot

    def free_slot(self, slot: Slot) -> None:
        """Release the units of a chunk that is done."""
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
        """A bit mask of the free units."""
        return ~(self._used[Direction.STORE] | self._used[Direction.LOAD]) & ((1 << UNITS) - 1)

    def _gap(self, direction: Direction, most: int, least: int) -> int:
        """The longest run of free units, limited to `most`; 0 if it is shorter than `least`."""
        if most < least:
            return 0
        if self._find_slot(direction, most) is not None:
            return most
        starts, units = self._free, 0
        while starts:  # bits where a run of units + 1 free units begins
            starts &= starts >> 1
            units += 1
        return units if units >= least else 0

    def _find_slot(self, direction: Direction, units: int) -> int | None:
        """The start of a run of free units, searched from the end of the last chunk; or None."""
        starts, length = self._free, 1  # bits where a run of `length` free units begins
        while length < units:
            step = min(length, units - length)
            starts &= starts >> step
            length += step
        later = starts >> self._next[direction] << self._next[direction]
        first = later or starts
        return (first & -first).bit_length() - 1 if first else None


def _low(share: int) -> int:
    """The low-water mark of a share: 1 / LAG of it, rounded up to whole chunks."""
    return -(-share // (LAG * CHUNK_UNITS)) * CHUNK_UNITS
