"""The engine of machines without a GPU: real bytes in shared memory, copied by the CPU.

It is the plain model of what an engine does (one thread a direction stands for a stream, one
memmove a fragment for the copy engine; a few pages with nothing before them are copied at once) and
it can be told to misbehave: `Faults.stall` holds every chunk back, `Faults.fail_every` fails each
n-th of a registration.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s
from kvferry.daemon.engine.base import (
    NO_ROOM,
    ChunkBudget,
    ChunkRequest,
    Mapping,
    OwnerThread,
    Shared,
    packed_locations,
    revoked_error,
)
from kvferry.daemon.memory.shared_memory import IOV_MAX, PAGE, MappedFile, copy_vectors
from kvferry.proto.errors import Code, Failed, KVFerryError, Refused
from kvferry.proto.memory import Allocation, FdAllocation, Location
from kvferry.proto.process import SPARE_ADDRESS_SPACE, address_space_left
from kvferry.proto.specs import Direction
from kvferry.proto.status import DeviceInfo, GroupCopying
from kvferry.shm.memfd import sealed_memfd

CHUNK_BYTES = 8 << 20
# Chunks in flight in one direction: the one that is being copied, and those behind it.
MAX_CHUNKS = 8
# A copy of so few bytes takes less time than passing it to another thread.
AT_ONCE = 64 << 10
_NONE = np.empty((0, 2), dtype=np.int64)


@dataclass(slots=True)
class Faults:
    """How the engine misbehaves. stall: seconds before each chunk; fail_every: 0 is never."""

    stall: float = 0.0
    fail_every: int = 0


@dataclass(slots=True, eq=False)
class _Chunk:
    direction: Direction
    gpu: Int64s
    host: Int64s
    """(n, 2) both: where the fragments lie there, and how long they are."""
    fails: bool
    revoked: Callable[[], bool] = lambda: False
    done: bool = False
    began: float = 0.0
    ended: float = 0.0
    error: KVFerryError | None = None


class ReferenceEngine:
    """at_once_bytes: see AT_ONCE."""

    info = DeviceInfo("cpu", "cpu", "host memory")
    numa_node: int | None = None

    def __init__(self, faults: Faults | None = None, at_once_bytes: int = AT_ONCE) -> None:
        self._at_once_bytes = at_once_bytes
        self.faults = faults or Faults()
        self._owner = OwnerThread()
        self._pool = 0
        self._chunks: defaultdict[int, Iterator[int]] = defaultdict(lambda: count(1))
        """Numbers for the chunks of each mapping."""
        self._in_flight = dict.fromkeys(Direction, 0)
        self._last = {d: _Chunk(d, _NONE, _NONE, False, done=True) for d in Direction}
        """The newest chunk each way."""
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

    def pin(self, address: int, nbytes: int) -> None:
        """Nothing to do: the CPU copies from pages that may move."""

    def unpin(self, address: int) -> None:
        """Nothing to do."""

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

    def allocate_tensors(self, layout: BlockLayout, kept: Sequence[int] = ()) -> Shared:
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
        return Shared(mapping, (allocation,), locations, (descriptor,))

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
        chunk = _Chunk(direction, gpu, host, fails, mapping.revoked)
        self._in_flight[direction] += 1
        before, self._last[direction] = self._last[direction], chunk
        if (
            before.done
            and not self.faults.stall
            and mapping.layout.count_bytes((extent,)) <= self._at_once_bytes
        ):
            self._run_chunk(chunk)
        else:
            self._queues[direction].put(chunk)
        return chunk

    def flush(self, direction: Direction, more: bool) -> None:
        """Nothing to do: a chunk is started when it is submitted."""
        self._owner.assert_owner()

    def poll(self, ticket: object) -> bool:
        self._owner.assert_owner()
        assert isinstance(ticket, _Chunk)
        if not ticket.done:
            return False
        self._in_flight[ticket.direction] -= 1
        if ticket.error is not None:
            raise ticket.error
        return True

    def elapsed(self, first: object, last: object, before: object | None) -> float:
        self._owner.assert_owner()
        assert isinstance(first, _Chunk)
        assert isinstance(last, _Chunk)
        return last.ended - first.began

    def copying(self, mapping: Mapping) -> tuple[GroupCopying, ...]:
        self._owner.assert_owner()
        return tuple(GroupCopying("cpu", "cpu") for _ in mapping.layout.refs)

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
            chunk.error = Failed(Code.COPY_FAILED, "the reference engine was told to fail")
        else:
            _copy(chunk)
        chunk.ended = time.perf_counter()
        chunk.done = True


def _reopen_memory(kept: Sequence[int], size: int) -> int:
    """A descriptor of our own of memory made before; Failed (MAP_FAILED) where it is another."""
    sizes = [os.fstat(descriptor).st_size for descriptor in kept]
    if sizes != [size]:
        raise Failed(
            Code.MAP_FAILED,
            f"the memory kept is not one file of {size} bytes: allocate anew",
            sizes,
        )
    return os.dup(kept[0])


def _as_file(allocation: Allocation) -> FdAllocation:
    if isinstance(allocation, FdAllocation):
        return allocation
    raise Refused(
        Code.DEVICE_MISMATCH,
        "this daemon serves tensors in host memory (device = cpu)",
        allocation.device_uuid,
    )


def _check_fit(nbytes: int) -> None:
    """Raise Refused (BAD_LAYOUT) or Failed (MAP_FAILED) for tensors that may not be mapped.

    A memfd may be sparse and of any size, so an engine without any memory could take all addresses.
    """
    most = os.sysconf("SC_PHYS_PAGES") * PAGE
    if nbytes > most:
        message = f"the tensors take {nbytes} bytes, more than the {most} of this machine's memory"
        raise Refused(Code.BAD_LAYOUT, f"{message}: register fewer blocks", nbytes)
    left = address_space_left() - SPARE_ADDRESS_SPACE
    if nbytes > left:
        message = f"the tensors take {nbytes} bytes, and the daemon has {max(0, left)} bytes of "
        message += "address space left for tensors: raise its LimitAS, or have other engines leave"
        raise Failed(Code.MAP_FAILED, message, nbytes)


def _copy(chunk: _Chunk) -> None:
    """Move a chunk's fragments, or as many as there is memory for: then the chunk has failed."""
    gpu, host = chunk.gpu, chunk.host
    dst, src = (host, gpu) if chunk.direction is Direction.STORE else (gpu, host)
    try:
        for start in range(0, len(dst), IOV_MAX):
            copy_vectors(src[start : start + IOV_MAX], dst[start : start + IOV_MAX])
    except OSError as error:
        message = f"memory of the engine is not there any more: {error}"
        chunk.error = Failed(Code.COPY_FAILED, message)


def _vectors(mapping: Mapping, extent: Extent, pool: int) -> tuple[Int64s, Int64s]:
    """(n, 2) both: where the fragments of a run lie on either side, and how long they are."""
    batch = mapping.layout.copy_batch(extent, mapping.bases, pool)
    return np.stack((batch.gpu, batch.size), axis=1), np.stack((batch.host, batch.size), axis=1)
