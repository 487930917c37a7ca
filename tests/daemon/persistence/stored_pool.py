"""A pool of random bytes, and regions with committed blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import xxhash

from kvferry.daemon.core.actions import BlocksCorrupted, BlocksVerified, Report
from kvferry.daemon.core.block_lines import UseClock
from kvferry.daemon.core.block_table import OCCUPIED
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.core.region import Region
from kvferry.daemon.persistence.checksum_client import ChecksumClient, Purpose
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from support.committed_blocks import next_table

BLOCK, COUNT = 4096, 16
FINGERPRINT = Fingerprint("llama", BLOCK, key_bytes=8)
LAYOUT = LayoutArrays.from_layout(
    KVLayout((TensorLayout(4, BLOCK, BLOCK),), ((TensorRef(0, BLOCK),),))
)
KEYED = RegionRecord(FINGERPRINT.name, 0, COUNT * BLOCK, fingerprint=FINGERPRINT)
RAW = RegionRecord("engine", COUNT * BLOCK, COUNT * BLOCK, layout=LAYOUT)


def with_block_bytes(record: RegionRecord, block_bytes: int) -> RegionRecord:
    """The same number of larger blocks. They must not be read: the pool is smaller."""
    assert record.fingerprint is not None
    fingerprint = msgspec.structs.replace(record.fingerprint, host_block_bytes=block_bytes)
    return msgspec.structs.replace(record, nbytes=COUNT * block_bytes, fingerprint=fingerprint)


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def numbers(*blocks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(blocks, dtype=np.int64)


def region_of(record: RegionRecord) -> Region:
    """The region of a record, with a new block table."""
    return Region(record.owner, record.contents, record.start, record.nbytes)


def overwrite(region: Region, *blocks: int) -> Any:
    """A store of these blocks starts. Returns the blocks."""
    table, some = region.table, numbers(*blocks)
    table.drop(some[table.among(some, *OCCUPIED)])
    table.set_pending(some)
    return some


def mark_unverified(region: Region) -> None:
    """As if an earlier daemon had committed the blocks."""
    restored = next_table(region.table, 8 if region.owner.kind == "namespace" else 0)
    restored.lines.use_clock(region.table.lines._clock)
    restored.restore(1)
    region.table = restored


class StoredPool:
    """Two regions of COUNT blocks. It stands in for the checksum client: it reads them itself."""

    window = 4

    def __init__(self) -> None:
        self.bytes = np.random.default_rng(1).integers(0, 255, 2 * COUNT * BLOCK, np.uint8)
        self.clock = UseClock()
        self.regions: list[Region] = []
        self.reports: list[Report] = []

    @property
    def client(self) -> ChecksumClient:
        return cast(ChecksumClient, self)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def read_checksums(self, region: Region, blocks: Any, _: Purpose) -> Any:
        keys = region.table.lines.keys(blocks)
        await asyncio.sleep(0)  # for what happens meanwhile
        return self.checksums(region, blocks.tolist(), keys)

    def checksums(self, region: Region, blocks: Sequence[int], keys: Sequence[bytes]) -> Any:
        seeds = [xxhash.xxh3_64_intdigest(each) for each in keys] or blocks
        starts = [region.start + block * BLOCK for block in blocks]
        found = [
            xxhash.xxh3_64_intdigest(self.bytes[at : at + BLOCK].tobytes(), seed)
            for at, seed in zip(starts, seeds, strict=True)
        ]
        return np.array(found, np.uint64)

    def new_region(self, record: RegionRecord) -> Region:
        self.regions.append(region := region_of(record))
        region.table.lines.use_clock(self.clock)
        return region

    def report(self, reports: list[Report]) -> None:
        """Record reports, and change the block tables as the core does."""
        self.reports += reports
        for report in reports:
            for region in self.regions:
                match report:
                    case BlocksVerified(owner, blocks) if owner == region.owner:
                        region.table.set_verified(blocks)
                    case BlocksCorrupted(owner, blocks) if owner == region.owner:
                        region.table.drop(blocks)

    def commit(self, region: Region, *blocks: int) -> None:
        names = tuple(map(key, blocks)) if region.owner.kind == "namespace" else ()
        table, block_ids = region.table, overwrite(region, *blocks)
        table.set_stored(block_ids, names)
        checksums = self.checksums(region, blocks, names)
        table.commit(block_ids, table.lines.versions(block_ids), checksums)

    def damage(self, region: Region, block: int) -> None:
        self.bytes[region.start + block * BLOCK + 100] ^= 1
