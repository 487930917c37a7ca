"""What goes over the link: contiguous pieces of memory, enqueued on a stream.

Many fragments are one batched DMA: cuMemcpyBatchAsync (CUDA 12.8) takes arrays of addresses and
sizes by pointer, so the cost of a fragment is the driver's, about 0.4 us, and from one to the next
the copy engine pauses less than between copies. Few and small ones are copied one by one: the first
batch of a device that has slept costs the CPU 150 us, four copies 50. Some, given as rows, are a
batch that Python has put together before numpy has begun; with more no Python runs per fragment.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from ctypes import byref, c_size_t, c_void_p
from typing import Any

import msgspec
import numpy as np

from kvferry.cuda.driver import TOO_OLD, CopyAttributes, Driver
from kvferry.daemon.core.layout import BlockLayout, Fragments, Int64s, Rows, largest
from kvferry.proto.errors import Code, Refused
from kvferry.proto.specs import Direction

FEW = 8
SMALL = 8 << 20
"""Bytes: the pauses between so few copies of 2 MiB take 10 us in all."""
_ADDRESS, _ITEM = "Q", 8
"""As `array` calls an address, and its bytes. A ctypes array of as many would be a class of its
own, which takes longer to make than what is in it."""
_STREAM_ORDER = 1
KEPT, MARKS = 64, 1 << 15
"""Distances on a ruler: a staging buffer has as many places to begin, for each size of a block. And
addresses at one distance, at most: smaller blocks have no ruler."""


class Link:
    """`chunk_bytes`: registered pieces of the pool, which begins at `pool`. No copy may cross from
    one into the next, so who does is cut."""

    def __init__(self, driver: Driver, pool: int, chunk_bytes: int) -> None:
        self._driver = driver
        self.pool = pool
        self._chunk = chunk_bytes
        self._batch = _batch_function(driver)

    def enqueue(
        self, direction: Direction, fragments: Fragments | Rows | Some, stream: int
    ) -> None:
        """Raises Failed (DRIVER) where the driver refuses."""
        if isinstance(fragments, Some):
            return self._enqueue_some(direction, fragments, stream)
        if isinstance(fragments, Fragments):
            if fragments.size.size > FEW:
                return self.enqueue_listed(self.listed(direction, fragments), stream)
            fragments = fragments.rows()
        few = len(fragments) <= FEW and sum([size for _, _, size in fragments]) <= SMALL
        enqueue = self._one_by_one if few or len(fragments) == 1 else self._batch_rows
        return enqueue(direction, self._cut(fragments), stream)

    def _one_by_one(self, direction: Direction, rows: Rows, stream: int) -> None:
        store = direction is Direction.STORE
        for gpu, host, size in rows:
            dst, src = (host, gpu) if store else (gpu, host)
            self._driver.call("cuMemcpyAsync", dst, src, size, stream)

    def _batch_rows(self, direction: Direction, rows: Rows, stream: int) -> None:
        gpu, host, size = zip(*rows, strict=True)
        dst, src = (host, gpu) if direction is Direction.STORE else (gpu, host)
        table = array(_ADDRESS, (*dst, *src, *size))
        (at, _), row_bytes = table.buffer_info(), _ITEM * len(rows)
        self._enqueue_batch((at, at + row_bytes, at + 2 * row_bytes), len(rows), stream)

    def whole(self, geometry: BlockLayout) -> bool:
        """Whether none of its fragments lies across two chunks."""
        return geometry.whole(self._chunk)

    def listed(self, direction: Direction, fragments: Fragments, *, whole: bool = False) -> Listed:
        """Fragments made ready, any number in a row of them to be enqueued. whole: none of them
        lies across two chunks."""
        fragments, begins = (fragments, None) if whole else self._within_chunks(fragments)
        return Listed(direction, fragments.table, begins)

    def enqueue_listed(
        self, listed: Listed, stream: int, first: int = 0, count: int | None = None
    ) -> None:
        """Enqueue `count` fragments from `first` on, or all. Raises as `enqueue`."""
        gpu, entries = listed.some(first, listed.fragments if count is None else count)
        host, sizes = gpu + listed.row_bytes, gpu + 2 * listed.row_bytes
        store = listed.direction is Direction.STORE
        columns = (host, gpu, sizes) if store else (gpu, host, sizes)
        self._enqueue_batch(columns, entries, stream)

    def scattered(self, offsets: Int64s, nbytes: int) -> Scattered | None:
        """Blocks of one size in the pool made ready; None where one lies across two chunks."""
        if largest(offsets % self._chunk) > self._chunk - nbytes:
            return None
        return Scattered(offsets + self.pool, nbytes)

    def _enqueue_some(self, direction: Direction, some: Some, stream: int) -> None:
        hosts, sizes = some.of.addresses(some.first)
        gpu = some.ruler.mark(some.gpu, some.of.nbytes)
        columns = (hosts, gpu, sizes) if direction is Direction.STORE else (gpu, hosts, sizes)
        self._enqueue_batch(columns, some.count, stream)

    def _enqueue_batch(self, columns: tuple[int, int, int], count: int, stream: int) -> None:
        """columns: where the destinations lie, the sources, and the sizes."""
        result = self._batch(*columns, count, stream)
        if result:
            raise self._driver.error("cuMemcpyBatchAsync", result)

    def _cut(self, rows: Rows) -> Rows:
        """Cut what crosses from one registered chunk into the next."""
        pool, chunk = self.pool, self._chunk
        if max([(host - pool) % chunk + size for _, host, size in rows]) <= chunk:
            return rows
        cut: Rows = []
        for gpu, host, size in rows:
            at, end = 0, chunk - (host - pool) % chunk
            while at < size:
                end = min(size, end)
                cut.append((gpu + at, host + at, end - at))
                at, end = end, end + chunk
        return cut

    def _within_chunks(self, fragments: Fragments) -> tuple[Fragments, Int64s | None]:
        """As `_cut`; and with which of these each fragment begins, if any was cut."""
        chunk, host = self._chunk, fragments.host - self.pool
        first, last = host // chunk, (host + fragments.size - 1) // chunk
        if (first == last).all():
            return fragments, None
        counts = last - first + 1
        begins = np.concatenate(([0], np.cumsum(counts)))
        of = np.repeat(np.arange(counts.size), counts)
        number = first[of] + np.arange(of.size) - begins[of]
        start = np.maximum(host[of], number * chunk)
        end = np.minimum((host + fragments.size)[of], (number + 1) * chunk)
        gpu = fragments.gpu[of] + start - host[of]
        return Fragments.of(gpu, start + self.pool, end - start), begins


class Listed:
    """Fragments as the driver reads them, none of them across two chunks.

    table: as that of Fragments. begins: (fragments + 1,) where each fragment begins there, if some
    were cut; None where fragments and entries are the same.
    """

    def __init__(self, direction: Direction, table: Int64s, begins: Int64s | None) -> None:
        self.direction = direction
        self.row_bytes = table.strides[0]
        self.fragments = table.shape[1] if begins is None else begins.size - 1
        self._table, self._begins = table, begins
        self._address = _address(table)

    def some(self, first: int, count: int) -> tuple[int, int]:
        """Where the entries of some fragments lie, and how many they are."""
        end = first + count
        if self._begins is not None:
            first, end = int(self._begins[first]), int(self._begins[end])
        return self._address + first * _ITEM, end - first


class Scattered:
    """Blocks of `nbytes`, each in a place of its own in host memory, as the driver reads them."""

    def __init__(self, hosts: Int64s, nbytes: int) -> None:
        self.nbytes = nbytes
        sizes = np.empty_like(hosts)
        sizes.fill(nbytes)  # np.full does the same, in Python
        self._columns = hosts, sizes
        self._hosts, self._sizes = map(_address, self._columns)

    def addresses(self, first: int) -> tuple[int, int]:
        """Where the places lie from block `first` on, and where the sizes do."""
        return self._hosts + first * _ITEM, self._sizes


class Ruler:
    """Addresses in a buffer of `nbytes` from `begin` on, at equal distances, as the driver reads
    them."""

    def __init__(self, begin: int, nbytes: int) -> None:
        self._begin, self._end = begin, begin + nbytes
        self._marks: dict[tuple[int, int], tuple[int, int, Int64s]] = {}
        """By distance and remainder: the first address, where that stands, and all of them."""

    def measures(self, apart: int) -> bool:
        """Whether there is room for the addresses at this distance."""
        return (self._end - self._begin) // apart < MARKS

    def mark(self, at: int, apart: int) -> int:
        """Where the address `at` stands; behind it those from there on, each `apart` bytes behind
        the one before, to the buffer's end. They stand there for a while: until this was asked
        for KEPT other distances."""
        key = apart, at % apart
        if key not in self._marks:
            self._measure(*key)
        first, stands, _ = self._marks[key]
        return stands + (at - first) // apart * _ITEM

    def _measure(self, apart: int, rest: int) -> None:
        if len(self._marks) == KEPT:
            self._marks = {}
        first = self._begin + (rest - self._begin) % apart
        marks = np.arange(first, self._end, apart)
        self._marks[apart, rest] = first, _address(marks), marks


class Some(msgspec.Struct, frozen=True, eq=False):
    """Some of them, which lie one behind the other on the GPU, in the buffer of a ruler."""

    of: Scattered
    first: int
    count: int
    gpu: int
    ruler: Ruler


def _address(numbers: Int64s) -> int:
    address: int = numbers.__array_interface__["data"][0]
    return address


def _batch_function(driver: Driver) -> Callable[[int, int, int, int, int], int]:
    """cuMemcpyBatchAsync in the newest shape that the driver has: (destinations, sources, sizes,
    count, stream)."""
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
