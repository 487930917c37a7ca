"""Stores are committed in rounds, of each block the last store alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.actions import BlockSet
from kvferry.daemon.core.records import RegionRecord, ResidentBlock
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.checksum_client import BATCH_BYTES, Purpose
from kvferry.daemon.persistence.checksum_writer import (
    MIN_WAITING_BLOCKS,
    ChecksumWriter,
    CompletedStore,
)
from support.eventually import eventually

from .stored_pool import KEYED, key, numbers, of_large_blocks


class RecordedReads:
    """Records what is to be read, and answers when told to."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.waiting: list[Callable[[], None]] = []

    def request_checksums(
        self,
        table: BlockTable,
        blocks: Any,
        keys: Sequence[bytes],
        purpose: Purpose,
        done: Callable[[Any], None],
    ) -> None:
        assert purpose is Purpose.COMMIT
        self.asked.append(blocks.tolist())
        self.waiting.append(lambda: done(np.zeros(blocks.size, "<u8")))

    def answer(self) -> None:
        waiting, self.waiting = self.waiting, []
        for done in waiting:
            done()


class WriterFixture:
    """A writer whose rounds begin at once, and a table of COUNT blocks."""

    def __init__(self, record: RegionRecord = KEYED, fold: int = MIN_WAITING_BLOCKS) -> None:
        self.reads = RecordedReads()
        self.committed: list[BlockSet] = []
        self.writer = ChecksumWriter(
            self.reads,  # type: ignore[arg-type]
            self.committed.append,
            commit_after=0,
            min_waiting=fold,
        )
        self.table = BlockTable.create(record)

    def add(self, blocks: list[int], keys: list[int], **parts: tuple[int, int]) -> None:
        theirs = {int(name[1:]): part for name, part in parts.items()}
        block_set = BlockSet(KEYED.owner, numbers(*blocks), tuple(map(key, keys)), theirs)
        versions = self.table.invalidate(block_set.blocks)
        self.writer.add_store(CompletedStore(self.table, block_set, versions))

    async def complete_round(self) -> None:
        await eventually(lambda: self.reads.waiting)
        self.reads.answer()

    def close(self) -> None:
        if not self.table.closed:
            self.table.close()


@pytest.fixture
async def fixture() -> AsyncIterator[WriterFixture]:
    fixture = WriterFixture()
    yield fixture
    fixture.close()


async def test_the_last_store_of_a_block_in_a_round_is_committed(fixture: WriterFixture) -> None:
    fixture.add([1, 2], [1, 2], b1=(0, 1), b2=(1, 2))
    fixture.add([2], [9])
    fixture.add([1], [8], b1=(2, 3))
    assert fixture.writer.busy
    await fixture.complete_round()
    assert not fixture.writer.busy
    assert fixture.reads.asked == [[2, 1]]
    assert fixture.table.residents() == (ResidentBlock(2, key(9)), ResidentBlock(1, key(8), (2, 3)))


async def test_blocks_that_are_committed_are_reported_with_their_keys(
    fixture: WriterFixture,
) -> None:
    """Not those that were overwritten meanwhile."""
    fixture.add([1, 2, 3], [1, 2, 3])
    await eventually(lambda: fixture.reads.waiting)
    fixture.table.invalidate(numbers(2))
    fixture.reads.answer()
    (one,) = fixture.committed
    assert (one.owner, one.blocks.tolist(), one.keys) == (KEYED.owner, [1, 3], (key(1), key(3)))


async def test_more_blocks_than_one_request_takes() -> None:
    fixture = WriterFixture(of_large_blocks(KEYED, BATCH_BYTES // 3))
    fixture.add(list(range(10)), list(range(100, 110)), b4=(1, 2))
    await fixture.complete_round()
    assert fixture.reads.asked == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    found = {resident.block: resident for resident in fixture.table.residents()}
    expected = {n: ResidentBlock(n, key(100 + n), (1, 2) if n == 4 else None) for n in range(10)}
    assert found == expected
    fixture.close()


async def test_stores_that_complete_during_a_round_wait_for_the_next() -> None:
    """And what they stored over is not read first."""
    fixture = WriterFixture(fold=(most := 6))
    fixture.add([1], [1])
    await eventually(lambda: fixture.reads.asked)
    for number in range(10):
        fixture.add([2, 3], [10 + number, 30 + number])
        assert len(fixture.writer._stores) <= most // 2
    await asyncio.sleep(0.01)
    assert fixture.reads.asked == [[1]]
    await fixture.complete_round()
    assert fixture.writer.busy
    await fixture.complete_round()
    assert fixture.reads.asked == [[1], [2, 3]]
    assert not fixture.writer.busy
    await asyncio.sleep(0.01)
    assert not fixture.reads.waiting
    assert set(fixture.table.residents()) == {
        ResidentBlock(1, key(1)),
        ResidentBlock(2, key(19)),
        ResidentBlock(3, key(39)),
    }
    fixture.close()


async def test_stores_of_no_blocks_are_not_kept(fixture: WriterFixture) -> None:
    """All of their keys were there already, and there may be any number of them in a round."""
    fixture.add([], [])
    assert not fixture.writer.busy


@pytest.mark.parametrize("read", [False, True], ids=["before it is read", "while it is read"])
async def test_a_region_may_end_before_it_is_committed(fixture: WriterFixture, read: bool) -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    fixture.add([1], [1])
    if read:
        await asyncio.sleep(0.01)
    fixture.table.close()
    await asyncio.sleep(0.01)
    assert len(fixture.reads.asked) == read
    fixture.reads.answer()
    assert not errors
    assert not fixture.writer.busy
