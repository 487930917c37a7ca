"""Stores are committed in rounds, of each block the last store alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.actions import BlockSet
from kvferry.daemon.core.records import ResidentBlock
from kvferry.daemon.persistence import checksum_writer as module
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.checksum_client import Purpose
from kvferry.daemon.persistence.checksum_writer import ChecksumWriter, CompletedStore

from .stored_pool import KEYED, key, numbers


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
    def __init__(self) -> None:
        self.reads = RecordedReads()
        self.writer = ChecksumWriter(self.reads)  # type: ignore[arg-type]
        self.table = BlockTable.create(KEYED)

    def add(self, blocks: list[int], keys: list[int], **parts: tuple[int, int]) -> None:
        theirs = {int(name[1:]): part for name, part in parts.items()}
        cargo = BlockSet(KEYED.owner, numbers(*blocks), tuple(map(key, keys)), theirs)
        versions = self.table.invalidate(cargo.blocks)
        self.writer.add_store(CompletedStore(self.table, cargo, versions))

    async def round(self) -> None:
        """The next round is read."""
        async with asyncio.timeout(20):
            while not self.reads.waiting:
                await asyncio.sleep(0.001)
        self.reads.answer()


@pytest.fixture
async def desk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WriterFixture]:
    monkeypatch.setattr(module, "COMMIT_AFTER", 0)
    desk = WriterFixture()
    yield desk
    if not desk.table.closed:
        desk.table.close()


async def test_of_stores_of_one_round_the_last_of_a_block_counts(desk: WriterFixture) -> None:
    desk.add([1, 2], [1, 2], b1=(0, 1), b2=(1, 2))
    desk.add([2], [9])
    desk.add([1], [8], b1=(2, 3))
    assert desk.writer.busy
    await desk.round()
    assert not desk.writer.busy
    assert desk.reads.asked == [[2, 1]]
    assert desk.table.residents() == (ResidentBlock(2, key(9)), ResidentBlock(1, key(8), (2, 3)))


async def test_more_blocks_than_one_request_takes(
    desk: WriterFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.daemon.persistence.checksum_client.BATCH_BLOCKS", 3)
    desk.add(list(range(10)), list(range(100, 110)), b4=(1, 2))
    await desk.round()
    assert desk.reads.asked == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    found = {resident.block: resident for resident in desk.table.residents()}
    expected = {n: ResidentBlock(n, key(100 + n), (1, 2) if n == 4 else None) for n in range(10)}
    assert found == expected


async def test_stores_that_complete_during_a_round_wait_for_the_next(
    desk: WriterFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they stored over is not read first."""
    monkeypatch.setattr(module, "FOLD", most := 6)
    desk.add([1], [1])
    async with asyncio.timeout(20):
        while not desk.reads.asked:
            await asyncio.sleep(0.001)
    for number in range(10):
        desk.add([2, 3], [10 + number, 30 + number])
        assert len(desk.writer._stores) <= most // 2
    await asyncio.sleep(0.01)
    assert desk.reads.asked == [[1]]
    await desk.round()
    assert desk.writer.busy
    await desk.round()
    assert desk.reads.asked == [[1], [2, 3]]
    assert not desk.writer.busy
    await asyncio.sleep(0.01)
    assert not desk.reads.waiting
    assert set(desk.table.residents()) == {
        ResidentBlock(1, key(1)),
        ResidentBlock(2, key(19)),
        ResidentBlock(3, key(39)),
    }


async def test_stores_of_no_blocks_are_not_kept(desk: WriterFixture) -> None:
    """All of their keys were there already, and there may be any number of them in a round."""
    desk.add([], [])
    assert not desk.writer.busy


@pytest.mark.parametrize("read", [False, True], ids=["before it is read", "while it is read"])
async def test_a_region_may_end_before_it_is_committed(desk: WriterFixture, read: bool) -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    desk.add([1], [1])
    if read:
        await asyncio.sleep(0.01)
    desk.table.close()
    await asyncio.sleep(0.01)
    assert len(desk.reads.asked) == read
    desk.reads.answer()
    assert not errors
    assert not desk.writer.busy
