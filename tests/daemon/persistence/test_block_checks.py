"""Checks of blocks: one batch, the verification after a restart, and the scrub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.daemon.core.actions import BlocksCorrupted, BlocksVerified
from kvferry.daemon.core.block_table import CHECKED, UNCHECKED
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.core.region import Region
from kvferry.daemon.persistence import block_checks
from kvferry.daemon.persistence.block_checks import (
    BATCH_SECONDS,
    ROUND_SECONDS,
    check_blocks,
    unverified_batches,
)
from kvferry.daemon.persistence.checksum_client import BATCH_BYTES, Purpose
from support.background import in_background
from support.eventually import eventually

from .recorded_reads import RecordedReads
from .stored_pool import (
    BLOCK,
    COUNT,
    KEYED,
    RAW,
    StoredPool,
    mark_unverified,
    numbers,
    overwrite,
    with_block_bytes,
)

pytestmark = pytest.mark.virtual_time

FAST = 1 << 30


@pytest.fixture
def pool() -> StoredPool:
    return StoredPool()


def new_unverified_region(pool: StoredPool, record: RegionRecord) -> Region:
    region = pool.new_region(record)
    pool.commit(region, *range(COUNT))
    mark_unverified(region)
    return region


async def check(
    pool: StoredPool, region: Region, *blocks: int, during: Callable[[], Any] = lambda: None
) -> list[Any]:
    """Check blocks. Returns (type, owner, blocks) of each report to the core.

    during: called while the blocks are read.
    """
    pool.reports.clear()
    batch = region, numbers(*blocks)
    reading = asyncio.create_task(check_blocks(pool.client, pool.report, batch, Purpose.VERIFY))
    await asyncio.sleep(0)
    during()
    await reading
    return [
        (type(report), report.owner, report.blocks.tolist())
        for report in pool.reports
        if isinstance(report, BlocksVerified | BlocksCorrupted)
    ]


@pytest.mark.parametrize("record", [KEYED, RAW], ids=["by key", "by number"])
async def test_each_block_is_reported_once_as_verified_or_corrupt(
    pool: StoredPool, record: RegionRecord
) -> None:
    region = new_unverified_region(pool, record)
    pool.damage(region, 5)
    assert await check(pool, region, 4, 5, 6) == [
        (BlocksVerified, record.owner, [4, 6]),
        (BlocksCorrupted, record.owner, [5]),
    ]
    assert region.table.find(*CHECKED).tolist() == [4, 6]
    assert await check(pool, region, 4, 6) == []


async def test_a_block_overwritten_while_read_is_not_reported(pool: StoredPool) -> None:
    region = new_unverified_region(pool, KEYED)
    pool.damage(region, 3)
    assert await check(pool, region, 2, 3, during=lambda: overwrite(region, 2, 3)) == []


async def test_no_report_is_sent_if_the_region_is_freed_during_the_check(pool: StoredPool) -> None:
    region = new_unverified_region(pool, KEYED)
    assert await check(pool, region, 2, during=lambda: free(region)) == []


# Verification


def free(region: Region) -> None:
    region.table.closed = True


async def verify(pool: StoredPool, *regions: Region) -> None:
    await block_checks.verify(pool.client, pool.report, unverified_batches(regions))


async def test_all_restored_blocks_are_verified_except_damaged_ones(pool: StoredPool) -> None:
    keyed, raw = new_unverified_region(pool, KEYED), new_unverified_region(pool, RAW)
    pool.damage(raw, 7)
    await verify(pool, keyed, raw)
    assert keyed.table.find(*UNCHECKED).size == raw.table.find(*UNCHECKED).size == 0
    verified = sum(r.blocks.size for r in pool.reports if isinstance(r, BlocksVerified))
    (corrupted,) = (r for r in pool.reports if isinstance(r, BlocksCorrupted))
    assert verified == 2 * COUNT - 1
    assert (corrupted.owner, corrupted.blocks.tolist()) == (RAW.owner, [7])


async def test_a_region_may_be_freed_before_its_verification(pool: StoredPool) -> None:
    keyed, raw = new_unverified_region(pool, KEYED), new_unverified_region(pool, RAW)
    unverified = unverified_batches([keyed, raw])
    free(raw)
    await block_checks.verify(pool.client, pool.report, unverified)
    assert not keyed.table.find(*UNCHECKED).size
    assert {r.owner for r in pool.reports if isinstance(r, BlocksVerified)} == {KEYED.owner}


async def test_the_most_recently_used_blocks_of_all_regions_are_verified_first(
    pool: StoredPool,
) -> None:
    keyed, raw = pool.new_region(KEYED), pool.new_region(RAW)
    for region, block in ((keyed, 1), (raw, 1), (raw, 5), (keyed, 9), (keyed, 3), (raw, 4)):
        pool.commit(region, block)
    keyed.table.lines.touch(numbers(1))
    mark_unverified(keyed)
    mark_unverified(raw)
    order = unverified_batches([keyed, raw], range_blocks=2)
    assert [(region.owner.kind, blocks.tolist()) for region, blocks in order] == [
        ("namespace", [1]),
        ("engine", [4]),
        ("namespace", [3, 9]),
        ("engine", [5, 1]),
    ]


async def test_batches_in_flight_are_bounded_and_overwritten_blocks_skipped(
    pool: StoredPool,
) -> None:
    region = pool.new_region(with_block_bytes(KEYED, BATCH_BYTES // 2))
    pool.commit(region, *reversed(range(8)))
    mark_unverified(region)
    reads = RecordedReads(Purpose.VERIFY, window=2)
    unverified = unverified_batches([region])
    async with in_background(
        block_checks.verify(reads, pool.report, unverified)  # type: ignore[arg-type]
    ) as verification:
        await eventually(lambda: reads.waiting)
        assert reads.blocks == [[7, 6], [5, 4]]
        overwrite(region, 3, 1, 0)
        reads.complete_next()
        await eventually(lambda: len(reads.blocks) > 2)
        assert reads.blocks[2:] == [[2]]
        reads.complete_all()
        await verification
    assert not region.table.find(*UNCHECKED).size
    assert len(reads.blocks) == 3


# Scrub


class ScrubFixture:
    """A scrub whose reads the test completes, of a pool without a checksum client."""

    def __init__(self, pool: StoredPool) -> None:
        self.pool = pool
        self.reads = RecordedReads(Purpose.SCRUB)
        self.regions: list[Region] = []

    async def scrub(self, rate: int, **options: int) -> None:
        reads: Any = self.reads
        await block_checks.scrub(reads, lambda _: None, lambda: self.regions, rate, **options)

    async def next_blocks(self) -> list[int]:
        """The next blocks that are read."""
        if not self.reads.waiting:
            self.reads.begun.clear()
            await asyncio.wait_for(self.reads.begun.wait(), 2 * ROUND_SECONDS)
        return self.reads.blocks[-1]

    async def read_next(self) -> list[int]:
        """Complete the read. Returns the blocks of the next one."""
        self.reads.complete_all()
        return await self.next_blocks()

    async def pause(self) -> float:
        """Complete the read. Returns the seconds until the next one."""
        began = asyncio.get_running_loop().time()
        await self.read_next()
        return asyncio.get_running_loop().time() - began


@pytest.fixture
def fixture(pool: StoredPool) -> ScrubFixture:
    return ScrubFixture(pool)


async def test_every_committed_block_is_read(fixture: ScrubFixture) -> None:
    """Blocks committed during the scrub are read. Corrupt and unverified blocks are not."""
    pool = fixture.pool
    keyed, raw = fixture.regions = [pool.new_region(KEYED), pool.new_region(RAW)]
    pool.commit(keyed, 0, 1, 2, 8)
    pool.commit(raw, 5)
    rate = int(2 * BLOCK / BATCH_SECONDS)
    async with in_background(fixture.scrub(rate, searched=3)):
        assert await fixture.next_blocks() == [0, 1]
        assert await fixture.read_next() == [2]
        pool.commit(keyed, 7)
        keyed.table.drop(numbers(8))
        assert await fixture.read_next() == [7]
        assert await fixture.read_next() == [5]
        mark_unverified(keyed)
        keyed.table.set_verified(numbers(7))
        assert await fixture.read_next() == [7]
        free(raw)
        assert await fixture.read_next() == [7]


@pytest.mark.parametrize(
    ("rate", "blocks", "counted", "pause"),
    [(BLOCK, 1, 0, 1.0), (16 * BLOCK, 4, 0, 0.25), (16 * BLOCK, 4, 8 * BLOCK, 2.0)],
)
async def test_the_pause_after_a_batch_follows_from_the_rate(
    fixture: ScrubFixture, rate: int, blocks: int, counted: int, pause: float
) -> None:
    """counted: the bytes that a smaller block counts as."""
    fixture.regions.append(fixture.pool.new_region(RAW))
    fixture.pool.commit(fixture.regions[0], *range(8))
    async with in_background(fixture.scrub(rate, counted_bytes=counted)):
        assert await fixture.next_blocks() == list(range(blocks))
        assert await fixture.pause() == pytest.approx(pause, abs=0.01)


@pytest.mark.parametrize(("rate", "seconds"), [(1 << 20, 60.0), (1 << 30, 4.0)])
async def test_a_round_over_few_blocks_is_not_repeated_at_once(
    fixture: ScrubFixture, rate: int, seconds: float
) -> None:
    fixture.regions.append(fixture.pool.new_region(RAW))
    fixture.pool.commit(fixture.regions[0], 1)
    async with in_background(fixture.scrub(rate)):
        assert await fixture.next_blocks() == [1]
        assert await fixture.pause() == pytest.approx(seconds, abs=0.01)
    assert fixture.reads.blocks == [[1], [1]]


async def test_the_scrub_waits_for_the_first_region(fixture: ScrubFixture) -> None:
    async with in_background(fixture.scrub(FAST)):
        await asyncio.sleep(2 * ROUND_SECONDS)
        fixture.regions.append(fixture.pool.new_region(RAW))
        fixture.pool.commit(fixture.regions[0], 6)
        assert await fixture.next_blocks() == [6]
