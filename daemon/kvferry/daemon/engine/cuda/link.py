"""What goes over the link: contiguous pieces of memory, enqueued on a stream.

Many fragments are one batched DMA: cuMemcpyBatchAsync (CUDA 12.8) takes arrays of addresses and
sizes by pointer, so the cost of a fragment is the driver's, about 0.4 us, and no Python runs per
fragment. Few are copied one by one: the first batch of a device that has slept costs the CPU
150 us, four copies 50.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from typing import Any

import numpy as np

from kvferry.daemon.core.geometry import Fragments, Rows
from kvferry.proto.errors import Code, Refused
from kvferry.proto.libcuda import MIN_DRIVER, CopyAttributes, Driver
from kvferry.proto.specs import Direction

FEW = 8
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
        elif len(fragments) > FEW:
            return self._batch(direction, Fragments(*np.array(fragments).T), stream)
        return self._one_by_one(direction, fragments, stream)

    def _one_by_one(self, direction: Direction, rows: Rows, stream: int) -> None:
        store = direction is Direction.STORE
        for gpu, host, size in rows:
            at, end = 0, (host - self._pool) // self._chunk * self._chunk + self._pool - host
            while at < size:
                end = min(size, end + self._chunk)
                dst, src = (host + at, gpu + at) if store else (gpu + at, host + at)
                self._driver.call("cuMemcpyAsync", dst, src, end - at, stream)
                at = end

    def _batch(self, direction: Direction, fragments: Fragments, stream: int) -> None:
        fragments = self._within_chunks(fragments)
        store = direction is Direction.STORE
        dst, src = (fragments.host, fragments.gpu) if store else (fragments.gpu, fragments.host)
        table = np.stack((dst, src, fragments.size))
        at, row = table.__array_interface__["data"][0], table.strides[0]
        batch = self._batches[not store and dst.size <= QUICK]
        result = batch(at, at + row, at + 2 * row, dst.size, stream)
        if result:
            raise self._driver.error("cuMemcpyBatchAsync", result)

    def _within_chunks(self, fragments: Fragments) -> Fragments:
        """Cut what crosses from one registered chunk into the next: no copy may."""
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
