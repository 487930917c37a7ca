"""DMA: batches of copies between GPU and host memory, enqueued on a stream.

Many copies are one call: cuMemcpyBatchAsync (CUDA 12.8) takes arrays of addresses and sizes by
pointer, so the cost of a copy is the driver's, about 0.4 us, and the copy engine pauses less
between two copies than if they were enqueued one by one. A few small ones are: the first batch of a
device that has slept costs the CPU 150 us, four copies 50.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from typing import Any

import numpy as np

from kvferry.cuda.driver import TOO_OLD, CopyAttributes, Driver
from kvferry.daemon.core.layout import CopyBatch
from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import Direction

# Up to so many copies of so many bytes in total are enqueued one by one. The pauses between them
# take 10 us in all.
FEW = 8
SMALL = 8 << 20
_STREAM_ORDER = 1


class Dma:
    """Called only by the device worker.

    pool: address of the host pool's first byte. chunk_bytes: the pool is registered in chunks of
    that size, and no copy may cross from one into the next; a copy that does is cut. few, small:
    see FEW and SMALL.
    """

    def __init__(
        self, driver: Driver, pool: int, chunk_bytes: int, few: int = FEW, small: int = SMALL
    ) -> None:
        self._driver = driver
        self._few, self._small = few, small
        self.pool = pool
        self.chunk_bytes = chunk_bytes
        self._enqueue_batch = _batch_function(driver)

    def enqueue(
        self, direction: Direction, batch: CopyBatch, stream: int, *, whole: bool = False
    ) -> None:
        """Enqueue copies in one direction. Raises Failed (DRIVER) if the driver refuses them.

        whole: no copy crosses from one chunk of the pool into the next; the caller knows.
        """
        count = batch.count  # before some are cut: then they are still few
        if not whole:
            batch = self._within_chunks(batch)
        few = count <= self._few and int(np.add.reduce(batch.size)) <= self._small
        if few or count == 1:
            self._enqueue_singly(direction, batch, stream)
        else:
            self._enqueue_at_once(direction, batch, stream)

    def _enqueue_singly(self, direction: Direction, batch: CopyBatch, stream: int) -> None:
        store = direction is Direction.STORE
        for gpu, host, size in batch.rows():
            dst, src = (host, gpu) if store else (gpu, host)
            self._driver.call("cuMemcpyAsync", dst, src, size, stream)

    def _enqueue_at_once(self, direction: Direction, batch: CopyBatch, stream: int) -> None:
        gpu: int = batch.table.__array_interface__["data"][0]
        host, sizes = (gpu + row * batch.table.strides[0] for row in (1, 2))
        dst, src = (host, gpu) if direction is Direction.STORE else (gpu, host)
        if result := self._enqueue_batch(dst, src, sizes, batch.count, stream):
            raise self._driver.error("cuMemcpyBatchAsync", result)

    def _within_chunks(self, batch: CopyBatch) -> CopyBatch:
        """The same copies, those cut that cross from one chunk of the pool into the next."""
        chunk, start = self.chunk_bytes, batch.host - self.pool
        end = start + batch.size
        first, last = start // chunk, (end - 1) // chunk
        counts = last - first + 1
        if int(np.add.reduce(counts)) == counts.size:
            return batch
        of = np.repeat(np.arange(counts.size), counts)
        number = first[of] + np.arange(of.size) - (np.cumsum(counts) - counts)[of]
        begin = np.maximum(start[of], number * chunk)
        size = np.minimum(end[of], (number + 1) * chunk) - begin
        return CopyBatch.from_rows(batch.gpu[of] + begin - start[of], begin + self.pool, size)


def _batch_function(driver: Driver) -> Callable[[int, int, int, int, int], int]:
    """cuMemcpyBatchAsync in the newest shape that the driver has.

    (address of the destinations, of the sources, of the sizes, count, stream) -> result
    """
    attributes, first, fail_index = CopyAttributes(order=_STREAM_ORDER), c_size_t(0), c_size_t(0)
    shapes: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("cuMemcpyBatchAsync_v2", ()),
        ("cuMemcpyBatchAsync", (byref(fail_index),)),
    )
    for symbol, tail in shapes:
        function = driver.optional(symbol)
        if function is not None:
            rest = byref(attributes), byref(first), 1, *tail
            pointers, ends = (c_void_p,) * 3, (c_void_p,) * len(tail)
            function.argtypes = (
                *pointers,
                c_size_t,
                *pointers[:2],
                c_size_t,
                *ends,
                c_void_p,
            )
            return lambda dst, src, sizes, count, stream: int(
                function(dst, src, sizes, count, *rest, stream)
            )
    raise Refused(Code.NO_DEVICE, TOO_OLD, "no cuMemcpyBatchAsync")
