"""Files for the block tables of all regions, so that committed blocks survive a restart.

The server calls it for regions that are created, updated and freed. A descriptor store (systemd)
keeps the descriptors of the files while no daemon runs. No result of a transfer waits for this.
Event loop only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

import structlog

from kvferry.daemon.core.actions import (
    RegionChange,
    RegionCreated,
    RegionFreed,
    RegionUpdated,
)
from kvferry.daemon.core.block_table import UNCHECKED, UNCOMMITTED
from kvferry.daemon.core.records import RecoveredRegion, RegionOwner, RegionRecord
from kvferry.daemon.core.region import Region
from kvferry.daemon.memory.fd_closer import close_later
from kvferry.daemon.persistence.block_checks import (
    ReportToCore,
    scrub,
    unverified_batches,
    verify,
)
from kvferry.daemon.persistence.checksum_client import Batch, ChecksumClient
from kvferry.daemon.persistence.checksum_writer import write_checksums
from kvferry.daemon.persistence.table_file import TableFile, convert_table
from kvferry.proto.errors import KVFerryError
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
class _KeptRegion:
    """A region whose block table is in a file. name: of its descriptor."""

    name: str
    file: TableFile
    region: Region


class RegionStore:
    """The files of the block tables.

    report: called with reports for the core. scrub_rate: bytes per second; 0: no scrub.
    incarnation: of the pool. lends: whether siblings search the regions.
    """

    def __init__(
        self,
        checksums: ChecksumClient,
        fd_store: FdStore,
        report: ReportToCore,
        scrub_rate: int,
        incarnation: int = 0,
        *,
        lends: bool = False,
    ) -> None:
        self._checksums, self._fd_store = checksums, fd_store
        self._report, self._scrub_rate = report, scrub_rate
        self._incarnation, self._lends = incarnation, lends
        self._kept: dict[RegionOwner, _KeptRegion] = {}
        # Set when a store may have completed.
        self._stored = asyncio.Event()
        # Batches to be verified, and the bytes of all that an earlier daemon committed.
        self._unverified: Iterator[Batch] = iter(())
        self._restored_bytes = 0
        self._names = count(1)

    @property
    def busy(self) -> bool:
        """Whether a completed store is not committed yet."""
        return any(region.table.count(*UNCOMMITTED) for region in self._regions())

    @property
    def verification(self) -> VerificationStatus | None:
        """Progress of the verification; None if there was nothing to verify."""
        if not self._restored_bytes:
            return None
        left = self._unverified_bytes()
        return VerificationStatus(self._restored_bytes, self._restored_bytes - left)

    def restore_regions(
        self, kept: Mapping[str, int], restore: Callable[[RecoveredRegion], Region]
    ) -> None:
        """Open the tables of an earlier daemon, the oldest first.

        If a table is invalid, or `restore` raises Refused for its region, the table is dropped and
        a warning is logged.
        """
        names = sorted((name for name in kept if name.startswith(TABLE)), key=number_of)
        for name in names:
            try:
                file = TableFile(self._convert(name, kept[name]))
            except (KVFerryError, OSError) as error:
                log.warning("block table dropped", name=name, reason=str(error))
                self._fd_store.remove_fd(name)
                continue
            record = file.record
            try:
                region = restore(RecoveredRegion(record, file.lines))
            except KVFerryError as error:
                log.warning("region dropped", region=record.name, reason=str(error))
                self._drop_file(name, file)
                continue
            self._attach(name, file, region)
            log.info(
                "region restored",
                region=record.name,
                committed=region.table.count(*UNCHECKED),
                blocks=record.num_blocks,
            )
        self._names = count(1 + max(map(number_of, names), default=0))
        self._unverified = unverified_batches(self._regions())
        self._restored_bytes = self._unverified_bytes()

    async def run(self) -> None:
        """Commit completed stores, verify restored blocks, and scrub, until cancelled.

        Raises Failed (COPY_FAILED) in an exception group if no checksum process can be started.
        """
        async with asyncio.TaskGroup() as tasks:
            checksums, regions = self._checksums, self._regions
            # A report of nothing: tiers look for committed blocks after each report.
            committed = partial(self._report, [])
            tasks.create_task(write_checksums(checksums, regions, self._stored, committed))
            tasks.create_task(verify(checksums, self._report, self._unverified))
            if self._scrub_rate:
                tasks.create_task(scrub(checksums, self._report, regions, self._scrub_rate))
            await self._checksums.run()

    def wake_up(self) -> None:
        """A store may have completed: commit its blocks when their checksums are computed."""
        self._stored.set()

    def apply_change(self, change: RegionChange) -> None:
        """Create, update or drop the file of a region's block table."""
        match change:
            case RegionCreated(record, region):
                self._create_file(record, region)
            case RegionUpdated(record):
                if record.owner in self._kept:
                    self._update_file(record)
            case RegionFreed(owner):
                if (kept := self._kept.pop(owner, None)) is not None:
                    kept.region.table.lines.leave_memory()
                    kept.region.table.key_table = None
                    self._drop_file(kept.name, kept.file)

    def descriptor_of(self, owner: RegionOwner) -> int | None:
        """The descriptor of a region's block table; None if it is in no file."""
        kept = self._kept.get(owner)
        return None if kept is None else kept.file.descriptor

    def close(self) -> None:
        """Close the files; stored descriptors stay stored."""
        for kept in self._kept.values():
            kept.file.close()

    def _regions(self) -> list[Region]:
        return [kept.region for kept in self._kept.values()]

    def _unverified_bytes(self) -> int:
        return sum(each.table.count(*UNCHECKED) * each.block_bytes for each in self._regions())

    def _create_file(self, record: RegionRecord, region: Region) -> None:
        """Move a new block table to a file. If that fails, it is lost when the daemon ends."""
        try:
            file = TableFile.create(record)
        except (KVFerryError, OSError) as error:
            log.warning("region not kept over a restart", region=record.name, reason=str(error))
            return
        region.table.lines.use_memory(file.lines)
        name = f"{TABLE}{next(self._names)}"
        self._attach(name, file, region)
        self._fd_store.store_fd(name, file.descriptor)

    def _attach(self, name: str, file: TableFile, region: Region) -> None:
        """The lines of a region are those of this file, and siblings may search them."""
        if self._lends and file.record.key_bytes:
            region.table.share_keys(file.buckets)
        file.sign(self._incarnation)
        self._kept[file.record.owner] = _KeptRegion(name, file, region)

    def _convert(self, name: str, descriptor: int) -> int:
        """The descriptor of a kept table, in the format of this version if it is of the one before.

        Raises Refused and OSError, and closes the descriptor.
        """
        try:
            new = convert_table(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if new is None:
            return descriptor
        self._fd_store.remove_fd(name)
        self._fd_store.store_fd(name, new)
        os.close(descriptor)
        return new

    def _update_file(self, record: RegionRecord) -> None:
        kept = self._kept[record.owner]
        try:
            kept.file.update(record)
        except KVFerryError as error:
            log.warning(
                "region no longer kept over a restart", region=record.name, reason=str(error)
            )
            del self._kept[record.owner]
            self._drop_file(kept.name, kept.file)

    def _drop_file(self, name: str, file: TableFile) -> None:
        file.mark_void()
        self._fd_store.remove_fd(name)
        file.close()
        close_later(file.unmap)  # frees the memory: 14 ms for a million keys


def number_of(name: str) -> int:
    """The number in a descriptor's name, 0 if there is none."""
    return int("0" + "".join(filter(str.isdecimal, name)))
