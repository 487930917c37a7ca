"""Direct copies: every page is one entry of a batched DMA, submitted in one driver call.

cuMemcpyBatchAsync (CUDA 12.8) takes arrays of addresses and sizes by pointer, so the cost of a
fragment is the driver's, about 0.4 us, and no Python runs per fragment. The copy engines do the
work: other processes' kernels do not feel it. Below some tens of KiB the engines' own cost for a
fragment shows, see staged.py.
"""

from __future__ import annotations

from ctypes import byref, c_size_t, c_void_p
from typing import Any

import numpy as np

from kvferry.daemon.core.geometry import Fragments, Geometry, Run
from kvferry.daemon.engine.base import Mapping
from kvferry.proto.errors import Code, Refused
from kvferry.proto.libcuda import MIN_DRIVER, CopyAttributes, Driver, Event
from kvferry.proto.specs import Direction

_STREAM_ORDER = 1


class DirectCopy:
    """Enqueues pieces on two streams a direction: between two fragments a copy engine pauses, and
    the other stream's fragment fills the pause.

    Which of the two a GPU block takes depends on the block that is written alone, so that two
    transfers that write to one block are done in order.
    """

    def __init__(self, driver: Driver, batch: BatchCopy) -> None:
        self._driver = driver
        self._batch = batch
        self.streams = {
            direction: [driver.create_stream(urgent=direction is Direction.LOAD) for _ in range(2)]
            for direction in Direction
        }

    def enqueue(
        self, direction: Direction, mapping: Mapping, run: Run, pool: int
    ) -> tuple[list[Event], list[Event]]:
        """Enqueue a piece; returns the events before and behind it, one a stream that it uses."""
        begun, done = [], []
        for odd, half in _halves(direction, mapping.geometry, run):
            stream = self.streams[direction][odd]
            begun.append(self._driver.record(stream))
            fragments = mapping.geometry.fragments(half, mapping.bases, pool)
            self._batch.enqueue(direction, fragments, stream)
            done.append(self._driver.record(stream))
        return begun, done


class BatchCopy:
    """Enqueues fragments on a stream. `chunk_bytes`: registered pieces of the pool, from `pool`."""

    def __init__(self, driver: Driver, pool: int, chunk_bytes: int) -> None:
        self._driver = driver
        self._pool = pool
        self._chunk = chunk_bytes
        self._function, has_fail_index = _batch_function(driver)
        attributes, first, fail_index = (
            CopyAttributes(order=_STREAM_ORDER),
            c_size_t(0),
            c_size_t(0),
        )
        self._attributes = byref(attributes), byref(first), 1
        self._fail_index = (byref(fail_index),) if has_fail_index else ()
        pointers = (c_void_p,) * (2 + len(self._fail_index))
        self._function.argtypes = (
            c_void_p,
            c_void_p,
            c_void_p,
            c_size_t,
            *pointers[:2],
            c_size_t,
            *pointers[2:],
            c_void_p,
        )

    def enqueue(self, direction: Direction, fragments: Fragments, stream: int) -> None:
        """Raises Failed (DRIVER) where the driver refuses the batch."""
        fragments = self._within_chunks(fragments)
        store = direction is Direction.STORE
        dst, src = (fragments.host, fragments.gpu) if store else (fragments.gpu, fragments.host)
        table = np.stack((dst, src, fragments.size))
        at, row = table.__array_interface__["data"][0], table.strides[0]
        result = self._function(
            at, at + row, at + 2 * row, dst.size, *self._attributes, *self._fail_index, stream
        )
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


def _halves(direction: Direction, geometry: Geometry, run: Run) -> list[tuple[int, Run]]:
    """The blocks of a piece by the block that they write to: (0, even ones), (1, odd ones)."""
    written = run.gpu_blocks
    if direction is Direction.STORE:
        written = run.host_offsets // geometry.host_block_bytes
    odd = (written & 1).astype(bool)
    odds = int(np.count_nonzero(odd))
    if odds in (0, odd.size):
        return [(1 if odds else 0, run)]
    return [
        (0, Run(run.group, run.gpu_blocks[~odd], run.host_offsets[~odd])),
        (1, Run(run.group, run.gpu_blocks[odd], run.host_offsets[odd])),
    ]


def _batch_function(driver: Driver) -> tuple[Any, bool]:
    """cuMemcpyBatchAsync in the newest shape that the driver has, and whether it is the first."""
    for symbol, has_fail_index in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        function = driver.optional(symbol)
        if function is not None:
            return function, has_fail_index
    raise Refused(
        Code.NO_DEVICE,
        f"the NVIDIA driver is too old for batched copies: CUDA {MIN_DRIVER / 1000:g} is needed",
        driver.version,
    )
