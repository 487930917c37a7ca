"""Compares committed blocks with their checksums: once after a restart, and repeatedly.

    verify    compares the blocks of an earlier daemon, which are not loadable before that
    scrub     reads all committed blocks again and again at a limited rate, to find corrupt memory

Both are flows of RegionStore.run. If a block is overwritten while it is read, its version changes,
and it is neither verified nor corrupt. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import structlog

from kvferry.daemon.core.actions import BlocksCorrupted, BlocksVerified, Report
from kvferry.daemon.core.block_table import CHECKED, UNCHECKED
from kvferry.daemon.core.region import Region
from kvferry.daemon.persistence.checksum_client import (
    BATCH_BLOCKS,
    Batch,
    ChecksumClient,
    Purpose,
    batches,
    for_each_batch,
)

# Unverified blocks in order of recency. Within such a range, the blocks of one region are read
# together.
RANGE_BLOCKS = 4 * BATCH_BLOCKS
# Blocks of a block table that are searched without a break.
BLOCKS_PER_SEARCH = 1 << 16
# A batch of the scrub has the bytes of this many seconds at the configured rate, but at least one
# block.
BATCH_SECONDS = 0.25
# The scrub counts a smaller block as this many bytes. Each block costs about 2 us, whatever its
# size: at 64 MiB/s, blocks of 4 KiB would use 3 % of a core.
COUNTED_BYTES = 128 << 10
# A round of the scrub takes at least the time of so many bytes at the configured rate, or
# ROUND_SECONDS if that is less, so that an idle daemon sleeps.
ROUND_BYTES, ROUND_SECONDS = 4 << 30, 60.0

# Passes reports to the core.
ReportToCore: TypeAlias = Callable[[list[Report]], None]

log = structlog.get_logger()


async def check_blocks(
    checksums: ChecksumClient, report: ReportToCore, batch: Batch, purpose: Purpose
) -> None:
    """Read one batch of committed blocks, compare it and report the outcome."""
    region, blocks = batch
    lines = region.table.lines
    versions, expected = lines.versions(blocks), lines.checksums(blocks)
    found = await checksums.read_checksums(region, blocks, purpose)
    if region.table.closed:
        return
    same = region.table.unchanged(blocks, versions)
    blocks, good = blocks[same], (found == expected)[same]
    reports = list[Report]()
    if (verified := blocks[good & region.table.among(blocks, *UNCHECKED)]).size:
        reports.append(BlocksVerified(region.owner, verified))
    if (bad := blocks[~good]).size:
        reports.append(BlocksCorrupted(region.owner, bad))
        log.error(
            "host blocks corrupt",
            owner=region.owner.name,
            blocks=bad.size,
            first=int(bad[0]),
            story=region.table.story.of(int(bad[0])),
            found_by=purpose.name.lower(),
        )
    if reports:
        report(reports)


async def verify(
    checksums: ChecksumClient, report: ReportToCore, unverified: Iterator[Batch]
) -> None:
    """Verify the batches of `unverified_batches`.

    Only a few are requested at a time, so that blocks which are overwritten meanwhile are not read,
    and checksums of new stores are not delayed.
    """
    began, nbytes = time.monotonic(), 0

    async def check(batch: Batch) -> None:
        nonlocal nbytes
        nbytes += batch[1].size * batch[0].block_bytes
        await check_blocks(checksums, report, batch, Purpose.VERIFY)

    await for_each_batch(unverified, checksums.window, check)
    if nbytes:
        seconds = round(time.monotonic() - began, 3)
        log.info("verification complete", bytes=nbytes, seconds=seconds)


def unverified_batches(
    regions: Sequence[Region], *, range_blocks: int = RANGE_BLOCKS
) -> Iterator[Batch]:
    """Batches of unverified blocks of all regions, the most recently used first.

    Sorts at once, which takes long. A batch has the blocks that are unverified when it is read from
    the iterator. range_blocks: see RANGE_BLOCKS.
    """
    unverified_of = [region.table.find(*UNCHECKED) for region in regions]
    blocks = np.concatenate([np.zeros(0, np.int64), *unverified_of])
    owners = np.repeat(np.arange(len(regions)), [blocks.size for blocks in unverified_of])
    tables = [region.table for region in regions]
    stamps = [table.lines.stamps(own) for table, own in zip(tables, unverified_of, strict=True)]
    order = np.argsort(np.concatenate([np.zeros(0, np.uint64), *stamps]), kind="stable")[::-1]

    def ranges() -> Iterator[Batch]:
        for at in range(0, order.size, range_blocks):
            together = order[at : at + range_blocks]
            for owner in np.unique(owners[together]).tolist():
                region, some = regions[owner], blocks[together[owners[together] == owner]]
                for part in batches(region.block_bytes, some.size):
                    if region.table.closed:
                        break
                    unverified = some[part][region.table.among(some[part], *UNCHECKED)]
                    if unverified.size:
                        yield region, unverified

    return ranges()


async def scrub(
    checksums: ChecksumClient,
    report: ReportToCore,
    regions: Callable[[], Sequence[Region]],
    rate: int,
    *,
    counted_bytes: int = COUNTED_BYTES,
    searched: int = BLOCKS_PER_SEARCH,
) -> None:
    """Read all committed blocks repeatedly, until cancelled.

    One batch is read at a time, when no checksum of a store or of the verification is requested.
    Then follows a pause for the time that the batch takes at the configured rate.

    regions: returns the current ones. rate: bytes per second. counted_bytes, searched: see
    COUNTED_BYTES and BLOCKS_PER_SEARCH.
    """
    round_seconds = min(ROUND_SECONDS, ROUND_BYTES / rate)
    while True:
        began = time.monotonic()
        for region in regions():
            at, table, block_bytes = 0, region.table, region.block_bytes
            most = max(1, min(int(rate * BATCH_SECONDS) // block_bytes, BATCH_BLOCKS))
            while not table.closed and at < table.num_blocks:
                end = min(at + searched, table.num_blocks)
                blocks = table.find(*CHECKED, begin=at, end=end)[:most]
                if not blocks.size:
                    at = end
                    await asyncio.sleep(0)
                    continue
                at = int(blocks[-1]) + 1
                await check_blocks(checksums, report, (region, blocks), Purpose.SCRUB)
                await asyncio.sleep(blocks.size * max(block_bytes, counted_bytes) / rate)
        await asyncio.sleep(max(0.0, round_seconds - (time.monotonic() - began)))
