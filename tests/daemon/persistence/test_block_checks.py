"""Checks of blocks: one batch, the verification after a restart, and the scrub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.daemon.core.actions import BlocksCorrupted, BlocksVerified
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.persistence import block_checks
from kvferry.daemon.persistence.block_checks import BATCH_SECONDS, check_blocks, unverified_batches
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.checksum_client import BATCH_BYTES, Purpose
from support.background import in_background
from support.eventually import eventually

from .recorded_reads import RecordedReads
from .stored_pool import BLOCK, COUNT, KEYED, RAW, StoredPool, key, numbers, with_block_bytes

FAST = 1 << 30


def new_unverified_table(pool: StoredPool, record: RegionRecord) -> BlockTable:
    table = pool.table(record)
    pool.commit(table, *range(COUNT))
    table.mark_unverified(numbers(*range(COUNT)))
    return table


async def check(
    pool: StoredPool, table: BlockTable, *blocks: int, during: Callable[[], Any] = lambda: None
) -> list[Any]:
    """Check blocks. Returns (type, owner, blocks, keys) of each report to the core.

    during: called while the blocks are read.
    """
    pool.reports.clear()
    batch = table, numbers(*blocks)
    reading = asyncio.create_task(
        check_blocks(pool.checksums, pool.reports.extend, batch, Purpose.VERIFY)
    )
    await asyncio.sleep(0)
    during()
    await reading
    return [
        (type(report), report.owner, report.blocks.tolist(), report.keys)
        for report in pool.reports
        if isinstance(report, BlocksVerified | BlocksCorrupted)
    ]


@pytest.mark.parametrize("record", [KEYED, RAW], ids=["by key", "by number"])
async def test_each_block_is_reported_once_as_verified_or_corrupt(
    pool: StoredPool, record: RegionRecord
) -> None:
    table, keyed = new_unverified_table(pool, record), record is KEYED
    pool.damage(table, 5)
    assert await check(pool, table, 4, 5, 6) == [
        (BlocksVerified, record.owner, [4, 6], (key(4), key(6)) if keyed else ()),
        (BlocksCorrupted, record.owner, [5], (key(5),) if keyed else ()),
    ]
    assert table.unverified is not None
    assert not table.unverified[[4, 5, 6]].any()
    assert table.committed_blocks().tolist() == [n for n in range(COUNT) if n != 5]
    assert await check(pool, table, 4, 6) == []


async def test_a_block_with_the_bytes_of_another_is_corrupt(pool: StoredPool) -> None:
    table = new_unverified_table(pool, RAW)
    start = RAW.start
    pool.bytes[start : start + 4096] = pool.bytes[start + 4096 : start + 8192]
    assert [kind for kind, *_ in await check(pool, table, 0)] == [BlocksCorrupted]


async def test_a_block_overwritten_while_read_is_not_reported(pool: StoredPool) -> None:
    table = new_unverified_table(pool, KEYED)
    pool.damage(table, 3)
    versions = list[Any]()
    overwrite = lambda: versions.append(table.invalidate(numbers(2, 3)))  # noqa: E731
    assert await check(pool, table, 2, 3, during=overwrite) == []
    assert table.unchanged(numbers(2, 3), versions[0]).all()


async def test_no_report_is_sent_if_the_region_is_freed_during_the_check(pool: StoredPool) -> None:
    table = new_unverified_table(pool, KEYED)
    assert await check(pool, table, 2, during=table.close) == []


# Verification


async def verify(pool: StoredPool, *tables: BlockTable, **options: int) -> None:
    await block_checks.verify(
        pool.checksums, pool.reports.extend, unverified_batches(tables, **options)
    )


async def test_all_restored_blocks_are_verified_except_damaged_ones(pool: StoredPool) -> None:
    keyed, raw = new_unverified_table(pool, KEYED), new_unverified_table(pool, RAW)
    pool.damage(raw, 7)
    await verify(pool, keyed, raw)
    assert keyed.unverified is None
    assert raw.unverified is None
    verified = sum(r.blocks.size for r in pool.reports if isinstance(r, BlocksVerified))
    (corrupted,) = (r for r in pool.reports if isinstance(r, BlocksCorrupted))
    assert verified == 2 * COUNT - 1
    assert (corrupted.owner, corrupted.blocks.tolist()) == (RAW.owner, [7])


async def test_a_region_may_be_freed_before_its_verification(pool: StoredPool) -> None:
    keyed, raw = new_unverified_table(pool, KEYED), new_unverified_table(pool, RAW)
    unverified = unverified_batches([keyed, raw])
    raw.close()
    await block_checks.verify(pool.checksums, pool.reports.extend, unverified)
    assert keyed.unverified is None
    assert {r.owner for r in pool.reports if isinstance(r, BlocksVerified)} == {KEYED.owner}


def test_nothing_is_verified_without_regions() -> None:
    assert list(unverified_batches([])) == []


async def test_the_most_recently_used_blocks_of_all_regions_are_verified_first(
    pool: StoredPool,
) -> None:
    keyed, raw = pool.table(KEYED), pool.table(RAW)
    for table, block in ((keyed, 1), (raw, 1), (raw, 5), (keyed, 9), (keyed, 3), (raw, 4)):
        pool.commit(table, block)
    keyed.touch(numbers(1))
    for table in (keyed, raw):
        table.mark_unverified(table.committed_blocks())
    order = unverified_batches([keyed, raw], range_blocks=2)
    assert [(table.record.owner.kind, blocks.tolist()) for table, blocks in order] == [
        ("namespace", [1]),
        ("engine", [4]),
        ("namespace", [3, 9]),
        ("engine", [5, 1]),
    ]


async def test_batches_in_flight_are_bounded_and_overwritten_blocks_skipped(
    pool: StoredPool,
) -> None:
    table = pool.table(with_block_bytes(KEYED, BATCH_BYTES // 2))
    pool.commit(table, *reversed(range(8)))
    table.mark_unverified(table.committed_blocks())
    reads = RecordedReads(Purpose.VERIFY, window=2)
    unverified = unverified_batches([table])
    async with in_background(
        block_checks.verify(reads, pool.reports.extend, unverified)  # type: ignore[arg-type]
    ) as verification:
        await eventually(lambda: reads.waiting)
        assert reads.blocks == [[7, 6], [5, 4]]
        table.invalidate(numbers(3, 1, 0))
        reads.complete_next()
        await eventually(lambda: len(reads.blocks) > 2)
        assert reads.blocks[2:] == [[2]]
        reads.complete_all()
        await verification
    assert table.unverified is None
    assert len(reads.blocks) == 3


# Scrub


class ScrubFixture:
    """A scrub whose reads and pauses the test completes."""

    def __init__(self) -> None:
        self.reads = RecordedReads(Purpose.SCRUB)
        self.tables: list[BlockTable] = []
        self.pauses: list[float] = []
        self._resumed = asyncio.Event()

    async def scrub(self, rate: int, **options: int) -> None:
        await block_checks.scrub(
            self.reads,  # type: ignore[arg-type]
            lambda _: None,
            lambda: self.tables,
            rate,
            sleep=self._sleep,
            **options,
        )

    async def next_blocks(self) -> list[int]:
        """The next blocks that are read."""
        await eventually(lambda: self.reads.waiting)
        return self.reads.blocks[-1]

    async def next_pause(self) -> float:
        """Complete the read, and wait for the pause that follows."""
        self.reads.complete_all()
        await eventually(lambda: self.pauses)
        return self.pauses[-1]

    def resume(self) -> None:
        self.pauses.clear()
        self._resumed.set()

    async def read_next(self) -> list[int]:
        """Complete the read and the pauses that follow. Returns the blocks of the next read."""
        await self.next_pause()
        while not self.reads.waiting:
            if self.pauses:
                self.resume()
            await asyncio.sleep(0)
        return self.reads.blocks[-1]

    async def _sleep(self, seconds: float) -> None:
        if seconds:
            self._resumed.clear()
            self.pauses.append(seconds)
            await self._resumed.wait()
        else:
            await asyncio.sleep(0)


@pytest.fixture
async def fixture() -> ScrubFixture:
    return ScrubFixture()


async def test_each_damaged_block_is_reported_once_and_no_other(pool: StoredPool) -> None:
    keyed, raw = pool.table(KEYED), pool.table(RAW)
    pool.commit(keyed, 3, 9)
    pool.commit(raw, 2, 4)
    scrub = block_checks.scrub(
        pool.checksums, pool.reports.extend, lambda: [keyed, raw], FAST, round_bytes=0
    )
    async with in_background(scrub):
        pool.damage(raw, 4)
        await eventually(lambda: pool.reports)
        pool.damage(keyed, 9)
        await eventually(lambda: len(pool.reports) == 2)
    found = [(r.owner, r.blocks.tolist()) for r in pool.reports if isinstance(r, BlocksCorrupted)]
    assert found == [(RAW.owner, [4]), (KEYED.owner, [9])]
    assert keyed.committed_blocks().tolist() == [3]


async def test_every_committed_block_is_read(pool: StoredPool, fixture: ScrubFixture) -> None:
    """Blocks committed during the scrub are read. Corrupt and unverified blocks are not."""
    keyed, raw = fixture.tables = [pool.table(KEYED), pool.table(RAW)]
    pool.commit(keyed, 0, 1, 2, 8)
    pool.commit(raw, 5)
    rate = int(2 * BLOCK / BATCH_SECONDS)
    async with in_background(fixture.scrub(rate, searched=3, round_bytes=0)):
        assert await fixture.next_blocks() == [0, 1]
        assert await fixture.read_next() == [2]
        pool.commit(keyed, 7)
        keyed.mark_corrupt(numbers(8))
        assert await fixture.read_next() == [7]
        assert await fixture.read_next() == [5]
        keyed.mark_unverified(numbers(1, 7))
        keyed.clear_unverified(numbers(7))
        assert await fixture.read_next() == [7]
        raw.close()
        assert await fixture.read_next() == [7]


@pytest.mark.parametrize(
    ("rate", "blocks", "counted", "pause"),
    [(BLOCK, 1, 0, 1.0), (16 * BLOCK, 4, 0, 0.25), (16 * BLOCK, 4, 8 * BLOCK, 2.0)],
)
async def test_the_pause_after_a_batch_follows_from_the_rate(
    pool: StoredPool, fixture: ScrubFixture, rate: int, blocks: int, counted: int, pause: float
) -> None:
    """counted: the bytes that a smaller block counts as."""
    fixture.tables.append(pool.table(RAW))
    pool.commit(fixture.tables[0], *range(8))
    async with in_background(fixture.scrub(rate, counted_bytes=counted)):
        assert await fixture.next_blocks() == list(range(blocks))
        assert await fixture.next_pause() == pause


@pytest.mark.parametrize(("rate", "seconds"), [(1 << 20, 60.0), (1 << 30, 4.0)])
async def test_a_round_over_few_blocks_is_not_repeated_at_once(
    pool: StoredPool, fixture: ScrubFixture, rate: int, seconds: float
) -> None:
    fixture.tables.append(pool.table(RAW))
    pool.commit(fixture.tables[0], 1)
    async with in_background(fixture.scrub(rate)):
        assert await fixture.next_blocks() == [1]
        await fixture.next_pause()
        fixture.resume()
        pause = await fixture.next_pause()
        assert seconds - 1.0 < pause <= seconds
    assert fixture.reads.blocks == [[1]]


async def test_the_scrub_waits_for_the_first_region(
    pool: StoredPool, fixture: ScrubFixture
) -> None:
    async with in_background(fixture.scrub(FAST)):
        assert await fixture.next_pause() > 0
        fixture.tables.append(pool.table(RAW))
        pool.commit(fixture.tables[0], 6)
        fixture.resume()
        assert await fixture.next_blocks() == [6]
