"""The CUDA engine: maps tensors of two kinds, and copies chunks directly or staged.

Tensors that an engine has allocated are mapped by CUDA IPC. Tensors that a daemon allocates are
device memory with a file descriptor (cuda/virtual_memory.py). That memory exists while a descriptor
is open, so an engine can pass it to the next daemon.

Each chunk is enqueued between two events, and `poll` queries the second one. The device time of a
job is the time from the first event of its first chunk to the second event of its last chunk.
Everything runs in the device's primary context. Threads: see base.CopyEngine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.cuda.driver import MIN_DRIVER, TOO_OLD, Driver, driver
from kvferry.cuda.virtual_memory import DeviceMemory, VirtualMemory
from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s
from kvferry.daemon.engine.base import (
    NO_ROOM,
    AllocatedTensors,
    ChunkBudget,
    ChunkRequest,
    Mapping,
    OwnerThread,
    packed_locations,
)
from kvferry.daemon.engine.cuda.calibration import calibrate, forced, modes_from
from kvferry.daemon.engine.cuda.chunk import Chunk, PageTable
from kvferry.daemon.engine.cuda.direct import CHUNK, MAX_IN_FLIGHT, DirectCopy
from kvferry.daemon.engine.cuda.dma import FEW, Dma
from kvferry.daemon.engine.cuda.staged import MAX_BLOCKS, PACKED, WRITE_BACK, StagedCopy
from kvferry.daemon.engine.cuda.staging import Staging
from kvferry.daemon.memory.numa import node_of
from kvferry.proto.errors import Code, Failed, KVFerryError, Refused
from kvferry.proto.memory import Allocation, CudaAllocation, FdAllocation, Location
from kvferry.proto.runtime_directory import is_device
from kvferry.proto.sizes import format_size
from kvferry.proto.specs import Direction
from kvferry.proto.status import CopyStatus, DeviceInfo, GroupCopying

# Bytes of a chunk if nothing is in flight. The link waits for it, so it is small: its copy takes as
# long as submitting the next chunk.
FIRST_CHUNK = 8 << 20
MAX_CHUNKS = 32
MIN_STAGING = 64 << 20


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Options of the CUDA engine.

    mode: "auto", "direct" or "staged". staging_bytes: size of the staging buffer. chunk_bytes: size
    of the chunks of the host pool. Their defaults explain the other options.
    """

    mode: str
    staging_bytes: int
    chunk_bytes: int
    min_staging_bytes: int = MIN_STAGING
    write_back_bytes: int = WRITE_BACK
    few_copies: int = FEW


class CudaEngine:
    """The engine of an NVIDIA GPU.

    device: index ("0", as CUDA numbers the visible GPUs), or UUID of a GPU or MIG instance, which
    may be shortened.

    Raises Refused (NO_DEVICE, BAD_CONFIG).
    """

    def __init__(self, device: str, options: CudaOptions) -> None:
        if device.upper().startswith("MIG-"):  # CUDA shows a process one instance: else the first
            os.environ["CUDA_VISIBLE_DEVICES"] = f"MIG-{device[4:]}"
        self._driver = driver()
        version = self._driver.version
        if version < MIN_DRIVER:
            installed = f"CUDA {version // 1000}.{version % 1000 // 10}"
            raise Refused(Code.NO_DEVICE, TOO_OLD, installed)
        if options.staging_bytes < (least := options.min_staging_bytes):
            given = format_size(options.staging_bytes)
            message = f"copy.staging is {given}; set at least {format_size(least)}"
            raise Refused(Code.BAD_CONFIG, message, options.staging_bytes)
        self._ordinal = ordinal = _find_device(self._driver, device)
        self._memory = VirtualMemory(self._driver, ordinal)
        self._options = options
        self.info = DeviceInfo(
            "cuda",
            self._driver.device_uuid(ordinal),
            self._driver.device_name(ordinal),
            options.staging_bytes,
        )
        self.numa_node = node_of(self._driver.pci_address(ordinal))
        self._context = self._driver.retain_context(ordinal)
        self._owner = OwnerThread()
        self._in_flight = dict.fromkeys(Direction, 0)
        self._chunks = dict.fromkeys(Direction, 0)
        self._staged_chunks = dict.fromkeys(Direction, 0)
        self._last: dict[Direction, Chunk] = {}

    def attach(self, pool_address: int) -> CopyStatus:
        self._owner.bind()
        driver = self._driver
        driver.call("cuCtxSetCurrent", self._context)
        options = self._options
        dma = Dma(driver, pool_address, options.chunk_bytes, options.few_copies)
        self._staging = Staging(driver, options.staging_bytes)
        self._direct = DirectCopy(driver, dma)
        self._staged = StagedCopy(driver, dma, self._staging, options.write_back_bytes)
        status = calibrate(driver, self._staging.address, options.staging_bytes)
        if options.mode != "auto":
            status = forced(options.mode, status)
        self._modes = modes_from(status, self._staging.chunk_bytes)
        return status

    def pin(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        self._driver.call("cuCtxSetCurrent", self._context)
        try:
            self._driver.register_host(address, nbytes, writable=writable)
        except Failed as error:
            raise Failed(
                Code.POOL_TOO_LARGE,
                f"{format_size(nbytes)} of host memory cannot be pinned ({error.value}); "
                "reduce pool.size",
                nbytes,
            ) from error

    def unpin(self, address: int) -> None:
        self._driver.call("cuCtxSetCurrent", self._context)
        self._driver.call("cuMemHostUnregister", address)

    def map_tensors(
        self,
        layout: BlockLayout,
        allocations: Sequence[Allocation],
        locations: Sequence[Location],
        descriptors: Sequence[int],
    ) -> Mapping:
        self._owner.assert_owner()
        opened: list[DeviceMemory | _Opened] = []
        remaining = iter(descriptors)
        try:
            for allocation in allocations:
                opened.append(self._open_allocation(allocation, remaining))
            bases = [opened[place.allocation].address + place.offset for place in locations]
            return self._mapping(layout, np.array(bases, dtype=np.int64), opened)
        except BaseException:
            self._close_handles(opened)
            raise

    def allocate_tensors(self, layout: BlockLayout, kept: Sequence[int] = ()) -> AllocatedTensors:
        self._owner.assert_owner()
        offsets, size = packed_locations(layout.layout_arrays)
        size = self._memory.whole_granules(size)
        if kept:
            memory, descriptor = self._reopen_memory(kept, size)
        else:
            memory, descriptor = self._memory.create_memory(size)
        try:
            bases = np.array(offsets, dtype=np.int64) + memory.address
            mapping = self._mapping(layout, bases, [memory])
        except BaseException:
            memory.close()
            os.close(descriptor)
            raise
        locations = tuple(Location(0, offset) for offset in offsets)
        return AllocatedTensors(mapping, (FdAllocation(0, size),), locations, (descriptor,))

    def unmap_tensors(self, mapping: Mapping) -> None:
        self._owner.assert_owner()
        self._close_handles(mapping.handles)

    def chunk_budget(
        self, direction: Direction, mapping: Mapping, request: ChunkRequest
    ) -> ChunkBudget:
        self._owner.assert_owner()
        if self._chunks[direction] >= MAX_CHUNKS:
            return NO_ROOM
        idle = not self._chunks[direction]
        if self._modes.is_direct(direction, mapping.layout, request.group):
            if self._in_flight[direction] >= MAX_IN_FLIGHT:
                return NO_ROOM
            return ChunkBudget(FIRST_CHUNK if idle else CHUNK)
        block_bytes = mapping.layout.group_bytes[request.group]
        ahead = self._staged.ahead() if direction is Direction.STORE else 0
        nbytes = self._staging.max_slot_bytes(direction, request, block_bytes, ahead)
        if idle and direction is Direction.LOAD:  # the first chunk of a store is launched alone
            nbytes = min(nbytes, FIRST_CHUNK)
        return ChunkBudget(nbytes, MAX_BLOCKS)

    def submit(self, direction: Direction, mapping: Mapping, extent: Extent) -> Chunk:
        self._owner.assert_owner()
        if self._modes.is_direct(direction, mapping.layout, extent.group):
            chunk = self._submit_direct(direction, mapping, extent)
        else:
            chunk = self._submit_staged(direction, mapping, extent)
        self._last[direction] = chunk
        self._in_flight[direction] += chunk.nbytes
        self._chunks[direction] += 1
        return chunk

    def flush(self, direction: Direction, more: bool) -> None:
        self._owner.assert_owner()
        if self._staged_chunks[direction]:
            self._staged.flush(direction, more)

    def poll(self, submission: object) -> bool:
        self._owner.assert_owner()
        assert isinstance(submission, Chunk)
        chunk = submission
        try:
            if chunk.error is not None:
                raise chunk.error
            done = chunk.done is not None and self._driver.reached(chunk.done)
        except KVFerryError:
            self._remove_chunk(chunk)
            raise
        if done:
            if chunk.stage is not None and chunk.stage.table.vector == PACKED:
                chunk.unpackable = self._staged.unpackable_blocks(chunk.stage)
            self._remove_chunk(chunk)
        return done

    def unpackable_blocks(self, submission: object) -> Int64s:
        self._owner.assert_owner()
        assert isinstance(submission, Chunk)
        return submission.unpackable

    def elapsed(self, first: object, last: object, before: object | None) -> float:
        """As base.CopyEngine. If more chunks follow, `last` ends with its copies over the link."""
        self._owner.assert_owner()
        assert isinstance(first, Chunk)
        assert isinstance(last, Chunk)
        end = last.done if self._last[last.direction] is last else last.moved
        if first.begun is None or end is None:
            return 0.0
        seconds = self._driver.elapsed_seconds(first.begun, end)
        if isinstance(before, Chunk) and before.moved is not None:
            seconds = min(seconds, self._driver.elapsed_seconds(before.moved, end))
        return max(0.0, seconds)

    def copying(self, mapping: Mapping) -> tuple[GroupCopying, ...]:
        self._owner.assert_owner()
        groups = range(mapping.layout.layout_arrays.num_groups)
        return tuple(self._modes.modes_of(mapping.layout, group) for group in groups)

    def shutdown(self) -> None:
        self._owner.assert_owner()
        self._driver.call("cuCtxSynchronize")
        self._staged.close()

    def _submit_direct(self, direction: Direction, mapping: Mapping, extent: Extent) -> Chunk:
        nbytes = extent.gpu_blocks.size * mapping.layout.group_bytes[extent.group]
        if self._staged_chunks[direction]:
            self._staged.finish(direction)
        try:
            self._keep_order(direction, [self._direct.streams[direction]], staged=False)
            begun, done = self._direct.enqueue(direction, mapping, extent)
        except KVFerryError:
            self._driver.call("cuCtxSynchronize")
            raise
        return Chunk(direction, nbytes, begun=begun, moved=done, done=done)

    def _submit_staged(self, direction: Direction, mapping: Mapping, extent: Extent) -> Chunk:
        table = _table(mapping, extent.group)
        idle = not self._chunks[direction]
        slot = self._staging.take_slot(direction, extent.gpu_blocks.size * table.block_bytes)
        try:
            self._keep_order(direction, self._staged.streams(direction), staged=True)
            chunk = self._staged.enqueue(direction, table, slot, extent, mapping.revoked)
        except KVFerryError:
            self._driver.call("cuCtxSynchronize")
            self._staging.free_slot(slot)
            raise
        self._staged_chunks[direction] += 1
        if idle and direction is Direction.STORE:  # the link is idle until its kernel has run
            self._staged.flush(direction, more=True)
        return chunk

    def _keep_order(self, direction: Direction, streams: Sequence[int], staged: bool) -> None:
        """Let streams wait for the last chunk, if it was copied in the other mode.

        Chunks of one mode share streams and are in order already.
        """
        last = self._last.get(direction)
        if last is None or (last.stage is not None) == staged or last.done is None:
            return
        for stream in streams:
            self._driver.call("cuStreamWaitEvent", stream, last.done.handle, 0)

    def _remove_chunk(self, chunk: Chunk) -> None:
        self._in_flight[chunk.direction] -= chunk.nbytes
        self._chunks[chunk.direction] -= 1
        if chunk.stage is not None:
            self._staged_chunks[chunk.direction] -= 1
            self._staging.free_slot(chunk.stage.slot)

    def _mapping(self, layout: BlockLayout, bases: Int64s, handles: Sequence[object]) -> Mapping:
        """A mapping whose handles are `handles`, then a page table per group and section."""
        tables: list[PageTable] = []
        try:
            self._modes.check_fit(layout)
            for group in range(len(layout.refs)):
                tables.append(self._staged.table(layout, group, bases))
        except BaseException:
            self._close_handles(tables)
            raise
        return Mapping(layout, bases, [*handles, *tables])

    def _reopen_memory(self, kept: Sequence[int], size: int) -> tuple[DeviceMemory, int]:
        """Map kept memory and duplicate its descriptor. Raises Failed (MAP_FAILED)."""
        if len(kept) != 1:
            message = f"{len(kept)} descriptors are kept for this engine, not one"
            raise Failed(Code.MAP_FAILED, message, len(kept))
        descriptor = os.dup(kept[0])
        try:
            return self._memory.import_memory(descriptor, size), descriptor
        except KVFerryError as error:
            os.close(descriptor)
            raise Failed(Code.MAP_FAILED, error.message, error.value) from error

    def _open_allocation(
        self, allocation: Allocation, descriptors: Iterator[int]
    ) -> DeviceMemory | _Opened:
        if isinstance(allocation, FdAllocation):
            return self._memory.import_memory(next(descriptors), allocation.size)
        return _Opened(self._open_handle(allocation))

    def _open_handle(self, allocation: CudaAllocation) -> int:
        if allocation.device_uuid != self.info.uuid:
            raise Refused(
                Code.DEVICE_MISMATCH,
                f"the tensors are on {allocation.device_uuid}, but this daemon serves "
                f"{self.info.uuid}; use the daemon of their GPU",
                allocation.device_uuid,
            )
        try:
            pointer = self._driver.ipc_open(allocation.handle)
        except Failed as error:
            raise Failed(
                Code.MAP_FAILED,
                f"the GPU memory cannot be mapped ({error.value}); register it in the process "
                "that allocated it",
                error.value,
            ) from error
        _, size = self._driver.address_range(pointer)
        if size < allocation.size:
            self._driver.call("cuIpcCloseMemHandle", pointer)
            message = f"the allocation has {size} bytes, not {allocation.size}; give its real size"
            raise Refused(Code.BAD_LAYOUT, message, size)
        return pointer

    def _close_handles(self, handles: Sequence[object]) -> None:
        for handle in handles:
            match handle:
                case DeviceMemory():
                    handle.close()
                case _Opened(address):
                    self._driver.call("cuIpcCloseMemHandle", address)
                case PageTable(address=address):
                    self._driver.call("cuMemFree_v2", address)


@dataclass(frozen=True, slots=True)
class _Opened:
    """Device memory of another process, mapped by CUDA IPC."""

    address: int


def _table(mapping: Mapping, group: int) -> PageTable:
    table = mapping.handles[group - len(mapping.layout.refs)]
    assert isinstance(table, PageTable)
    return table


def _find_device(driver: Driver, wanted: str) -> int:
    count = driver.device_count()
    uuids = [driver.device_uuid(ordinal) for ordinal in range(count)]
    found = [ordinal for ordinal, uuid in enumerate(uuids) if is_device(wanted, uuid)]
    if len(found) > 1:
        several = ", ".join(uuids[ordinal] for ordinal in found)
        message = f"device {wanted!r} is the beginning of {several}; write more of the UUID"
        raise Refused(Code.NO_DEVICE, message, wanted)
    if found:
        return found[0]
    if wanted.isdecimal() and int(wanted) < count:
        return int(wanted)
    raise Refused(
        Code.NO_DEVICE,
        f'unknown device {wanted!r}; use "cpu", an index below {count}, or a UUID of '
        f"{', '.join(uuids) or 'no GPU'}",
        wanted,
    )
