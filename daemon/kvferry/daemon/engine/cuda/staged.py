"""Staged copies: DMA copies whole GPU blocks, and a kernel scatters or gathers their pages.

In host memory a GPU block is contiguous, so between the host pool and a staging slot the link runs
at full speed for every page size. The scatter (load) or gather (store) between the slot and the
tensors runs at the speed of device memory. The kernel gets the block ids and a table of the group's
pages, so the work of the CPU does not grow with the number of layers.

    load    pool --dma stream--> slot  --event-->  kernel stream: scatter to the tensors
    store   kernel stream: gather from the tensors --> slot  --event-->  dma stream --> pool

Packed layouts have other kernels, which pack and unpack the pages on the way. So slots, the link
and the pool have packed bytes only.

`enqueue` accepts a chunk and starts the DMA of a load. `flush` launches the kernels that are due
(kernel_batching.py), and enqueues the DMA of store chunks whose gather was launched. Called by the
device worker.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files

import numpy as np

from kvferry.cuda.driver import Driver, Event, Parameters
from kvferry.daemon.core.block_ids import first_duplicate, largest
from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s
from kvferry.daemon.engine.base import revoked_error
from kvferry.daemon.engine.cuda.chunk import Chunk, PageTable, Stage, fail_chunks, is_over
from kvferry.daemon.engine.cuda.coalescing import coalesce
from kvferry.daemon.engine.cuda.dma import Dma
from kvferry.daemon.engine.cuda.kernel_batching import KernelBatching
from kvferry.daemon.engine.cuda.staging import Slot, Staging
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.packing import TILE_BYTES
from kvferry.proto.specs import Direction

THREADS = 256
WARPS = THREADS // 32
# Maximum of thread blocks of a kernel. Each ends soon, so that those of a load, which has priority,
# do not wait for those of a store.
MAX_GRID = 8448
# As in kernels.cu: 8 accesses by each of 32 threads.
VECTORS_PER_UNIT = 256
# Bytes of the buffer for each mark of UnpackableMarks, as in kernels.cu.
MARK = 1024
# Maximum of block ids of each variant of a kernel.
IDS = (128, 1000, 8000)
MAX_BLOCKS = IDS[-1]
VECTORS = (16, 4, 1)
# In place of a vector: the kernels that pack and unpack.
PACKED = 0
# Bytes of gathered stores whose DMA is enqueued in one flush. The driver takes 1.5 to 3 us per
# fragment, and a load that arrives meanwhile waits. The link copies them in 0.6 ms, and flush is
# called every 0.1 ms.
WRITE_BACK = 32 << 20
# struct Chunk of kernels.cu.
_KERNEL_ARGUMENT = struct.Struct("QQQIII4xQQ")
# Tensors of packed layouts begin at multiples of this, and so do their rows.
PACKED_ALIGNMENT = 16


class Kernels:
    """The kernels, loaded as PTX, which the driver compiles.

    buffer: address of the staging buffer. marks: for the blocks that cannot be packed.
    """

    def __init__(self, driver: Driver, buffer: int, marks: UnpackableMarks) -> None:
        self._driver, self._buffer, self._marks = driver, buffer, marks
        ptx = files("kvferry.daemon.engine.cuda").joinpath("kernels.ptx").read_bytes()
        module = driver.load_module(ptx)
        names = {
            (direction, vector): f"{name}{vector}"
            for direction, name in ((Direction.STORE, "gather"), (Direction.LOAD, "scatter"))
            for vector in VECTORS
        }
        names |= {(Direction.STORE, PACKED): "pack", (Direction.LOAD, PACKED): "unpack"}
        self._functions = {
            (*kind, ids): driver.module_function(module, f"{name}_{ids}")
            for kind, name in names.items()
            for ids in IDS
        }
        self._argument = bytearray(_KERNEL_ARGUMENT.size)
        argument = np.frombuffer(self._argument, dtype=np.uint8)
        self._parameters = [(ids, Parameters(argument, np.empty(ids, np.int32))) for ids in IDS]

    def launch(
        self, direction: Direction, table: PageTable, stage: int, blocks: Int64s, stream: int
    ) -> None:
        """Gather or pack (store), scatter or unpack (load) blocks between the tensors and a slot.

        stage: address of the slot, in which the blocks are contiguous. blocks: (n,) block ids, at
        most MAX_BLOCKS. Raises Failed (DRIVER).
        """
        units = blocks.size * table.pages * table.units_per_page
        ids, parameters = next(each for each in self._parameters if blocks.size <= each[0])
        parameters.arrays[1][: blocks.size] = blocks
        _KERNEL_ARGUMENT.pack_into(
            self._argument,
            0,
            stage,
            table.address,
            table.block_bytes,
            blocks.size,
            table.pages,
            table.units_per_page,
            self._marks.device_address,
            stage - self._buffer,
        )
        self._driver.launch(
            self._functions[direction, table.vector, ids],
            min(MAX_GRID, -(-units // WARPS)),
            THREADS,
            stream,
            parameters,
        )


class UnpackableMarks:
    """Bytes in host memory that the kernel sets for blocks that cannot be packed.

    Such blocks are rare, so kernels write few bytes over the link. Each block of the buffer has a
    byte of its own, because it has more than MARK bytes. buffer_bytes: of the staging buffer.
    """

    def __init__(self, driver: Driver, buffer_bytes: int) -> None:
        memory = mmap.mmap(-1, buffer_bytes // MARK + 1)
        self._driver, self._marks = driver, np.frombuffer(memory, dtype=np.uint8)
        self._address = self._marks.ctypes.data
        driver.register_host(self._address, len(memory), mapped=True)
        self.device_address = driver.host_device_pointer(self._address)

    def take(self, offsets: Int64s) -> Int64s:
        """Which of the blocks at these offsets in the buffer are marked. Removes the marks."""
        places = offsets // MARK
        found = np.flatnonzero(self._marks[places])
        self._marks[places[found]] = 0
        return found

    def close(self) -> None:
        """Release the memory. No kernel may be in flight."""
        self._driver.call("cuMemHostUnregister", self._address)


class StagedCopy:
    """Enqueues staged chunks, on a DMA stream and a kernel stream per direction.

    write_back_bytes: see WRITE_BACK.
    """

    def __init__(
        self, driver: Driver, dma: Dma, staging: Staging, write_back_bytes: int = WRITE_BACK
    ) -> None:
        self._driver = driver
        self._write_back_bytes = write_back_bytes
        self._dma = dma
        self._buffer = staging.address
        self._marks = UnpackableMarks(driver, staging.nbytes)
        self._kernels = Kernels(driver, staging.address, self._marks)
        self._dma_streams, self._kernel_streams = (
            {d: driver.create_stream(urgent=d is Direction.LOAD) for d in Direction}
            for _ in range(2)
        )
        self._batching = {d: KernelBatching(d, partial(is_over, driver)) for d in Direction}
        # Store chunks whose gather was launched and whose DMA was not enqueued, and the event after
        # the gather.
        self._gathered: deque[tuple[Chunk, Event]] = deque()

    def close(self) -> None:
        """Release host memory. No chunk may be in flight."""
        self._marks.close()

    def streams(self, direction: Direction) -> tuple[int, int]:
        """Both streams of a direction; a chunk begins on the first."""
        dma, kernel = self._dma_streams[direction], self._kernel_streams[direction]
        return (dma, kernel) if direction is Direction.LOAD else (kernel, dma)

    def table(self, layout: BlockLayout, group: int, bases: Int64s) -> PageTable:
        """Write a group's page table to device memory. The caller frees it. Raises Failed.

        bases: (tensors,) the address of each canonical tensor.
        """
        refs = layout.refs[group]
        table = np.empty((refs.pages.size, 4), dtype=np.int64)
        table.T[:] = bases[refs.tensors], refs.strides, refs.pages, refs.offsets
        block_bytes = layout.group_bytes[group]
        common = math.gcd(block_bytes, int(np.gcd.reduce(table, axis=None)))
        vector = next(width for width in VECTORS if common % width == 0)
        unit = vector * VECTORS_PER_UNIT
        if layout.packed:
            if vector < PACKED_ALIGNMENT:
                message = (
                    f"packed tensors must be aligned to {PACKED_ALIGNMENT} bytes, with their rows; "
                    "register them without `packed`"
                )
                raise Refused(Code.BAD_LAYOUT, message, common)
            vector, unit = PACKED, TILE_BYTES
        address = self._driver.allocate(table.nbytes)
        self._driver.copy_to_device(address, table)
        units = -(-int(refs.pages.max()) // unit)
        return PageTable(address, refs.pages.size, block_bytes, vector, units)

    def unpackable_blocks(self, stage: Stage) -> Int64s:
        """The positions of a stored chunk's blocks that could not be packed. Called once, when it
        is done, while it has its slot."""
        at = stage.slot.address - self._buffer
        return self._marks.take(at + np.arange(stage.blocks.size) * stage.table.block_bytes)

    def ahead(self) -> int:
        """Units of the buffer in store chunks whose kernels have not started."""
        return self._batching[Direction.STORE].ahead

    def enqueue(
        self,
        direction: Direction,
        table: PageTable,
        slot: Slot,
        extent: Extent,
        revoked: Callable[[], bool],
    ) -> Chunk:
        """Enqueue a chunk whose blocks fit into `slot`; start the DMA of a load. Raises Failed."""
        batch = coalesce(extent.host_offsets, table.block_bytes, slot.address, self._dma.pool)
        chunk = Chunk(
            direction,
            extent.gpu_blocks.size * table.block_bytes,
            Stage(slot, table, extent.gpu_blocks, batch),
            revoked=revoked,
        )
        if direction is Direction.LOAD:
            stream = self._dma_streams[direction]
            chunk.begun = None if extent.at else self._driver.record(stream)
            self._dma.enqueue(direction, batch, stream)
            chunk.moved = self._driver.record(stream)
        self._batching[direction].add(chunk)
        return chunk

    def flush(self, direction: Direction, more: bool) -> None:
        """Launch the kernels that are due, and write back a limited number of gathered bytes.

        more: other chunks wait for units of the buffer. If the device refuses a chunk, its `error`
        is set.
        """
        chunks = self._batching[direction].due(more)
        if revoked := [chunk for chunk in chunks if chunk.revoked()]:
            fail_chunks(self._driver, revoked, revoked_error())
            chunks = [chunk for chunk in chunks if chunk.error is None]
        if chunks:
            try:
                self._launch(direction, chunks)
            except KVFerryError as error:
                fail_chunks(self._driver, chunks, error)
        if direction is Direction.STORE:
            self._write_back(self._write_back_bytes)

    def finish(self, direction: Direction) -> None:
        """Flush all chunks, because the next chunk is not staged."""
        self.flush(direction, more=False)
        if direction is Direction.STORE:
            while self._gathered:
                self._write_back(self._write_back_bytes)

    def _launch(self, direction: Direction, chunks: list[Chunk]) -> None:
        driver, batching = self._driver, self._batching[direction]
        kernel, store = self._kernel_streams[direction], direction is Direction.STORE
        if not store:
            moved = chunks[-1].moved
            assert moved is not None
            driver.call("cuStreamWaitEvent", kernel, moved.handle, 0)
        joins = batching.awaited
        begun = driver.record(kernel) if store or not joins else None
        for stage, blocks in _launches(direction, [chunk.stage for chunk in chunks if chunk.stage]):
            self._kernels.launch(direction, stage.table, stage.slot.address, blocks, kernel)
        done = driver.record(kernel)
        batching.launched(chunks, None if joins else begun, done)
        for chunk in chunks:
            if begun is not None and store:
                chunk.begun = begun
                self._gathered.append((chunk, done))
            else:
                chunk.done = done

    def _write_back(self, nbytes: int) -> None:
        """Enqueue the DMA of gathered store chunks to the pool; at least one, if there is any."""
        stream = self._dma_streams[Direction.STORE]
        while self._gathered and nbytes > 0:
            chunk, gathered = self._gathered[0]
            assert chunk.stage is not None
            try:
                self._driver.call("cuStreamWaitEvent", stream, gathered.handle, 0)
                self._dma.enqueue(Direction.STORE, chunk.stage.batch, stream)
                chunk.done = chunk.moved = self._driver.record(stream)
            except KVFerryError as error:
                fail_chunks(self._driver, [chunk for chunk, _ in self._gathered], error)
                self._gathered.clear()
                return
            self._gathered.popleft()
            nbytes -= chunk.nbytes


def _launches(direction: Direction, stages: list[Stage]) -> Iterator[tuple[Stage, Int64s]]:
    """Group stages into launches; yield the first stage and all block ids of each launch.

    The stages of a launch have one page table and adjacent slots. If a block is loaded twice, its
    stages are in different launches. Within one stage all blocks differ.
    """
    group: list[Stage] = []
    all_unique = direction is Direction.STORE or len(stages) == 1 or _all_differ(stages)
    for stage in stages:
        if group and not (
            _continues(group, stage) and (all_unique or _all_differ([*group, stage]))
        ):
            yield group[0], _blocks(group)
            group = []
        group.append(stage)
    if group:
        yield group[0], _blocks(group)


def _continues(group: list[Stage], stage: Stage) -> bool:
    """Whether a stage can be launched together with these."""
    blocks = sum([before.blocks.size for before in group])
    return (
        stage.table is group[0].table
        and stage.slot.address == group[0].slot.address + blocks * stage.table.block_bytes
        and blocks + stage.blocks.size <= MAX_BLOCKS
    )


def _all_differ(stages: list[Stage]) -> bool:
    """Whether no block id occurs twice. Equal ids of different tables count as the same block."""
    blocks = _blocks(stages)
    return first_duplicate(blocks, largest(blocks) + 1) is None


def _blocks(group: list[Stage]) -> Int64s:
    return group[0].blocks if len(group) == 1 else np.concatenate([s.blocks for s in group])
