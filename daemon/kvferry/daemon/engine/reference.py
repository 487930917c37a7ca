"""The copy engine without a GPU: the CPU copies bytes in shared memory.

It is the simplest engine that fulfils the interface. One thread per direction stands for a CUDA
stream; it copies each fragment with one call. `Faults` delays chunks or lets them fail, for tests.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s
from kvferry.daemon.engine.base import (
    NO_ROOM,
    AllocatedTensors,
    ChunkBudget,
    ChunkRequest,
    Mapping,
    OwnerThread,
    packed_locations,
    revoked_error,
)
from kvferry.daemon.engine.packing import Bytes, pack_tiles, unpack_tiles
from kvferry.daemon.memory.shared_memory import IOV_MAX, PAGE, MappedFile, copy_vectors
from kvferry.proto.errors import Code, Failed, KVFerryError, Refused
from kvferry.proto.memory import Allocation, FdAllocation, Location
from kvferry.proto.packing import PACKED_TILE_BYTES, TILE_BYTES, packed_bytes
from kvferry.proto.process import SPARE_ADDRESS_SPACE, address_space_left
from kvferry.proto.sizes import format_size
from kvferry.proto.specs import Direction
from kvferry.proto.status import DeviceInfo, GroupCopying
from kvferry.shm.memfd import sealed_memfd

CHUNK_BYTES = 8 << 20
# Chunks in flight per direction, including the one that is being copied.
MAX_CHUNKS = 8


@dataclass(slots=True)
class Faults:
    """Faults that the reference engine injects.

    stall: delay of each chunk in seconds. fail_every: every n-th chunk of a registration fails; 0:
    none.
    """

    stall: float = 0.0
    fail_every: int = 0


@dataclass(slots=True, eq=False)
class _Chunk:
    """Fragments that are copied together.

    gpu, host: (fragments, 2) the address and the size in bytes of each fragment. packed: whether
    those on the host are. unpackable: of a store, positions of the GPU blocks.
    """

    direction: Direction
    gpu: Int64s
    host: Int64s
    blocks: int
    packed: bool
    fails: bool
    revoked: Callable[[], bool] = lambda: False
    unpackable: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    done: bool = False
    began: float = 0.0
    ended: float = 0.0
    error: KVFerryError | None = None


class ReferenceEngine:
    """The engine of a machine without a GPU: it copies in shared memory."""

    info = DeviceInfo("cpu", "cpu", "host memory")
    numa_node: int | None = None

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._owner = OwnerThread()
        self._pool = 0
        # Numbers of the chunks of each mapping.
        self._chunks: defaultdict[int, Iterator[int]] = defaultdict(lambda: count(1))
        self._in_flight = dict.fromkeys(Direction, 0)
        self._queues: dict[Direction, queue.SimpleQueue[_Chunk | None]] = {
            direction: queue.SimpleQueue() for direction in Direction
        }
        self._threads = [
            threading.Thread(target=self._run_stream, args=(chunks,), name=f"kvferry-{direction}")
            for direction, chunks in self._queues.items()
        ]

    def attach(self, pool_address: int) -> None:
        self._owner.bind()
        self._pool = pool_address
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def pin(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        """Do nothing: the CPU can copy from pageable memory."""

    def unpin(self, address: int) -> None:
        """Do nothing."""

    def map_tensors(
        self,
        layout: BlockLayout,
        allocations: Sequence[Allocation],
        locations: Sequence[Location],
        descriptors: Sequence[int],
    ) -> Mapping:
        self._owner.assert_owner()
        mapped: list[MappedFile] = []
        try:
            files = [_as_file(allocation) for allocation in allocations]
            _check_fit(sum(file.size for file in files))
            for file, descriptor in zip(files, descriptors, strict=True):
                mapped.append(MappedFile(descriptor, file.size))
        except KVFerryError:
            for memory in mapped:
                memory.close()
            raise
        bases = [mapped[place.allocation].address + place.offset for place in locations]
        return Mapping(layout, np.array(bases, dtype=np.int64), list(mapped))

    def allocate_tensors(self, layout: BlockLayout, kept: Sequence[int] = ()) -> AllocatedTensors:
        self._owner.assert_owner()
        offsets, size = packed_locations(layout.layout_arrays)
        descriptor = _reopen_memory(kept, size) if kept else sealed_memfd("kvferry-kv", size)
        allocation = FdAllocation(0, size)
        locations = tuple(Location(0, offset) for offset in offsets)
        try:
            mapping = self.map_tensors(layout, [allocation], locations, [descriptor])
        except BaseException:
            os.close(descriptor)
            raise
        return AllocatedTensors(mapping, (allocation,), locations, (descriptor,))

    def unmap_tensors(self, mapping: Mapping) -> None:
        self._owner.assert_owner()
        self._chunks.pop(id(mapping), None)
        for memory in mapping.handles:
            assert isinstance(memory, MappedFile)
            memory.close()

    def chunk_budget(
        self, direction: Direction, mapping: Mapping, request: ChunkRequest
    ) -> ChunkBudget:
        self._owner.assert_owner()
        full = self._in_flight[direction] >= MAX_CHUNKS
        return NO_ROOM if full else ChunkBudget(CHUNK_BYTES)

    def submit(self, direction: Direction, mapping: Mapping, extent: Extent) -> _Chunk:
        self._owner.assert_owner()
        gpu, host = _vectors(mapping, extent, self._pool)
        number, every = next(self._chunks[id(mapping)]), self.faults.fail_every
        fails = bool(every) and number % every == 0
        blocks, packed = extent.gpu_blocks.size, mapping.layout.packed
        chunk = _Chunk(direction, gpu, host, blocks, packed, fails, mapping.revoked)
        self._in_flight[direction] += 1
        self._queues[direction].put(chunk)
        return chunk

    def flush(self, direction: Direction, more: bool) -> None:
        """Do nothing: a chunk is started when it is submitted."""
        self._owner.assert_owner()

    def poll(self, submission: object) -> bool:
        self._owner.assert_owner()
        assert isinstance(submission, _Chunk)
        if not submission.done:
            return False
        self._in_flight[submission.direction] -= 1
        if submission.error is not None:
            raise submission.error
        return True

    def unpackable_blocks(self, submission: object) -> Int64s:
        self._owner.assert_owner()
        assert isinstance(submission, _Chunk)
        return submission.unpackable

    def elapsed(self, first: object, last: object, before: object | None) -> float:
        self._owner.assert_owner()
        assert isinstance(first, _Chunk)
        assert isinstance(last, _Chunk)
        return last.ended - first.began

    def copying(self, mapping: Mapping) -> tuple[GroupCopying, ...]:
        self._owner.assert_owner()
        return (GroupCopying("cpu", "cpu"),) * mapping.layout.layout_arrays.num_groups

    def shutdown(self) -> None:
        self._owner.assert_owner()
        for chunks in self._queues.values():
            chunks.put(None)
        for thread in self._threads:
            thread.join()

    def _run_stream(self, chunks: queue.SimpleQueue[_Chunk | None]) -> None:
        while (chunk := chunks.get()) is not None:
            self._run_chunk(chunk)

    def _run_chunk(self, chunk: _Chunk) -> None:
        chunk.began = time.perf_counter()
        if self.faults.stall:
            time.sleep(self.faults.stall)
        if chunk.revoked():
            chunk.error = revoked_error()
        elif chunk.fails:
            chunk.error = Failed(
                Code.COPY_FAILED, "this chunk fails because of reference.fail_every"
            )
        else:
            _copy(chunk)
        chunk.ended = time.perf_counter()
        chunk.done = True


def _reopen_memory(kept: Sequence[int], size: int) -> int:
    """Duplicate the descriptor of kept memory. Raises Failed (MAP_FAILED) if its size is wrong."""
    sizes = [os.fstat(descriptor).st_size for descriptor in kept]
    if sizes != [size]:
        raise Failed(
            Code.MAP_FAILED,
            f"the kept memory has files of {sizes} bytes, not one of {size}; allocate new memory",
            sizes,
        )
    return os.dup(kept[0])


def _as_file(allocation: Allocation) -> FdAllocation:
    if isinstance(allocation, FdAllocation):
        return allocation
    raise Refused(
        Code.DEVICE_MISMATCH,
        f"the tensors are on {allocation.device_uuid}, but this daemon has device = cpu; use the "
        "daemon of that GPU",
        allocation.device_uuid,
    )


def _check_fit(nbytes: int) -> None:
    """Raise Refused (BAD_LAYOUT) or Failed (MAP_FAILED) if tensors are too large to be mapped.

    A memfd may be sparse and of any size, so a client could use up the daemon's address space.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE
    if nbytes > memory:
        message = (
            f"the tensors take {format_size(nbytes)}, more than the {format_size(memory)} of "
            "this machine's memory; register fewer blocks"
        )
        raise Refused(Code.BAD_LAYOUT, message, nbytes)
    left = address_space_left() - SPARE_ADDRESS_SPACE
    if nbytes > left:
        message = (
            f"the tensors take {format_size(nbytes)}, but the daemon has only "
            f"{format_size(max(0, left))} of address space left for tensors; raise its LimitAS, "
            "or stop other engines"
        )
        raise Failed(Code.MAP_FAILED, message, nbytes)


def _copy(chunk: _Chunk) -> None:
    """Copy the fragments of a chunk. If memory is missing, the chunk has failed."""
    gpu, host = chunk.gpu, chunk.host
    store = chunk.direction is Direction.STORE
    try:
        if not chunk.packed:
            _copy_fragments(*((gpu, host) if store else (host, gpu)))
        elif store:
            packed, fits = pack_tiles(_read(gpu).reshape(-1, TILE_BYTES))
            _write(packed, host)
            chunk.unpackable = np.flatnonzero(~fits.reshape(chunk.blocks, -1).all(axis=1))
        else:
            _write(unpack_tiles(_read(host).reshape(-1, PACKED_TILE_BYTES)), gpu)
    except OSError as error:
        message = f"the engine's memory cannot be accessed ({error}); register it again"
        chunk.error = Failed(Code.COPY_FAILED, message)


def _read(fragments: Int64s) -> Bytes:
    """The bytes of fragments, one after another."""
    data = np.empty(fragments[:, 1].sum(), np.uint8)
    _copy_fragments(fragments, _cut(data, fragments))
    return data


def _write(data: Bytes, fragments: Int64s) -> None:
    """Write contiguous bytes to fragments."""
    _copy_fragments(_cut(data, fragments), fragments)


def _cut(data: Bytes, fragments: Int64s) -> Int64s:
    """Consecutive parts of `data` with the sizes of fragments."""
    sizes = fragments[:, 1]
    return np.stack((data.ctypes.data + np.cumsum(sizes) - sizes, sizes), axis=1)


def _copy_fragments(src: Int64s, dst: Int64s) -> None:
    for start in range(0, len(dst), IOV_MAX):
        copy_vectors(src[start : start + IOV_MAX], dst[start : start + IOV_MAX])


def _vectors(mapping: Mapping, extent: Extent, pool: int) -> tuple[Int64s, Int64s]:
    """(fragments, 2) on the GPU's side and on the host's: addresses, and sizes in bytes."""
    batch = mapping.layout.copy_batch(extent, mapping.bases, pool)
    sizes = packed_bytes(batch.size) if mapping.layout.packed else batch.size
    return np.stack((batch.gpu, batch.size), axis=1), np.stack((batch.host, sizes), axis=1)
