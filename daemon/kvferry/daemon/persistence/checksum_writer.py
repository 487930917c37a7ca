"""Computes the checksums of completed stores and commits their blocks to the block tables.

Stores are processed in rounds. A round contains many stores, and reads each block once, after its
last store. Stores that complete during a round wait for the next one. So a round never reads more
than the size of the pool, even if stores complete faster than their checksums are computed. Event
loop only.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvferry.daemon.core.actions import BlockSet
from kvferry.daemon.persistence.block_table import BlockTable, Versions
from kvferry.daemon.persistence.checksum_client import (
    ChecksumClient,
    Purpose,
    batches,
    for_each_batch,
)

# Seconds between the completion of a store and the start of its round. If the daemon is killed, the
# stores that wait and those of the current round are lost.
COMMIT_AFTER = 0.2
# Minimum of waiting blocks before those that were overwritten are dropped.
MIN_WAITING_BLOCKS = 1 << 14


@dataclass(frozen=True, slots=True)
class CompletedStore:
    """A completed store, and the versions that its blocks have until they are overwritten."""

    table: BlockTable
    block_set: BlockSet
    versions: Versions

    def slice_blocks(self, part: slice) -> CompletedStore:
        """The same store with a part of its blocks."""
        block_set = self.block_set
        smaller = BlockSet(
            block_set.owner, block_set.blocks[part], block_set.keys[part], block_set.parts
        )
        return replace(self, block_set=smaller, versions=self.versions[part])


class ChecksumWriter:
    """Completed stores that are not committed yet, and the flow that commits them.

    committed: called with blocks of a namespace that were committed, and their keys.
    commit_after, min_waiting: see COMMIT_AFTER and MIN_WAITING_BLOCKS.
    """

    def __init__(
        self,
        checksums: ChecksumClient,
        committed: Callable[[BlockSet], None],
        *,
        commit_after: float = COMMIT_AFTER,
        min_waiting: int = MIN_WAITING_BLOCKS,
    ) -> None:
        self._checksums, self._committed = checksums, committed
        self._commit_after, self._min_waiting = commit_after, min_waiting
        # Stores of this round, and of the next one.
        self._round: list[CompletedStore] = []
        self._stores: list[CompletedStore] = []
        self._added = asyncio.Event()
        # Blocks of the next round, and the number above which overwritten ones are dropped.
        self._waiting, self._max_waiting = 0, min_waiting

    @property
    def busy(self) -> bool:
        """Whether a completed store is not committed yet."""
        return bool(self._round or self._stores)

    def add_store(self, store: CompletedStore) -> None:
        if not store.block_set.blocks.size:  # all of its keys were present
            return
        self._stores.append(store)
        self._waiting += store.block_set.blocks.size
        if self._waiting > self._max_waiting:
            self._drop_overwritten()
        self._added.set()

    async def write_checksums(self) -> None:
        """Commit the added stores, round by round, until cancelled."""
        while True:
            await self._added.wait()
            await asyncio.sleep(self._commit_after)
            self._added.clear()
            self._drop_overwritten()
            self._round, self._stores, self._waiting = self._stores, [], 0
            batches_of_round = (
                store.slice_blocks(part)
                for store in self._round
                for part in batches(store.table.record.block_bytes, store.block_set.blocks.size)
            )
            await for_each_batch(batches_of_round, self._checksums.window, self._commit)
            self._round = []

    async def _commit(self, store: CompletedStore) -> None:
        """Compute the checksums of one batch and commit it."""
        table, block_set = store.table, store.block_set
        checksums = await self._checksums.read_checksums(
            table, block_set.blocks, block_set.keys, Purpose.COMMIT
        )
        if table.closed:
            return
        same = table.commit(
            block_set.blocks, store.versions, checksums, block_set.keys, block_set.parts
        )
        if block_set.keys and same.any():
            places = np.flatnonzero(same)
            keys = tuple([block_set.keys[place] for place in places.tolist()])
            self._committed(BlockSet(block_set.owner, block_set.blocks[places], keys))

    def _drop_overwritten(self) -> None:
        """Join the stores of each table, without blocks that were overwritten."""
        by_table: defaultdict[BlockTable, list[CompletedStore]] = defaultdict(list)
        for store in self._stores:
            if not store.table.closed:
                by_table[store.table].append(store)
        self._stores = [_joined(table, stores) for table, stores in by_table.items()]
        self._waiting = sum([store.block_set.blocks.size for store in self._stores])
        self._max_waiting = max(self._min_waiting, 2 * self._waiting)


def _joined(table: BlockTable, stores: list[CompletedStore]) -> CompletedStore:
    """The stores of one table as one store, without blocks that were overwritten."""
    blocks = np.concatenate([store.block_set.blocks for store in stores])
    versions = np.concatenate([store.versions for store in stores])
    keys = [key for store in stores for key in store.block_set.keys]
    parts: dict[int, tuple[int, int]] = {}
    for store in stores:  # if a later store covers the whole block, the block is whole
        if parts:
            for block in parts.keys() & set(store.block_set.blocks.tolist()):
                del parts[block]
        parts |= store.block_set.parts
    last = table.unchanged(blocks, versions)
    if not last.all():
        keys = [key for key, same in zip(keys, last.tolist(), strict=False) if same]
        blocks, versions = blocks[last], versions[last]
    return CompletedStore(table, BlockSet(table.record.owner, blocks, tuple(keys), parts), versions)
