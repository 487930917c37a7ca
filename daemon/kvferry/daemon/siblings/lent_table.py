"""The block table of a sibling's region, as a daemon searches it.

A sibling may change anything between any two instructions. A reader is right if it proceeds so:

    search     version, then key, part and epoch: `usable` if they are those that are wanted
    copy       the bytes of the block
    compare    the head is still valid, and then the version is the same: `unchanged`

The version is odd while a block has contents, and never returns to an earlier value. The head is
void once the region is freed: then versions no longer change. It is signed with the incarnation of
the pool. If a daemon has the pool and not this table, nothing in the table changes either; but the
incarnation page does, before anything writes to the pool. If it has both, it makes all versions
even before it signs the table; so a version that is compared after the head shows that, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvferry.daemon.core.block_lines import Versions, line_type
from kvferry.daemon.core.key_table import (
    BUCKET,
    WAYS,
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
    """Keys of equal length, (n,) each. tags: of the hashes, uint32."""

    keys: Keys
    hashes: Hashes
    tags: Any

    @classmethod
    def of(cls, keys: Sequence[OffloadKey]) -> SoughtKeys:
        joined, hashes = np.frombuffer(b"".join(keys), f"V{len(keys[0])}"), hash_keys(keys)
        return cls(joined, hashes, tags_of(hashes).astype(np.uint32))


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
        # Of unknown keys there is hardly any: only the halves with tags are compared.
        tags = entries.view(np.uint32)[:, ::2]
        hits = np.flatnonzero(tags == sought.tags[:, None])
        if hits.size:
            places, found = hits // WAYS, split_entries(entries.reshape(-1)[hits])[1]
            there = (found >= 0) & (found < self.num_blocks)
            places, found = places[there], found[there]
            lines = self._copy_lines(found)
            good = usable(lines, sought.keys[places], epoch)
            blocks[places[good]] = found[good]
            versions[places[good]] = lines.versions[good]
        return blocks, versions

    def unchanged(self, blocks: Int64s, versions: Int64s) -> Bools:
        """Which blocks have not lost their contents since they had these versions. None of them if
        the table has become void, or another daemon has the pool."""
        valid = self._is_valid()
        same: Bools = self._columns[0].copy(blocks) == versions
        return same & valid

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
