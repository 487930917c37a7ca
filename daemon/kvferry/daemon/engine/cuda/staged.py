"""Staged copies: whole GPU blocks by DMA, their pages put in place by a kernel on the device.

In host memory a GPU block is one contiguous run, so between the host pool and a staging slot the
link runs at full speed whatever the size of a page; the scatter (load) or gather (store) between
the slot and the tensors happens at the speed of device memory. The kernel gets the block ids and a
table of the group's pages, nothing per page, so the host's work does not grow with the number of
layers.

    load    pool --dma stream--> slot  --event-->  kernel stream: scatter to the tensors
    store   kernel stream: gather from the tensors --> slot  --event-->  dma stream --> pool

`enqueue` takes a piece and starts a load's DMA; `push` launches the kernels of those whose turn it
is (turns.py), and enqueues the DMA of what was gathered (drain.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import partial
from importlib.resources import files

import numpy as np

from kvferry.cuda.driver import Driver, Parameters
from kvferry.daemon.core.layout import BlockLayout, Extent, Int64s, first_again, largest
from kvferry.daemon.engine.cuda.drain import Drain
from kvferry.daemon.engine.cuda.link import Link, Ruler
from kvferry.daemon.engine.cuda.packing import Packing
from kvferry.daemon.engine.cuda.piece import PageTable, Piece, Stage, fail, over
from kvferry.daemon.engine.cuda.staging import LARGE_PIECE, PIECE, Slot
from kvferry.daemon.engine.cuda.turns import Turns
from kvferry.proto.errors import KVFerryError
from kvferry.proto.specs import Direction

THREADS = 256
WARPS = THREADS // 32
MAX_GRID = 8448
"""Blocks of a kernel that moves a whole turn: each is over soon, so that those of a load, which is
urgent, need not wait for a store's to end."""
VECTORS_PER_UNIT = 256
"""As in kernels.cu: 8 loads of each of 32 lanes."""
IDS = (128, 1000, 8000)
"""How many block ids the variants of a kernel take."""
MAX_BLOCKS = IDS[-1]
VECTORS = (16, 4, 1)
EARLY = 3 * PIECE
"""Units of stores that are a turn of their own where turns come at once."""
_PIECE = struct.Struct("QQQIII4x")
"""struct Piece of kernels.cu."""


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
        self._piece = bytearray(_PIECE.size)
        piece = np.frombuffer(self._piece, dtype=np.uint8)
        self._parameters = [(ids, Parameters(piece, np.empty(ids, np.int32))) for ids in IDS]

    def launch(
        self, direction: Direction, table: PageTable, stage: int, blocks: Int64s, stream: int
    ) -> None:
        """Between the tensors and the blocks that lie one after another from `stage` on."""
        units = blocks.size * table.pages * table.units_per_page
        room, parameters = next(each for each in self._parameters if blocks.size <= each[0])
        parameters.arrays[1][: blocks.size] = blocks
        _PIECE.pack_into(
            self._piece,
            0,
            stage,
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
            parameters,
        )


class StagedCopy:
    """Enqueues pieces through staging slots; one dma and one kernel stream a direction."""

    def __init__(self, driver: Driver, link: Link, ruler: Ruler) -> None:
        self._driver = driver
        self._link = link
        self._kernels = Kernels(driver)
        self._packing = Packing(link, ruler)
        self._dma, self._kernel = (
            {d: driver.create_stream(urgent=d is Direction.LOAD) for d in Direction}
            for _ in range(2)
        )
        self._turns = {d: Turns(d, partial(over, driver)) for d in Direction}
        self._drain = Drain(driver, link, self._dma[Direction.STORE])

    def streams(self, direction: Direction) -> tuple[int, int]:
        """Both streams of a direction, the one that a piece begins on first."""
        dma, kernel = self._dma[direction], self._kernel[direction]
        return (dma, kernel) if direction is Direction.LOAD else (kernel, dma)

    def table(self, geometry: BlockLayout, group: int, bases: Int64s) -> PageTable:
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

    def ahead(self) -> int:
        """Units of the buffer in pieces of stores whose turn has not come."""
        return self._turns[Direction.STORE].ahead

    def piece_units(self, direction: Direction) -> int:
        """Units of the largest piece now."""
        large = direction is Direction.STORE and self._turns[direction].at_once
        return LARGE_PIECE if large else PIECE

    def wants_push(self, under_way: int) -> bool:
        """Whether stores had better be pushed before others are made ready, for the link is to have
        something meanwhile. under_way: pieces of stores that were not seen to be done."""
        turns = self._turns[Direction.STORE]
        if turns.waiting == under_way or self._drain.dry:
            return True
        return turns.at_once and turns.waiting_units >= EARLY

    def unsent(self) -> int:
        """Pieces of stores whose DMA was not enqueued yet."""
        return self._turns[Direction.STORE].waiting + self._drain.waiting

    def prepare(self, table: PageTable, run: Extent) -> None:
        """A run comes, and its pieces will."""
        self._packing.prepare(run, table.block_bytes)

    def enqueue(self, direction: Direction, table: PageTable, slot: Slot, run: Extent) -> Piece:
        packed = self._packing.fragments(run, table.block_bytes, slot.address)
        stage = Stage(slot, table, run.gpu_blocks, packed)
        piece = Piece(direction, run.gpu_blocks.size * table.block_bytes, stage)
        if direction is Direction.LOAD:
            dma = self._dma[direction]
            piece.begun = None if run.at else self._driver.record(dma)
            self._link.enqueue(direction, packed, dma)
            piece.moved = self._driver.record(dma)
        self._turns[direction].add(piece)
        return piece

    def push(self, direction: Direction, more: bool) -> bool:
        """Launch what is due, or enqueue a piece; whether there may be more to do. A piece that
        could not be has its `error`."""
        turns, store = self._turns[direction], direction is Direction.STORE
        turns.watch()
        if store and self._drain.dry:
            self._drain.go_on()
            return True
        if pieces := turns.due(more):
            try:
                self._launch(direction, pieces)
            except KVFerryError as error:
                fail(self._driver, pieces, error)
            return store
        return store and self._drain.go_on()

    def finish(self, direction: Direction) -> None:
        """As `push`, of everything that there is: what comes now is not staged."""
        while self.push(direction, more=False):
            pass
        if direction is Direction.STORE:
            self._drain.finish()

    def _launch(self, direction: Direction, pieces: list[Piece]) -> None:
        driver, turns = self._driver, self._turns[direction]
        kernel, store = self._kernel[direction], direction is Direction.STORE
        if not store:
            moved = pieces[-1].moved
            assert moved is not None
            driver.call("cuStreamWaitEvent", kernel, moved.handle, 0)
        joins = turns.awaited
        begun = driver.record(kernel) if store or not joins else None
        for stage, blocks in _rows(direction, [p.stage for p in pieces if p.stage]):
            self._kernels.launch(direction, stage.table, stage.slot.address, blocks, kernel)
        done = driver.record(kernel)
        turns.ask(pieces, None if joins else begun, done)
        for piece in pieces:
            if begun is not None and store:
                piece.begun = begun
                self._drain.add(piece, done)
            else:
                piece.done = done


def _rows(direction: Direction, stages: list[Stage]) -> Iterator[tuple[Stage, Int64s]]:
    """What one launch each can do, as its first stage and all the blocks: stages of one table
    that lie one behind the other. A block that is loaded twice is written in two launches; one
    stage has each block once."""
    row: list[Stage] = []
    written_once = direction is Direction.STORE or len(stages) == 1 or _all_differ(stages)
    for stage in stages:
        if row and not (_continues(row, stage) and (written_once or _all_differ([*row, stage]))):
            yield row[0], _blocks(row)
            row = []
        row.append(stage)
    if row:
        yield row[0], _blocks(row)


def _continues(row: list[Stage], stage: Stage) -> bool:
    blocks = sum([before.blocks.size for before in row])
    return (
        stage.table is row[0].table
        and stage.slot.address == row[0].slot.address + blocks * stage.table.block_bytes
        and blocks + stage.blocks.size <= MAX_BLOCKS
    )


def _all_differ(stages: list[Stage]) -> bool:
    """Whether no block comes twice; they may be of different tables, which have blocks of their own
    under the same numbers."""
    blocks = _blocks(stages)
    return first_again(blocks, largest(blocks) + 1) is None


def _blocks(row: list[Stage]) -> Int64s:
    return row[0].blocks if len(row) == 1 else np.concatenate([stage.blocks for stage in row])
