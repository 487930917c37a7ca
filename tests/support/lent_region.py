"""The region of a namespace at a sibling: its block table in a file, with a key table."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from kvferry.daemon.core.block_lines import Part
from kvferry.daemon.core.block_table import OCCUPIED, BlockTable
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.persistence.table_file import TableFile
from kvferry.daemon.siblings.lent_table import LentTable
from kvferry.proto.fingerprint import Fingerprint

BLOCKS, BLOCK = 8, 4096
FINGERPRINT = Fingerprint("llama", BLOCK, key_bytes=8)


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


class LentRegion:
    """A region that a sibling uses. Blocks have the key of their number."""

    def __init__(self, start: int = 0, blocks: int = BLOCKS) -> None:
        self.page = PoolIncarnation()
        name, nbytes, pages = FINGERPRINT.name, blocks * BLOCK, ((BLOCK // 2,),)
        record = RegionRecord(name, start, nbytes, fingerprint=FINGERPRINT, pages=pages, factor=2)
        self.file = TableFile.create(record)
        self.file.sign(self.page.number)
        self.table = BlockTable(blocks, FINGERPRINT.key_bytes)
        self.table.lines.use_memory(self.file.lines)
        self.table.share_keys(self.file.buckets)

    def store(self, *numbers: int, keys: Sequence[bytes] = (), **parts: Part) -> None:
        """Store blocks. An argument `b3` is the stored part of block 3."""
        some, table = np.array(numbers, np.int64), self.table
        table.drop(some[table.among(some, *OCCUPIED)])
        table.set_pending(some)
        names = tuple(keys) or tuple(map(key, numbers))
        table.set_stored(some, names, {int(name[1:]): part for name, part in parts.items()})

    def lent_table(self) -> LentTable:
        """As a sibling opens it."""
        composition = self.file.record.composition
        return LentTable(self.file.descriptor, self.page.descriptor, composition)

    def close(self) -> None:
        self.file.close()
        os.close(self.page.descriptor)
