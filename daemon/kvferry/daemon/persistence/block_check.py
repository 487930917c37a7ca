"""Compares committed blocks with their checksums and reports the outcome to the core.

Used by the verification after a restart and by the scrub. If a block is overwritten while it is
read, its version changes, and it is neither verified nor corrupt. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from kvferry.daemon.core.actions import BlocksCorrupted, BlocksVerified, Report
from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.persistence.block_table import BlockTable, Checksums, Versions
from kvferry.daemon.persistence.checksum_client import ChecksumClient, Purpose

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Blocks of one table, with their versions and checksums at the time of the request."""

    table: BlockTable
    blocks: Int64s
    versions: Versions
    expected: Checksums
    purpose: Purpose


class BlockCheck:
    """Compares batches of blocks. report: called with reports for the core."""

    def __init__(self, checksums: ChecksumClient, report: Callable[[list[Report]], None]) -> None:
        self._checksums = checksums
        self._report = report

    def check_blocks(
        self, table: BlockTable, blocks: Int64s, purpose: Purpose, done: Callable[[], None]
    ) -> None:
        """Read one batch of committed blocks and compare it. `done` is called in every case."""
        versions, expected = table.versions(blocks), table.checksums(blocks)
        batch = _Batch(table, blocks, versions, expected, purpose)
        compare = partial(self._compare, batch, done)
        self._checksums.request_checksums(table, blocks, table.keys(blocks), purpose, compare)

    def _compare(self, batch: _Batch, done: Callable[[], None], checksums: Checksums) -> None:
        table, blocks, owner = batch.table, batch.blocks, batch.table.record.owner
        reports: list[Report] = []
        if not table.closed:
            same, good = table.unchanged(blocks, batch.versions), checksums == batch.expected
            if (verified := table.mark_verified(blocks[same & good])).size:
                reports.append(BlocksVerified(owner, verified, table.keys(verified)))
            if (bad := blocks[same & ~good]).size:
                reports.append(BlocksCorrupted(owner, bad, table.keys(bad)))
                table.mark_corrupt(bad)
                log.error(
                    "host blocks corrupt",
                    owner=owner.name,
                    blocks=bad.size,
                    first=int(bad[0]),
                    found_by=batch.purpose.name.lower(),
                )
        if reports:
            self._report(reports)
        done()
