"""Staged copies: write-back of gathered chunks, and revoked engines."""

from __future__ import annotations

from functools import partial
from operator import contains
from typing import cast

import numpy as np
import pytest

from kvferry.cuda.driver import Driver
from kvferry.daemon.core.layout import BlockLayout, Extent
from kvferry.daemon.engine.cuda.calibration import CopyModes
from kvferry.daemon.engine.cuda.chunk import Chunk
from kvferry.daemon.engine.cuda.dma import Dma
from kvferry.daemon.engine.cuda.staged import StagedCopy
from kvferry.daemon.engine.cuda.staging import UNITS, Staging
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import GroupCopying

from ..simulated_driver import SimulatedDriver

PAGE, BLOCKS = 256, 6
LAYOUT = KVLayout((TensorLayout(BLOCKS, PAGE, PAGE),), ((TensorRef(0, PAGE),),))


class StagedStores:
    """A staged copy, and a store chunk of each block from `tensor` to `pool`.

    revoked: blocks of a revoked engine. write_back: blocks written back in one flush.
    """

    def __init__(self, *revoked: int, write_back: int = BLOCKS) -> None:
        self.driver = SimulatedDriver()
        device = cast(Driver, self.driver)
        self.tensor = np.arange(BLOCKS * PAGE, dtype=np.uint8).reshape(BLOCKS, PAGE)
        self.pool = np.zeros_like(self.tensor)
        dma = Dma(device, self.pool.ctypes.data, self.pool.nbytes)
        staging = Staging(device, UNITS * PAGE)
        self.copy = StagedCopy(device, dma, staging, write_back * PAGE)
        block_layout = BlockLayout(LayoutArrays.from_layout(LAYOUT), 0, BLOCKS)
        table = self.copy.table(block_layout, 0, np.array([self.tensor.ctypes.data]))
        self.chunks: list[Chunk] = []
        for block in range(BLOCKS):
            run = Extent(0, np.array([block]), np.array([block * PAGE]))
            slot = staging.take_slot(Direction.STORE, PAGE)
            self.chunks.append(
                self.copy.enqueue(
                    Direction.STORE, table, slot, run, partial(contains, revoked, block)
                )
            )

    @property
    def written_back(self) -> int:
        return sum(chunk.done is not None for chunk in self.chunks)


def test_a_flush_writes_back_a_bounded_number_of_bytes() -> None:
    stores, counts = StagedStores(write_back=2), list[int]()
    for _ in range(4):
        stores.copy.flush(Direction.STORE, more=False)
        counts.append(stores.written_back)
    assert counts == [2, 4, 6, 6]
    assert stores.driver.launches == [(Direction.STORE, BLOCKS)]
    stores.driver.settle()
    assert np.array_equal(stores.pool, stores.tensor)


def test_finish_writes_back_all_chunks() -> None:
    stores = StagedStores(write_back=1)
    stores.copy.finish(Direction.STORE)
    assert stores.written_back == BLOCKS


def test_a_refused_write_back_fails_all_later_chunks() -> None:
    stores = StagedStores(write_back=2)
    stores.copy.flush(Direction.STORE, more=False)
    stores.driver.refuse = lambda name: name == "cuMemcpyAsync"
    stores.copy.flush(Direction.STORE, more=False)
    assert [chunk.error is not None for chunk in stores.chunks] == [False] * 2 + [True] * 4
    assert stores.written_back == 2


def test_no_kernel_is_launched_for_a_revoked_engine() -> None:
    stores = StagedStores(1, 4)
    stores.copy.finish(Direction.STORE)
    stores.driver.settle()
    errors = {block: chunk.error for block, chunk in enumerate(stores.chunks) if chunk.error}
    assert {block: error.code for block, error in errors.items()} == dict.fromkeys(
        (1, 4), Code.CANCELLED
    )
    copied = stores.pool.any(axis=1)
    assert copied.tolist() == [True, False, True, True, False, True]


@pytest.mark.parametrize("stride", [2048 + 8, 2048 + 2])
def test_packed_rows_must_be_aligned(stride: int) -> None:
    shape = KVLayout((TensorLayout(4, 2048, stride),), ((TensorRef(0, 2048),),), packed=True)
    stores = StagedStores()
    layout = BlockLayout(LayoutArrays.from_layout(shape), 0, 4)
    with pytest.raises(Refused, match="packed tensors must be aligned to 16 bytes") as refused:
        stores.copy.table(layout, 0, np.array([1 << 20]))
    assert refused.value.code == Code.BAD_LAYOUT


def test_packed_blocks_must_fit_into_the_buffer() -> None:
    shape = KVLayout((TensorLayout(4, 4096, 4096),), ((TensorRef(0, 4096),),), packed=True)
    layout = BlockLayout(LayoutArrays.from_layout(shape), 0, 4)
    modes = CopyModes(dict.fromkeys(Direction, 0), largest_block=layout.group_bytes[0])
    modes.check_fit(layout)
    assert not modes.is_direct(Direction.STORE, layout, 0)
    assert modes.modes_of(layout, 0) == GroupCopying("packed", "packed")
    small = CopyModes(dict.fromkeys(Direction, 0), largest_block=layout.group_bytes[0] - 1)
    with pytest.raises(Refused, match=r"raise copy\.staging"):
        small.check_fit(layout)
