"""Computes the checksums of stored blocks and commits the blocks to the block tables.

Blocks are read in rounds, each once in a round. A block that is stored again meanwhile is read in
the next round. So a round never reads more than the size of the pool, even if stores complete
faster than their checksums are computed. A flow of RegionStore.run. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from kvferry.daemon.core.block_table import UNCOMMITTED
from kvferry.daemon.core.region import Region
from kvferry.daemon.persistence.block_checks import BLOCKS_PER_SEARCH
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
    regions: Callable[[], Sequence[Region]],
    stored: asyncio.Event,
    committed: Callable[[], None],
) -> None:
    """Commit stored blocks, round by round, until cancelled.

    regions: returns the current ones. stored: set whenever a store may have completed.
    committed: called when blocks were committed.
    """

    async def commit(batch: Batch) -> None:
        region, blocks = batch
        versions = region.table.lines.versions(blocks)
        found = await checksums.read_checksums(region, blocks, Purpose.COMMIT)
        if not region.table.closed:
            region.table.commit(blocks, versions, found)
            committed()

    while True:
        await stored.wait()
        await asyncio.sleep(COMMIT_AFTER)
        stored.clear()
        await for_each_batch(_stored_batches(regions()), checksums.window, commit)


def _stored_batches(regions: Sequence[Region]) -> Iterator[Batch]:
    """Batches of blocks that are stored when the batch is taken from the iterator."""
    for region in regions:
        table = region.table
        for at in range(0, table.num_blocks if table.count(*UNCOMMITTED) else 0, BLOCKS_PER_SEARCH):
            found = table.find(*UNCOMMITTED, begin=at, end=at + BLOCKS_PER_SEARCH)
            for part in batches(region.block_bytes, found.size):
                if table.closed:
                    break
                blocks = found[part][table.among(found[part], *UNCOMMITTED)]
                if blocks.size:
                    yield region, blocks
