"""Computes the checksums of stored blocks and commits the blocks to the block tables.

Blocks are read in rounds, each once in a round. A block that is stored again meanwhile is read in
the next round. So a round never reads more than the size of the pool, even if stores complete
faster than their checksums are computed. A flow of RegionStore.run. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvferry.daemon.core.tier_actions import BlocksCommitted
from kvferry.daemon.persistence.block_checks import LINES_PER_SEARCH, ReportToCore
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.checksum_client import (
    Batch,
    ChecksumClient,
    Purpose,
    batches,
    for_each_batch,
)

# Seconds between the completion of a store and the start of its round. If the daemon is killed, the
# stores that wait and those of the current round are lost.
COMMIT_AFTER = 0.2


async def write_checksums(
    checksums: ChecksumClient,
    report: ReportToCore,
    tables: Callable[[], Sequence[BlockTable]],
    stored: asyncio.Event,
    *,
    commit_after: float = COMMIT_AFTER,
) -> None:
    """Commit stored blocks, round by round, until cancelled.

    tables: returns the current block tables. stored: set whenever a store has completed.
    """

    async def commit(batch: Batch) -> None:
        table, blocks = batch
        versions = table.versions(blocks)
        found = await checksums.read_checksums(table, blocks, table.keys(blocks), Purpose.COMMIT)
        if table.closed:
            return
        committed = table.commit(blocks, versions, found)
        if keys := table.keys(committed):
            report([BlocksCommitted(table.record.owner, committed, keys)])

    while True:
        await stored.wait()
        await asyncio.sleep(commit_after)
        stored.clear()
        await for_each_batch(_stored_batches(tables()), checksums.window, commit)


def _stored_batches(tables: Sequence[BlockTable]) -> Iterator[Batch]:
    """Batches of blocks that are stored when the batch is taken from the iterator."""
    for table in tables:
        at = 0
        while not table.closed and at < table.num_blocks:
            found = np.flatnonzero(table.stored[at : at + LINES_PER_SEARCH]) + at
            at += LINES_PER_SEARCH
            for part in batches(table.record.block_bytes, found.size):
                if table.closed:
                    break
                blocks = found[part][table.stored[found[part]]]
                if blocks.size:
                    yield table, blocks
