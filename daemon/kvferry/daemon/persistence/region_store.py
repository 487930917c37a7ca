"""A block table for each region of the host pool, so that committed blocks survive a restart.

The server calls it for regions that are created, updated and freed, and for stores that start,
complete and end. A descriptor store (systemd) keeps the descriptors of the tables while no daemon
runs. No result of a transfer waits for this. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np
import structlog

from kvferry.daemon.core.actions import (
    CommitBlocks,
    RegionChange,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
    StartTransfer,
)
from kvferry.daemon.core.layout import Bools, Int64s
from kvferry.daemon.core.records import RecoveredRegion, RegionOwner, RegionRecord
from kvferry.daemon.persistence.block_checks import (
    ReportToCore,
    scrub,
    unverified_batches,
    verify,
)
from kvferry.daemon.persistence.block_table import BlockTable, Checksums, UseClock, Versions
from kvferry.daemon.persistence.checksum_client import Batch, ChecksumClient
from kvferry.daemon.persistence.checksum_writer import write_checksums
from kvferry.proto.errors import KVFerryError
from kvferry.proto.specs import Direction
from kvferry.proto.status import VerificationStatus

# Prefix of the names of the tables' descriptors.
TABLE = "block-table-"

log = structlog.get_logger()


class FdStore(Protocol):
    """Keeps descriptors while no daemon runs."""

    def store_fd(self, name: str, descriptor: int) -> None:
        """Store a duplicate of the descriptor."""

    def remove_fd(self, name: str) -> None:
        """Remove the stored descriptor of this name."""


class NullFdStore:
    """Stores nothing: the cache is lost when the daemon ends."""

    def store_fd(self, name: str, descriptor: int) -> None:
        """Do nothing: the descriptor is closed when the process ends."""

    def remove_fd(self, name: str) -> None:
        """Do nothing: no descriptor is stored."""


@dataclass(frozen=True, slots=True, eq=False)
class _InflightStore:
    """The blocks of a store, and the versions that they have until they are overwritten."""

    table: BlockTable
    blocks: Int64s
    versions: Versions


class RegionStore:
    """The block tables of all regions.

    report: called with reports for the core. scrub_rate: bytes per second; 0: no scrub.
    """

    def __init__(
        self,
        checksums: ChecksumClient,
        fd_store: FdStore,
        report: ReportToCore,
        scrub_rate: int,
    ) -> None:
        self._checksums, self._fd_store = checksums, fd_store
        self._report, self._scrub_rate = report, scrub_rate
        self._clock = UseClock()
        self._tables: dict[RegionOwner, tuple[str, BlockTable]] = {}
        self._stores: dict[int, _InflightStore] = {}
        # Set when a store has completed.
        self._stored = asyncio.Event()
        # Batches to be verified, and the bytes of all that an earlier daemon committed.
        self._unverified: Iterator[Batch] = iter(())
        self._restored_bytes = 0
        self._names = count(1)

    @property
    def busy(self) -> bool:
        """Whether a completed store is not committed yet."""
        return any(table.stored.any() for table in self._all_tables())

    @property
    def verification(self) -> VerificationStatus | None:
        """Progress of the verification; None if there was nothing to verify."""
        if not self._restored_bytes:
            return None
        left = sum(table.unverified_bytes for table in self._all_tables())
        return VerificationStatus(self._restored_bytes, self._restored_bytes - left)

    def restore_regions(
        self, kept: Mapping[str, int], restore: Callable[[RecoveredRegion], None]
    ) -> None:
        """Open the tables of an earlier daemon, the oldest first.

        If a table is invalid, or `restore` raises Refused for its region, the table is dropped and
        a warning is logged.
        """
        names = sorted((name for name in kept if name.startswith(TABLE)), key=number_of)
        for name in names:
            try:
                table = BlockTable(kept[name], self._clock)
            except KVFerryError as error:
                log.warning("block table dropped", name=name, reason=str(error))
                self._fd_store.remove_fd(name)
                continue
            found = RecoveredRegion(table.record, table.residents())
            try:
                restore(found)
            except KVFerryError as error:
                log.warning("region dropped", region=table.record.name, reason=str(error))
                self._drop_table(name, table)
                continue
            table.mark_unverified(np.array([each.block for each in found.residents], np.int64))
            self._tables[table.record.owner] = name, table
            log.info(
                "region restored",
                region=table.record.name,
                committed=len(found.residents),
                blocks=table.num_blocks,
            )
        self._names = count(1 + max(map(number_of, names), default=0))
        self._unverified = unverified_batches(self._all_tables())
        self._restored_bytes = sum(table.unverified_bytes for table in self._all_tables())

    async def run(self) -> None:
        """Commit completed stores, verify restored blocks, and scrub, until cancelled.

        Raises Failed (COPY_FAILED) in an exception group if no checksum process can be started.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                write_checksums(self._checksums, self._report, self._all_tables, self._stored)
            )
            tasks.create_task(verify(self._checksums, self._report, self._unverified))
            if self._scrub_rate:
                tasks.create_task(
                    scrub(self._checksums, self._report, self._all_tables, self._scrub_rate)
                )
            await self._checksums.run()

    def apply_change(self, change: RegionChange) -> None:
        """Create, update or drop the table of a region."""
        match change:
            case RegionCreated(record):
                self._create_table(record)
            case RegionUpdated(record, wipe):
                if record.owner in self._tables:
                    self._update_table(record, wipe=wipe)
            case RegionFreed(owner):
                if owner in self._tables:
                    self._drop_table(*self._tables.pop(owner))

    def invalidate_blocks(self, start: StartTransfer) -> None:
        """Mark the blocks of a store as uncommitted.

        Must be called before the device worker gets the transfer.
        """
        if start.plan.direction is Direction.STORE:
            self.begin_store(start.plan.serial, start.block_set.owner, start.block_set.blocks)

    def begin_store(self, serial: int, owner: RegionOwner, blocks: Int64s) -> None:
        """Mark blocks as uncommitted that are about to be written, until `commit_store`."""
        entry = self._tables.get(owner)
        if entry is not None:
            versions = entry[1].invalidate(blocks)
            self._stores[serial] = _InflightStore(entry[1], blocks, versions)

    def touch_blocks(self, start: StartTransfer) -> None:
        """Record the use of a load's blocks. Called after the device worker got the transfer."""
        entry = self._tables.get(start.block_set.owner)
        if entry is not None and start.plan.direction is Direction.LOAD:
            entry[1].touch(start.block_set.blocks)

    def commit_store(self, commit: CommitBlocks) -> None:
        """A store completed. Its blocks are committed once their checksums are computed."""
        store, block_set = self._stores.pop(commit.serial, None), commit.block_set
        if store is None or store.table.closed:
            return
        valid = store.table.unchanged(store.blocks, store.versions)
        if block_set.blocks is not store.blocks:  # there may be fewer, in another order
            valid = np.isin(block_set.blocks, store.blocks[valid])
        store.table.store(block_set.blocks, valid, block_set.keys, block_set.parts)
        self._stored.set()

    def end_store(self, serial: int) -> None:
        """Forget a store that ended. If it was not committed, its blocks stay uncommitted."""
        self._stores.pop(serial, None)

    def checksums_of(self, owner: RegionOwner, blocks: Int64s) -> tuple[Checksums, Bools]:
        """The committed checksums of blocks of a region, and which of them are valid.

        blocks: (n,). Returns uint64 (n,) and bool (n,). An entry is invalid if the block is not
        committed whole or not verified yet, or the region has no table.
        """
        entry = self._tables.get(owner)
        if entry is None:
            return np.zeros(blocks.size, np.uint64), np.zeros(blocks.size, np.bool_)
        return entry[1].checksums(blocks), entry[1].has_checksum(blocks)

    def close(self) -> None:
        """Close the tables; stored descriptors stay stored."""
        for _, table in self._tables.values():
            table.close()

    def _all_tables(self) -> list[BlockTable]:
        return [table for _, table in self._tables.values()]

    def _create_table(self, record: RegionRecord) -> None:
        """Create a table. If that fails, the region is lost when the daemon ends."""
        try:
            table = BlockTable.create(record, self._clock)
        except (KVFerryError, OSError) as error:
            log.warning("region not kept over a restart", region=record.name, reason=str(error))
            return
        name = f"{TABLE}{next(self._names)}"
        self._tables[record.owner] = name, table
        self._fd_store.store_fd(name, table.descriptor)

    def _update_table(self, record: RegionRecord, *, wipe: bool) -> None:
        name, table = self._tables[record.owner]
        if wipe:
            table.clear_commits()
        try:
            table.update(record)
        except KVFerryError as error:
            log.warning(
                "region no longer kept over a restart", region=record.name, reason=str(error)
            )
            del self._tables[record.owner]
            self._drop_table(name, table)

    def _drop_table(self, name: str, table: BlockTable) -> None:
        table.mark_void()
        self._fd_store.remove_fd(name)
        table.close()


def number_of(name: str) -> int:
    """The number in a descriptor's name, 0 if there is none."""
    return int("0" + "".join(filter(str.isdecimal, name)))
