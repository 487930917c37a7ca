"""The checksum writer commits stored blocks in rounds. A round reads each block once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvferry.daemon.core.block_table import UNCOMMITTED
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.persistence.checksum_client import BATCH_BYTES, Purpose
from kvferry.daemon.persistence.checksum_writer import COMMIT_AFTER, write_checksums
from support.background import in_background
from support.committed_blocks import ResidentBlock, residents_of
from support.eventually import eventually

from .recorded_reads import RecordedReads
from .stored_pool import KEYED, key, overwrite, region_of, with_block_bytes

pytestmark = pytest.mark.virtual_time


class WriterFixture:
    """A writer, and a region of COUNT blocks."""

    def __init__(self, record: RegionRecord = KEYED) -> None:
        self.reads = RecordedReads(Purpose.COMMIT)
        # How often blocks were committed.
        self.commits = 0
        self.region = region_of(record)
        self.table = self.region.table
        self.stored = asyncio.Event()

    async def run(self) -> None:
        await write_checksums(
            self.reads,  # type: ignore[arg-type]
            lambda: [] if self.table.closed else [self.region],
            self.stored,
            self.count_commit,
        )

    def count_commit(self) -> None:
        self.commits += 1

    def residents(self) -> tuple[ResidentBlock, ...]:
        return residents_of(self.table.lines.memory)

    def add(self, blocks: list[int], keys: list[int], **parts: tuple[int, int]) -> None:
        """Store blocks. An argument `b3` is the stored part of block 3."""
        part_of = {int(name[1:]): part for name, part in parts.items()}
        self.table.set_stored(overwrite(self.region, *blocks), tuple(map(key, keys)), part_of)
        self.stored.set()

    async def complete_round(self) -> None:
        await eventually(lambda: self.reads.waiting)
        read = self.reads.blocks[-1]
        self.reads.complete_all()
        await eventually(
            lambda: self.reads.waiting or not self.table.among(np.array(read), *UNCOMMITTED).any()
        )


@pytest.fixture
async def fixture(request: pytest.FixtureRequest) -> AsyncIterator[WriterFixture]:
    """A WriterFixture that runs. The parameter is its record."""
    fixture = WriterFixture(getattr(request, "param", KEYED))
    async with in_background(fixture.run()):
        yield fixture


async def test_a_round_begins_a_while_after_the_first_store(fixture: WriterFixture) -> None:
    """So that it includes the stores that complete meanwhile."""
    fixture.add([1], [1])
    await asyncio.sleep(0.99 * COMMIT_AFTER)
    assert fixture.reads.blocks == []
    fixture.add([2], [2])
    await fixture.complete_round()
    assert fixture.reads.blocks == [[1, 2]]


async def test_the_last_store_of_a_block_in_a_round_is_committed(fixture: WriterFixture) -> None:
    fixture.add([1, 2], [1, 2], b1=(0, 1), b2=(1, 2))
    fixture.add([2], [9])
    fixture.add([1], [8], b1=(2, 3))
    await fixture.complete_round()
    assert fixture.reads.blocks == [[1, 2]]
    assert fixture.residents() == (ResidentBlock(2, key(9)), ResidentBlock(1, key(8), (2, 3)))


async def test_blocks_that_were_overwritten_while_they_were_read_are_not_committed(
    fixture: WriterFixture,
) -> None:
    fixture.add([1, 2, 3], [1, 2, 3])
    await eventually(lambda: fixture.reads.waiting)
    overwrite(fixture.region, 2)
    await fixture.complete_round()
    assert fixture.commits == 1
    assert [resident.key for resident in fixture.residents()] == [key(3), key(1)]


@pytest.mark.parametrize("fixture", [with_block_bytes(KEYED, BATCH_BYTES // 3)], indirect=True)
async def test_a_large_store_needs_several_requests(fixture: WriterFixture) -> None:
    fixture.add(list(range(10)), list(range(100, 110)), b4=(1, 2))
    await eventually(lambda: len(fixture.reads.waiting) == 4)
    await fixture.complete_round()
    assert fixture.reads.blocks == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    found = {resident.block: resident for resident in fixture.residents()}
    expected = {n: ResidentBlock(n, key(100 + n), (1, 2) if n == 4 else None) for n in range(10)}
    assert found == expected


async def test_blocks_that_are_stored_during_a_round_wait_for_the_next(
    fixture: WriterFixture,
) -> None:
    """A block that was stored again is read once. One that is being overwritten is not read."""
    fixture.add([1], [1])
    await eventually(lambda: fixture.reads.blocks)
    for number in range(10):
        fixture.add([2, 3, 4], [10 + number, 30 + number, 50 + number])
    overwrite(fixture.region, 4)
    await asyncio.sleep(10 * COMMIT_AFTER)
    assert fixture.reads.blocks == [[1]]
    await fixture.complete_round()
    await fixture.complete_round()
    assert fixture.reads.blocks == [[1], [2, 3]]
    await asyncio.sleep(10 * COMMIT_AFTER)
    assert not fixture.reads.waiting
    assert set(fixture.residents()) == {
        ResidentBlock(1, key(1)),
        ResidentBlock(2, key(19)),
        ResidentBlock(3, key(39)),
    }


@pytest.mark.parametrize("read", [False, True], ids=["before the read", "during the read"])
async def test_a_region_may_be_freed_before_its_commit(fixture: WriterFixture, read: bool) -> None:
    fixture.add([1], [1])
    if read:
        await eventually(lambda: fixture.reads.waiting)
    fixture.table.closed = True
    fixture.reads.complete_all()
    await eventually(lambda: not fixture.stored.is_set())
    await asyncio.sleep(10 * COMMIT_AFTER)
    assert len(fixture.reads.blocks) == read
    assert fixture.commits == 0
