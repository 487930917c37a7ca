"""Staged copies: whole GPU blocks by DMA, their pages put in place by a kernel on the device.

In host memory a GPU block is one contiguous run, so between the host pool and a staging slot the
link runs at full speed whatever the size of a page; the scatter (load) or gather (store) between
the slot and the tensors happens at the speed of device memory. The kernel gets the block ids and a
table of the group's pages, nothing per page, so the host's work does not grow with the number of
layers.

    load    pool --dma stream--> slot  --event-->  kernel stream: scatter to the tensors
    store   kernel stream: gather from the tensors --> slot  --event-->  dma stream --> pool
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from kvferry.daemon.core.geometry import Fragments, Geometry, Int64s, Run
from kvferry.daemon.engine.cuda.direct import BatchCopy
from kvferry.daemon.engine.cuda.staging import Slot
from kvferry.proto.libcuda import Driver, Event
from kvferry.proto.specs import Direction

THREADS = 256
WARPS = THREADS // 32
MAX_GRID = 1056
VECTORS_PER_UNIT = 256
"""As in kernels.cu: 8 loads of each of 32 lanes."""
IDS = (128, 1000, 8000)
"""How many block ids the variants of a kernel take."""
MAX_BLOCKS = IDS[-1]
VECTORS = (16, 4, 1)
_PIECE = struct.Struct("QQQIII4x")
"""struct Piece of kernels.cu."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """A group's pages as the kernel reads them, in device memory."""

    address: int
    pages: int
    block_bytes: int
    vector: int
    """Bytes that one access may have: 16, 4 or 1, as all addresses allow."""
    units_per_page: int


class Kernels:
    """The gather and scatter kernels, loaded from PTX: the driver compiles it, no compiler does."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        ptx = files("kvferry.daemon.engine.cuda").joinpath("kernels.ptx").read_bytes()
        module = driver.load_module(ptx)
        self._functions = {
            (direction, vector, ids): driver.module_function(module, f"{name}{vector}_{ids}")
            for direction, name in ((Direction.STORE, "gather"), (Direction.LOAD, "scatter"))
            for vector in VECTORS
            for ids in IDS
        }

    def launch(
        self, direction: Direction, table: PageTable, slot: Slot, blocks: Int64s, stream: int
    ) -> None:
        units = blocks.size * table.pages * table.units_per_page
        room = next(ids for ids in IDS if blocks.size <= ids)
        ids = np.empty(room, dtype=np.int32)
        ids[: blocks.size] = blocks
        piece = _PIECE.pack(
            slot.address,
            table.address,
            table.block_bytes,
            blocks.size,
            table.pages,
            table.units_per_page,
        )
        self._driver.launch(
            self._functions[direction, table.vector, room],
            min(MAX_GRID, -(-units // WARPS)),
            THREADS,
            stream,
            np.frombuffer(piece, dtype=np.uint8),
            ids,
        )


class StagedCopy:
    """Enqueues pieces through staging slots; one dma and one kernel stream a direction."""

    def __init__(self, driver: Driver, batch: BatchCopy) -> None:
        self._driver = driver
        self._batch = batch
        self._kernels = Kernels(driver)
        self._dma, self._kernel = (
            {d: driver.create_stream(urgent=d is Direction.LOAD) for d in Direction}
            for _ in range(2)
        )

    def streams(self, direction: Direction) -> tuple[int, int]:
        """Both streams of a direction, the one that a piece begins on first."""
        dma, kernel = self._dma[direction], self._kernel[direction]
        return (dma, kernel) if direction is Direction.LOAD else (kernel, dma)

    def table(self, geometry: Geometry, group: int, bases: Int64s) -> PageTable:
        """Put a group's page table into device memory; whoever asks frees it."""
        refs = geometry.refs[group]
        table = np.empty((refs.pages.size, 4), dtype=np.int64)
        table.T[:] = bases[refs.tensors], refs.strides, refs.pages, refs.offsets
        block_bytes = geometry.group_bytes[group]
        common = math.gcd(block_bytes, int(np.gcd.reduce(table, axis=None)))
        vector = next(width for width in VECTORS if common % width == 0)
        address = self._driver.allocate(table.nbytes)
        self._driver.copy_to_device(address, table)
        units = -(-int(refs.pages.max()) // (vector * VECTORS_PER_UNIT))
        return PageTable(address, refs.pages.size, block_bytes, vector, units)

    def enqueue(
        self, direction: Direction, table: PageTable, slot: Slot, run: Run, pool: int
    ) -> tuple[Event, Event]:
        """Enqueue a piece; returns the events before and behind it."""
        driver = self._driver
        first, second = self.streams(direction)
        blocks = run.gpu_blocks
        begun = driver.record(first)
        packed = self._packed(run, table.block_bytes, slot.address, pool)
        if direction is Direction.LOAD:
            self._batch.enqueue(direction, packed, first)
        else:
            self._kernels.launch(direction, table, slot, blocks, first)
        between = driver.record(first)
        driver.call("cuStreamWaitEvent", second, between.handle, 0)
        if direction is Direction.LOAD:
            self._kernels.launch(direction, table, slot, blocks, second)
        else:
            self._batch.enqueue(direction, packed, second)
        return begun, driver.record(second)

    def _packed(self, run: Run, block_bytes: int, slot: int, pool: int) -> Fragments:
        """The piece between slot and pool: as few fragments as the host blocks' places allow."""
        breaks = np.flatnonzero(np.diff(run.host_offsets) != block_bytes) + 1
        starts = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((starts, [run.host_offsets.size])))
        return Fragments(
            starts * block_bytes + slot, run.host_offsets[starts] + pool, counts * block_bytes
        )
