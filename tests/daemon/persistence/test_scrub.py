"""The scrub reads all committed blocks again and again, at the configured rate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.daemon.core.actions import BlocksCorrupted
from kvferry.daemon.persistence.block_check import BlockCheck
from kvferry.daemon.persistence.checksum_client import Purpose
from kvferry.daemon.persistence.scrub import BATCH_SECONDS, Scrub
from support.eventually import eventually

from .stored_pool import BLOCK, KEYED, RAW, StoredPool, numbers

FAST = 1 << 30


class ScrubbedBlocks:
    def __init__(self) -> None:
        self.requests: list[list[int]] = []
        self.done: Callable[[], None] | None = None

    def check_blocks(
        self, table: Any, blocks: Any, purpose: Purpose, done: Callable[[], None]
    ) -> None:
        assert purpose is Purpose.SCRUB
        assert self.done is None, "two batches at a time"
        self.requests.append(blocks.tolist())
        self.done = done

    def reply(self) -> None:
        done, self.done = self.done, None
        assert done is not None
        done()


async def test_each_damaged_block_is_reported_once_and_no_other(
    pool: StoredPool,
) -> None:
    keyed, raw = pool.table(KEYED), pool.table(RAW)
    pool.commit(keyed, 3, 9)
    pool.commit(raw, 2, 4)
    scrub = Scrub(
        BlockCheck(pool.checksums, pool.reports.extend), FAST, lambda: [keyed, raw], round_bytes=0
    )
    scrub.start()
    pool.damage(raw, 4)
    await eventually(lambda: pool.reports)
    pool.damage(keyed, 9)
    await eventually(lambda: len(pool.reports) == 2)
    scrub.stop()
    found = [(r.owner, r.blocks.tolist()) for r in pool.reports if isinstance(r, BlocksCorrupted)]
    assert found == [(RAW.owner, [4]), (KEYED.owner, [9])]
    assert keyed.committed_blocks().tolist() == [3]


async def test_every_committed_block_is_read(
    pool: StoredPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks committed during the scrub are read. Corrupt and unverified blocks are not."""
    checks, tables = ScrubbedBlocks(), [pool.table(KEYED), pool.table(RAW)]
    pool.commit(tables[0], 0, 1, 2, 8)
    pool.commit(tables[1], 5)
    rate = int(2 * BLOCK / BATCH_SECONDS)
    scrub = Scrub(checks, rate, lambda: tables, searched=3, round_bytes=0)  # type: ignore[arg-type]
    monkeypatch.setattr(scrub, "_pause", lambda seconds: scrub._step())
    scrub.start()

    async def next_blocks() -> list[int]:
        await eventually(lambda: checks.done)
        return checks.requests[-1]

    assert await next_blocks() == [0, 1]
    checks.reply()
    assert await next_blocks() == [2]
    pool.commit(tables[0], 7)
    tables[0].mark_corrupt(numbers(8))
    checks.reply()
    assert await next_blocks() == [7]
    checks.reply()
    assert await next_blocks() == [5]
    tables[0].mark_unverified(numbers(1, 7))
    tables[0].mark_verified(numbers(7))
    checks.reply()
    assert await next_blocks() == [7]
    tables[1].close()
    checks.reply()
    assert await next_blocks() == [7]
    scrub.stop()


@pytest.mark.parametrize(
    ("rate", "blocks", "counted", "pause"),
    [(BLOCK, 1, 0, 1.0), (16 * BLOCK, 4, 0, 0.25), (16 * BLOCK, 4, 8 * BLOCK, 2.0)],
)
async def test_the_pause_after_a_batch_follows_from_the_rate(
    pool: StoredPool,
    rate: int,
    blocks: int,
    counted: int,
    pause: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """counted: the bytes that a smaller block counts as."""
    table, checks, pauses = pool.table(RAW), ScrubbedBlocks(), list[float]()
    pool.commit(table, *range(8))
    scrub = Scrub(checks, rate, lambda: [table], counted_bytes=counted)  # type: ignore[arg-type]
    monkeypatch.setattr(scrub, "_pause", pauses.append)
    scrub.start()
    assert checks.requests == [list(range(blocks))]
    checks.reply()
    assert pauses == [pause]


@pytest.mark.parametrize(("rate", "seconds"), [(1 << 20, 60.0), (1 << 30, 4.0)])
async def test_a_round_over_few_blocks_is_not_repeated_at_once(
    pool: StoredPool, rate: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, checks, waits = pool.table(RAW), ScrubbedBlocks(), list[float]()
    pool.commit(table, 1)
    scrub = Scrub(checks, rate, lambda: [table])  # type: ignore[arg-type]
    monkeypatch.setattr(scrub, "_pause", lambda _: scrub._step())
    monkeypatch.setattr(scrub._loop, "call_later", lambda wait, _: waits.append(wait))
    scrub.start()
    while not waits or not waits[-1]:  # searches follow each other without a wait
        if checks.done:
            checks.reply()
        else:
            scrub._step()
    assert seconds - 1.0 < waits[-1] <= seconds
    assert checks.requests == [[1]]


async def test_a_scrub_rate_of_zero_reads_nothing(pool: StoredPool) -> None:
    table, checks = pool.table(RAW), ScrubbedBlocks()
    pool.commit(table, 1)
    Scrub(checks, 0, lambda: [table]).start()  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert checks.requests == []


async def test_the_scrub_waits_for_the_first_region(pool: StoredPool) -> None:
    checks, tables = ScrubbedBlocks(), list[Any]()
    scrub = Scrub(checks, FAST, lambda: tables, round_bytes=FAST // 100)  # type: ignore[arg-type]
    scrub.start()
    await asyncio.sleep(0.03)
    tables.append(pool.table(RAW))
    pool.commit(tables[0], 6)
    await eventually(lambda: checks.requests)
    assert checks.requests == [[6]]
    scrub.stop()
