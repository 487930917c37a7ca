"""The block table of a sibling's region, as a daemon searches it.

A sibling may change anything between any two instructions. A reader is right if it proceeds so:

    search     version, then key, part and epoch: `usable` if they are those that are wanted
    copy       the bytes of the block
    compare    the version is the same, and the head is still valid: `unchanged`

The version is odd while a block has contents, and never returns to an earlier value. The head is
void once the region is freed: then versions no longer change. It is signed with the incarnation of
the pool. If a daemon has the pool and not this table, nothing in the table changes either; but the
incarnation page does, before anything writes to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvferry.daemon.core.block_lines import Versions, line_type
from kvferry.daemon.core.key_table import (
    BUCKET,
    Hashes,
    bucket_count,
    buckets_of,
    hash_keys,
    split_entries,
    tags_of,
)
from kvferry.daemon.memory.foreign_memory import WORD, ForeignColumn, ForeignMemory
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.daemon.persistence.table_file import (
    COMPOSITION_WORD,
    HEAD_WORDS,
    INCARNATION_WORD,
    LINES_AT,
    MAGIC_VALUE,
    MAGIC_WORD,
    buckets_at,
    check_table_size,
    read_record,
)
from kvferry.proto.keys import OffloadKey
from kvferry.proto.layout import Bools, Int64s

_ONE = np.uint32(1)
_HEAD = np.arange(HEAD_WORDS)
Keys: TypeAlias = np.ndarray[Any, np.dtype[np.void]]


class SoughtKeys(NamedTuple):
    """Keys of equal length, (n,) each."""

    keys: Keys
    hashes: Hashes

    @classmethod
    def of(cls, keys: Sequence[OffloadKey]) -> SoughtKeys:
        joined = np.frombuffer(b"".join(keys), f"V{len(keys[0])}")
        return cls(joined, hash_keys(keys))


class LineCopies(NamedTuple):
    """Copies of lines, (n,) each; parts (n, 2). Taken in this order."""

    versions: Versions
    keys: Keys
    parts: Any
    epochs: Any


def usable(lines: LineCopies, keys: Keys, epoch: int) -> Bools:
    """Which lines have these keys as contents, whole, in this epoch."""
    odd = lines.versions & _ONE == _ONE
    whole = lines.parts[:, 1] == 0
    same: Bools = odd & whole & (lines.keys == keys) & (lines.epochs == epoch)
    return same


class LentTable:
    """The table and the incarnation page of the pool. Any thread.

    composition: see NamespaceContents. num_blocks: number of its lines. The caller owns the
    descriptors. Raises Refused (BAD_LAYOUT, NOT_SHAREABLE) if they are others, and OSError.
    """

    def __init__(self, table: int, page: int, composition: int) -> None:
        memory = ForeignMemory(table, "the block table")
        record = read_record(memory.copy_bytes, check_table_size(memory.nbytes))
        self.num_blocks, self._composition = record.num_blocks, composition
        self._buckets_count, self._key_bytes = bucket_count(self.num_blocks), record.key_bytes
        self._head = memory.column(WORD, 0, HEAD_WORDS)
        self._incarnation = ForeignMemory(page, "the incarnation page", PAGE).column(WORD, 0, 1)
        count = self._buckets_count if self._key_bytes else 0
        self._buckets = memory.column(BUCKET, buckets_at(record), count)
        kind = line_type(self._key_bytes)
        self._columns: tuple[ForeignColumn, ...] = tuple(
            memory.column(kind, LINES_AT, self.num_blocks, name)
            for name in ("version", "key", "part", "epoch")
        )

    def find(self, sought: SoughtKeys, epoch: int) -> tuple[Int64s, Int64s]:
        """The block of each key, -1 if there is none, and its version."""
        blocks = np.full(len(sought.keys), -1)
        versions = np.zeros_like(blocks)
        if sought.keys.dtype.itemsize != self._key_bytes or not self._is_valid():
            return blocks, versions
        entries = self._buckets.copy(buckets_of(sought.hashes, self._buckets_count))
        tags, numbers = split_entries(entries)
        places, ways = np.nonzero(
            (tags == tags_of(sought.hashes)[:, None]) & (numbers >= 0) & (numbers < self.num_blocks)
        )
        if places.size:
            found = numbers[places, ways]
            lines = self._copy_lines(found)
            good = usable(lines, sought.keys[places], epoch)
            blocks[places[good]] = found[good]
            versions[places[good]] = lines.versions[good]
        return blocks, versions

    def unchanged(self, blocks: Int64s, versions: Int64s) -> Bools:
        """Which blocks have not lost their contents since they had these versions. None of them if
        the table has become void, or another daemon has the pool."""
        same: Bools = self._columns[0].copy(blocks) == versions
        return same & self._is_valid()

    def unmap(self) -> None:
        """Unmap the files. They must not be used again."""
        del self._head, self._incarnation, self._buckets, self._columns

    def _copy_lines(self, blocks: Int64s) -> LineCopies:
        return LineCopies(*(column.copy(blocks) for column in self._columns))

    def _is_valid(self) -> bool:
        head = self._head.copy(_HEAD).tolist()
        return bool(
            head[MAGIC_WORD] == MAGIC_VALUE
            and head[COMPOSITION_WORD] == self._composition
            and head[INCARNATION_WORD] == self._incarnation.read()
        )
