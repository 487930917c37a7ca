"""Checks of blocks: verified or corrupt. A block that is overwritten meanwhile is neither."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.daemon.core.actions import BlocksCorrupted, BlocksVerified
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.persistence.block_check import BlockCheck
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.checksum_client import Purpose
from support.eventually import eventually

from .stored_pool import COUNT, KEYED, RAW, StoredPool, key, numbers


def new_unverified_table(pool: StoredPool, record: RegionRecord) -> BlockTable:
    table = pool.table(record)
    pool.commit(table, *range(COUNT))
    table.mark_unverified(numbers(*range(COUNT)))
    return table


async def check(pool: StoredPool, table: BlockTable, *blocks: int) -> list[Any]:
    """Check blocks. Returns (type, owner, blocks, keys) of each report to the core."""
    done: list[bool] = []
    checks = BlockCheck(pool.checksums, pool.reports.extend)
    checks.check_blocks(table, numbers(*blocks), Purpose.VERIFY, lambda: done.append(True))
    await eventually(lambda: done)
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
    pool.reports.clear()
    assert await check(pool, table, 4, 6) == []


async def test_a_block_with_the_bytes_of_another_is_corrupt(pool: StoredPool) -> None:
    table = new_unverified_table(pool, RAW)
    start = RAW.start
    pool.bytes[start : start + 4096] = pool.bytes[start + 4096 : start + 8192]
    assert [kind for kind, *_ in await check(pool, table, 0)] == [BlocksCorrupted]


async def test_a_block_overwritten_while_read_is_not_reported(pool: StoredPool) -> None:
    table = new_unverified_table(pool, KEYED)
    pool.damage(table, 3)
    done: list[bool] = []
    checks = BlockCheck(pool.checksums, pool.reports.extend)
    checks.check_blocks(table, numbers(2, 3), Purpose.SCRUB, lambda: done.append(True))
    versions = table.invalidate(numbers(2, 3))
    await eventually(lambda: done)
    assert pool.reports == []
    assert table.unchanged(numbers(2, 3), versions).all()


async def test_no_report_is_sent_if_the_region_is_freed_during_the_check(pool: StoredPool) -> None:
    table = new_unverified_table(pool, KEYED)
    done: list[bool] = []
    checks = BlockCheck(pool.checksums, pool.reports.extend)
    checks.check_blocks(table, numbers(2), Purpose.SCRUB, lambda: done.append(True))
    table.close()
    await eventually(lambda: done)
    assert pool.reports == []
