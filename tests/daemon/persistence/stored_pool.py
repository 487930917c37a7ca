"""A pool of random bytes, its checksum process, and regions with committed blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import xxhash

from kvferry.daemon.core.actions import BlocksCorrupted, BlocksVerified, Report
from kvferry.daemon.core.block_lines import UseClock
from kvferry.daemon.core.block_table import OCCUPIED
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.core.region import Region
from kvferry.daemon.memory.shared_memory import MappedFiles
from kvferry.daemon.persistence.checksum_client import ChecksumClient
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
    """Two regions of COUNT blocks. Each block is one chunk of the pool."""

    def __init__(self) -> None:
        self.memory = MappedFiles("kvferry-test", 2 * COUNT * BLOCK, BLOCK)
        memory = (ctypes.c_ubyte * self.memory.nbytes).from_address(self.memory.address)
        self.bytes = np.ctypeslib.as_array(memory)
        self.bytes[:] = np.random.default_rng(1).integers(0, 255, self.bytes.shape)
        self.clock = UseClock()
        self.regions: list[Region] = []
        self.reports: list[Report] = []

    @cached_property
    def checksums(self) -> ChecksumClient:
        return ChecksumClient(self.memory.descriptors, BLOCK, 2)

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

    def commit(self, region: Region, *blocks: int, keys: Sequence[bytes] = ()) -> None:
        keyed = region.owner.kind == "namespace"
        names = keys or (tuple(map(key, blocks)) if keyed else ())
        seeds = [xxhash.xxh3_64_intdigest(name) for name in names] or blocks
        starts = [region.start + block * BLOCK for block in blocks]
        checksums = [
            xxhash.xxh3_64_intdigest(self.bytes[at : at + BLOCK].tobytes(), seed)
            for at, seed in zip(starts, seeds, strict=True)
        ]
        table, block_ids = region.table, overwrite(region, *blocks)
        table.set_stored(block_ids, names)
        table.commit(block_ids, table.lines.versions(block_ids), np.array(checksums, np.uint64))

    def damage(self, region: Region, block: int) -> None:
        self.bytes[region.start + block * BLOCK + 100] ^= 1

    async def close(self) -> None:
        if "checksums" in vars(self):
            await self.checksums._process.close()
        self.memory.close()
