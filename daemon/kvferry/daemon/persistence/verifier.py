"""Verification: compares the blocks of an earlier daemon with their checksums after a restart.

The most recently used blocks of all regions are first. Only a few batches are requested at a time,
so that blocks which are overwritten meanwhile are not read, and checksums of new stores are not
delayed. Event loop only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import structlog

from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.persistence.block_check import BlockCheck
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.checksum_client import BATCH_BLOCKS, Purpose, batches
from kvferry.proto.status import VerificationStatus

# Blocks in order of recency. Within such a range, the blocks of one region are read together.
RANGE_BLOCKS = 4 * BATCH_BLOCKS

log = structlog.get_logger()


class Verifier:
    """window: maximum of batches in flight. range_blocks: see RANGE_BLOCKS."""

    def __init__(self, check: BlockCheck, window: int, *, range_blocks: int = RANGE_BLOCKS) -> None:
        self._check = check
        self._window, self._range_blocks = window, range_blocks
        self._tables: Sequence[BlockTable] = ()
        self._batches: Iterator[tuple[BlockTable, Int64s]] = iter(())
        self._reading = 0
        self._started = 0.0
        self._total_bytes = 0

    @property
    def status(self) -> VerificationStatus | None:
        """Progress of the verification; None if there was nothing to verify."""
        if not self._total_bytes:
            return None
        left = sum(table.unverified_bytes for table in self._tables)
        return VerificationStatus(self._total_bytes, self._total_bytes - left)

    def start(self, tables: Sequence[BlockTable]) -> None:
        """Verify every unverified block of these tables."""
        self._tables = tables
        self._total_bytes = sum(table.unverified_bytes for table in tables)
        if self._total_bytes:
            self._started = time.monotonic()
            self._batches = _most_recent_first(tables, self._range_blocks)
            self._read()

    def _read(self) -> None:
        while self._reading < self._window:
            batch = next(self._batches, None)
            if batch is None:
                break
            self._reading += 1
            self._check.check_blocks(*batch, Purpose.VERIFY, self._compared)
        if not self._reading:
            seconds = round(time.monotonic() - self._started, 3)
            log.info("verification complete", bytes=self._total_bytes, seconds=seconds)

    def _compared(self) -> None:
        self._reading -= 1
        self._read()


def _most_recent_first(
    tables: Sequence[BlockTable], range_blocks: int
) -> Iterator[tuple[BlockTable, Int64s]]:
    """Yields batches of blocks that are unverified when the batch is requested."""
    unverified_of = [
        np.zeros(0, np.int64) if table.unverified is None else np.flatnonzero(table.unverified)
        for table in tables
    ]
    blocks = np.concatenate(unverified_of)
    owners = np.repeat(np.arange(len(tables)), [blocks.size for blocks in unverified_of])
    stamps = np.concatenate(
        [table.stamps(own) for table, own in zip(tables, unverified_of, strict=True)]
    )
    order = np.argsort(stamps, kind="stable")[::-1]
    for at in range(0, order.size, range_blocks):
        together = order[at : at + range_blocks]
        for owner in np.unique(owners[together]).tolist():
            table, some = tables[owner], blocks[together[owners[together] == owner]]
            for part in batches(table.record.block_bytes, some.size):
                if table.closed or table.unverified is None:
                    break
                unverified = some[part][table.unverified[some[part]]]
                if unverified.size:
                    yield table, unverified
