"""Direct copies: every page is one copy on the link.

The copy engines do the work: other processes' kernels do not feel it. Below some hundred KiB the
engines' own cost for a copy shows, see staged.py.
"""

from __future__ import annotations

from kvferry.cuda.driver import Driver, Event
from kvferry.daemon.core.layout import Extent
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda.dma import Dma
from kvferry.proto.specs import Direction

# Bytes of a chunk.
CHUNK = 32 << 20
# Bytes in flight in one direction: 1.7 ms of the link, while the device worker looks every 0.1 ms.
MAX_IN_FLIGHT = 3 * CHUNK


class DirectCopy:
    """Enqueues chunks on one stream per direction.

    A second stream, to fill the pauses that a copy engine makes between two copies, is slower: the
    engine also pauses when streams take turns.
    """

    def __init__(self, driver: Driver, dma: Dma) -> None:
        self._driver = driver
        self._dma = dma
        self.streams = {
            direction: driver.create_stream(urgent=direction is Direction.LOAD)
            for direction in Direction
        }

    def enqueue(
        self, direction: Direction, mapping: Mapping, extent: Extent
    ) -> tuple[Event | None, Event]:
        """Enqueue a chunk. Returns the events before it, if it is a run's first, and behind it."""
        layout, stream = mapping.layout, self.streams[direction]
        batch = layout.copy_batch(extent, mapping.bases, self._dma.pool)
        begun = None if extent.at else self._driver.record(stream)
        whole = layout.blocks_within_chunks(self._dma.chunk_bytes)
        self._dma.enqueue(direction, batch, stream, whole=whole)
        return begun, self._driver.record(stream)
