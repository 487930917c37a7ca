"""What goes over the link: contiguous pieces of memory, enqueued on a stream.

Many fragments are one batched DMA: cuMemcpyBatchAsync (CUDA 12.8) takes arrays of addresses and
sizes by pointer, so the cost of a fragment is the driver's, about 0.4 us, and from one to the next
the copy engine pauses less than between copies. Few and small ones are copied one by one: the first
batch of a device that has slept costs the CPU 150 us, four copies 50. Some, given as rows, are a
batch that Python has put together before numpy has begun; with more no Python runs per fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import addressof, byref, c_size_t, c_uint64, c_void_p
from typing import Any

import numpy as np

from kvferry.daemon.core.geometry import Fragments, Rows
from kvferry.proto.errors import Code, Refused
from kvferry.proto.libcuda import MIN_DRIVER, CopyAttributes, Driver
from kvferry.proto.specs import Direction

FEW = 8
SMALL = 8 << 20
"""Bytes: the pauses between so few copies of 2 MiB take 10 us in all."""
QUICK = 512
"""Fragments in a batch of a load that is enqueued without giving the GIL away: in 0.2 ms. A store
does: a load may be about to come."""
_STREAM_ORDER = 1


class Link:
    """`chunk_bytes`: registered pieces of the pool, which begins at `pool`. No copy may cross from
    one into the next, so who does is cut."""

    def __init__(self, driver: Driver, pool: int, chunk_bytes: int) -> None:
        self._driver = driver
        self._pool = pool
        self._chunk = chunk_bytes
        self._batches = {quick: _batch_function(driver, quick=quick) for quick in (True, False)}

    def enqueue(self, direction: Direction, fragments: Fragments | Rows, stream: int) -> None:
        """Raises Failed (DRIVER) where the driver refuses."""
        if isinstance(fragments, Fragments):
            if fragments.size.size > FEW:
                return self._batch(direction, fragments, stream)
            fragments = fragments.rows()
        few = len(fragments) <= FEW and sum([size for _, _, size in fragments]) <= SMALL
        enqueue = self._one_by_one if few or len(fragments) == 1 else self._batch_rows
        return enqueue(direction, [*self._cut(fragments)], stream)

    def _one_by_one(self, direction: Direction, rows: Rows, stream: int) -> None:
        store = direction is Direction.STORE
        for gpu, host, size in rows:
            dst, src = (host, gpu) if store else (gpu, host)
            self._driver.call("cuMemcpyAsync", dst, src, size, stream)

    def _batch_rows(self, direction: Direction, rows: Rows, stream: int) -> None:
        gpu, host, size = zip(*rows, strict=True)
        dst, src = (host, gpu) if direction is Direction.STORE else (gpu, host)
        table = (c_uint64 * (3 * len(rows)))(*dst, *src, *size)
        self._enqueue_batch(direction, addressof(table), len(rows), stream)

    def _batch(self, direction: Direction, fragments: Fragments, stream: int) -> None:
        fragments = self._within_chunks(fragments)
        store = direction is Direction.STORE
        dst, src = (fragments.host, fragments.gpu) if store else (fragments.gpu, fragments.host)
        table = np.stack((dst, src, fragments.size))
        at = table.__array_interface__["data"][0]
        self._enqueue_batch(direction, at, dst.size, stream)

    def _enqueue_batch(self, direction: Direction, table: int, count: int, stream: int) -> None:
        """table: where so many destinations, then as many sources and sizes lie."""
        column = 8 * count
        batch = self._batches[direction is Direction.LOAD and count <= QUICK]
        result = batch(table, table + column, table + 2 * column, count, stream)
        if result:
            raise self._driver.error("cuMemcpyBatchAsync", result)

    def _cut(self, rows: Rows) -> Iterator[tuple[int, int, int]]:
        """Cut what crosses from one registered chunk into the next."""
        for gpu, host, size in rows:
            at, end = 0, (host - self._pool) // self._chunk * self._chunk + self._pool - host
            while at < size:
                end = min(size, end + self._chunk)
                yield gpu + at, host + at, end - at
                at = end

    def _within_chunks(self, fragments: Fragments) -> Fragments:
        """As `_cut`."""
        first = (fragments.host - self._pool) // self._chunk
        last = (fragments.host + fragments.size - 1 - self._pool) // self._chunk
        while (crossing := first != last).any():
            head = (first + 1) * self._chunk + self._pool - fragments.host
            sizes = np.where(crossing, head, fragments.size)
            tail = Fragments(
                (fragments.gpu + sizes)[crossing],
                (fragments.host + sizes)[crossing],
                (fragments.size - sizes)[crossing],
            )
            fragments = Fragments(
                np.concatenate((fragments.gpu, tail.gpu)),
                np.concatenate((fragments.host, tail.host)),
                np.concatenate((sizes, tail.size)),
            )
            first = (fragments.host - self._pool) // self._chunk
            last = (fragments.host + fragments.size - 1 - self._pool) // self._chunk
        return fragments


def _batch_function(driver: Driver, *, quick: bool) -> Callable[[int, int, int, int, int], int]:
    """cuMemcpyBatchAsync in the newest shape that the driver has: (destinations, sources, sizes,
    count, stream). quick: one that keeps the GIL."""
    attributes, first, fail_index = CopyAttributes(order=_STREAM_ORDER), c_size_t(0), c_size_t(0)
    shapes: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("cuMemcpyBatchAsync_v2", ()),
        ("cuMemcpyBatchAsync", (byref(fail_index),)),
    )
    for symbol, tail in shapes:
        function = driver.optional(symbol, quick=quick)
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
    raise Refused(
        Code.NO_DEVICE,
        f"the NVIDIA driver is too old for batched copies: CUDA {MIN_DRIVER / 1000:g} is needed",
        driver.version,
    )
