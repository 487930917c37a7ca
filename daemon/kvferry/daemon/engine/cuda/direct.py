"""Direct copies: every page is one copy over the link, done by the GPU's copy engines.

They do not interrupt the kernels of other processes. For pages below some hundred KiB the constant
cost of a copy reduces the speed; those are staged (staged.py). Called by the device worker.
"""

from __future__ import annotations

from kvferry.cuda.driver import Driver, Event
from kvferry.daemon.core.layout import Extent
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.cuda.dma import Dma
from kvferry.proto.specs import Direction

# Bytes of a chunk.
CHUNK = 32 << 20
# Bytes in flight per direction: 1.7 ms of the link. The device worker polls every 0.1 ms.
MAX_IN_FLIGHT = 3 * CHUNK


class DirectCopy:
    """Enqueues chunks on one stream per direction.

    A second stream does not fill the pauses of a copy engine between two copies: it also pauses
    when it switches streams, and is slower in total.
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
        """Enqueue a chunk; return the events before and after it. Raises Failed (DRIVER).

        The first event is None unless the chunk begins an extent.
        """
        layout, stream = mapping.layout, self.streams[direction]
        batch = layout.copy_batch(extent, mapping.bases, self._dma.pool)
        begun = None if extent.at else self._driver.record(stream)
        whole = layout.blocks_within_chunks(self._dma.chunk_bytes)
        self._dma.enqueue(direction, batch, stream, whole=whole)
        return begun, self._driver.record(stream)
