"""A pool of random bytes, its checksum process, and block tables with committed blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.memory.shared_memory import MappedFiles
from kvferry.daemon.persistence.block_table import BlockTable, UseClock
from kvferry.daemon.persistence.checksum_client import ChecksumClient
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef

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


class StoredPool:
    """Two regions of COUNT blocks. Each block is one chunk of the pool."""

    def __init__(self) -> None:
        self.memory = MappedFiles("kvferry-test", 2 * COUNT * BLOCK, BLOCK)
        memory = (ctypes.c_ubyte * self.memory.nbytes).from_address(self.memory.address)
        self.bytes = np.ctypeslib.as_array(memory)
        self.bytes[:] = np.random.default_rng(1).integers(0, 255, self.bytes.shape)
        self.checksums = ChecksumClient(self.memory.descriptors, BLOCK, 2)
        self.clock = UseClock()
        self.tables: list[BlockTable] = []
        self.reports: list[Report] = []

    def table(self, record: RegionRecord) -> BlockTable:
        self.tables.append(table := BlockTable.create(record, self.clock))
        return table

    def commit(self, table: BlockTable, *blocks: int, keys: Sequence[bytes] = ()) -> None:
        block_ids, record = numbers(*blocks), table.record
        names = keys or (tuple(map(key, blocks)) if record.key_bytes else ())
        seeds = [xxhash.xxh3_64_intdigest(name) for name in names] or blocks
        starts = [record.start + block * BLOCK for block in blocks]
        checksums = [
            xxhash.xxh3_64_intdigest(self.bytes[at : at + BLOCK].tobytes(), seed)
            for at, seed in zip(starts, seeds, strict=True)
        ]
        versions = table.invalidate(block_ids)
        table.store(block_ids, table.unchanged(block_ids, versions), names, {})
        table.commit(block_ids, versions, np.array(checksums, np.uint64))

    def damage(self, table: BlockTable, block: int) -> None:
        self.bytes[table.record.start + block * BLOCK + 100] ^= 1

    async def close(self) -> None:
        await self.checksums._process.close()
        for table in self.tables:
            if not table.closed:
                table.close()
        self.memory.close()
