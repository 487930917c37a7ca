"""The checksum writer commits stores in rounds. A round commits only the last store of a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

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
from support.background import in_background
from support.eventually import eventually

from .recorded_reads import RecordedReads
from .stored_pool import KEYED, key, numbers, with_block_bytes

MIN_WAITING = 6


class WriterFixture:
    """A writer whose rounds start at once, and a table of COUNT blocks."""

    def __init__(self, record: RegionRecord = KEYED, min_waiting: int = MIN_WAITING_BLOCKS) -> None:
        self.reads = RecordedReads(Purpose.COMMIT)
        self.committed: list[BlockSet] = []
        self.writer = ChecksumWriter(
            self.reads,  # type: ignore[arg-type]
            self.committed.append,
            commit_after=0,
            min_waiting=min_waiting,
        )
        self.table = BlockTable.create(record)

    def add(self, blocks: list[int], keys: list[int], **parts: tuple[int, int]) -> None:
        part_of = {int(name[1:]): part for name, part in parts.items()}
        block_set = BlockSet(KEYED.owner, numbers(*blocks), tuple(map(key, keys)), part_of)
        versions = self.table.invalidate(block_set.blocks)
        self.writer.add_store(CompletedStore(self.table, block_set, versions))

    async def complete_round(self) -> None:
        await eventually(lambda: self.reads.waiting)
        stores = self.writer._round
        self.reads.complete_all()
        await eventually(lambda: self.writer._round is not stores)


@pytest.fixture
async def fixture(request: pytest.FixtureRequest) -> AsyncIterator[WriterFixture]:
    """A WriterFixture that runs. The parameter has its arguments."""
    fixture = WriterFixture(**getattr(request, "param", {}))
    async with in_background(fixture.writer.write_checksums()):
        yield fixture
    if not fixture.table.closed:
        fixture.table.close()


async def test_the_last_store_of_a_block_in_a_round_is_committed(fixture: WriterFixture) -> None:
    fixture.add([1, 2], [1, 2], b1=(0, 1), b2=(1, 2))
    fixture.add([2], [9])
    fixture.add([1], [8], b1=(2, 3))
    assert fixture.writer.busy
    await fixture.complete_round()
    assert not fixture.writer.busy
    assert fixture.reads.blocks == [[2, 1]]
    assert fixture.table.residents() == (ResidentBlock(2, key(9)), ResidentBlock(1, key(8), (2, 3)))


async def test_committed_blocks_are_reported_with_their_keys(
    fixture: WriterFixture,
) -> None:
    """Blocks that were overwritten meanwhile are not reported."""
    fixture.add([1, 2, 3], [1, 2, 3])
    await eventually(lambda: fixture.reads.waiting)
    fixture.table.invalidate(numbers(2))
    await fixture.complete_round()
    (block_set,) = fixture.committed
    found = block_set.owner, block_set.blocks.tolist(), block_set.keys
    assert found == (KEYED.owner, [1, 3], (key(1), key(3)))


@pytest.mark.parametrize(
    "fixture", [{"record": with_block_bytes(KEYED, BATCH_BYTES // 3)}], indirect=True
)
async def test_a_large_store_needs_several_requests(fixture: WriterFixture) -> None:
    fixture.add(list(range(10)), list(range(100, 110)), b4=(1, 2))
    await fixture.complete_round()
    assert fixture.reads.blocks == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    found = {resident.block: resident for resident in fixture.table.residents()}
    expected = {n: ResidentBlock(n, key(100 + n), (1, 2) if n == 4 else None) for n in range(10)}
    assert found == expected


@pytest.mark.parametrize("fixture", [{"min_waiting": MIN_WAITING}], indirect=True)
async def test_stores_that_complete_during_a_round_wait_for_the_next(
    fixture: WriterFixture,
) -> None:
    """A block that was stored again is read once."""
    fixture.add([1], [1])
    await eventually(lambda: fixture.reads.blocks)
    for number in range(10):
        fixture.add([2, 3], [10 + number, 30 + number])
        assert len(fixture.writer._stores) <= MIN_WAITING // 2
    await asyncio.sleep(0.01)
    assert fixture.reads.blocks == [[1]]
    await fixture.complete_round()
    assert fixture.writer.busy
    await fixture.complete_round()
    assert fixture.reads.blocks == [[1], [2, 3]]
    assert not fixture.writer.busy
    await asyncio.sleep(0.01)
    assert not fixture.reads.waiting
    assert set(fixture.table.residents()) == {
        ResidentBlock(1, key(1)),
        ResidentBlock(2, key(19)),
        ResidentBlock(3, key(39)),
    }


async def test_stores_of_no_blocks_are_not_kept(fixture: WriterFixture) -> None:
    """All of their keys are resident. The number of such stores in a round is unlimited."""
    fixture.add([], [])
    assert not fixture.writer.busy


@pytest.mark.parametrize("read", [False, True], ids=["before the read", "during the read"])
async def test_a_region_may_be_freed_before_its_commit(fixture: WriterFixture, read: bool) -> None:
    fixture.add([1], [1])
    if read:
        await eventually(lambda: fixture.reads.waiting)
    fixture.table.close()
    fixture.reads.complete_all()
    await eventually(lambda: not fixture.writer.busy)
    assert len(fixture.reads.blocks) == read
    assert fixture.committed == []
