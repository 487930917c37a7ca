"""DMA: batches of copies between GPU and host memory, enqueued on a stream.

Many copies are enqueued in one call: cuMemcpyBatchAsync (CUDA 12.8) takes pointers to arrays of
addresses and sizes. A copy then costs about 0.4 us in the driver, and the copy engine pauses less
between two copies. A few small copies are enqueued one by one: on an idle device, the first batch
costs the CPU 150 us, and four single copies 50 us.
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

# Up to FEW copies with up to SMALL bytes in total are enqueued one by one. The pauses between them
# take 10 us in total.
FEW = 8
SMALL = 8 << 20
_STREAM_ORDER = 1


class Dma:
    """Called only by the device worker.

    pool: address of the first byte of the host pool. chunk_bytes: the pool is registered in chunks
    of this size. No copy may span two of them; one that does is split. few, small: see FEW and
    SMALL.
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

        whole: the caller guarantees that no copy spans two chunks of the pool.
        """
        count = batch.count  # before they are split
        if not whole:
            batch = self._within_chunks(batch)
        few = count <= self._few and int(np.add.reduce(batch.size)) <= self._small
        if few or count == 1:
            self._enqueue_singly(direction, batch, stream)
        else:
            self._enqueue_together(direction, batch, stream)

    def _enqueue_singly(self, direction: Direction, batch: CopyBatch, stream: int) -> None:
        store = direction is Direction.STORE
        for gpu, host, size in batch.rows():
            dst, src = (host, gpu) if store else (gpu, host)
            self._driver.call("cuMemcpyAsync", dst, src, size, stream)

    def _enqueue_together(self, direction: Direction, batch: CopyBatch, stream: int) -> None:
        gpu: int = batch.table.__array_interface__["data"][0]
        host, sizes = (gpu + row * batch.table.strides[0] for row in (1, 2))
        dst, src = (host, gpu) if direction is Direction.STORE else (gpu, host)
        if result := self._enqueue_batch(dst, src, sizes, batch.count, stream):
            raise self._driver.error("cuMemcpyBatchAsync", result)

    def _within_chunks(self, batch: CopyBatch) -> CopyBatch:
        """The same copies; those that span chunks of the pool are split."""
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
    """cuMemcpyBatchAsync in the newest version that the driver has. Raises Refused (NO_DEVICE).

    Arguments: addresses of the arrays of destinations, sources and sizes; count; stream. Returns
    the CUresult.
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
