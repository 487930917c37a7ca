"""The block table of a region: for each host block whether it is committed, its key and checksum.

It is a memfd, so it outlives the daemon while another process has its descriptor. The daemon may be
killed between any two instructions. The order of writes keeps the table consistent:

    invalidate   before a store may write a block: `committed` is cleared, the version grows
    store        after the store: key and part are written
    commit       once the checksum is computed: it is written first, the flag `committed` last

So a committed block always matches its checksum. If the daemon ends, a block that was stored but
not committed is a miss. The file has space for two records of the region, and a number that selects
the valid one. Event loop only.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from kvferry.daemon.core.block_ids import largest
from kvferry.daemon.core.layout import Bools, Int64s
from kvferry.daemon.core.records import RegionRecord, ResidentBlock, decode_record, encode_record
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.keys import OffloadKey
from kvferry.shm.memfd import check_sealed, sealed_memfd

# The last character is the version of the format.
MAGIC = b"kvferry2"
# Bytes reserved for a record; pages that are never written take no memory.
RECORD_BYTES = 1 << 20
LINES_AT = PAGE + 2 * RECORD_BYTES
# A larger stamp is damaged: no daemon counts so far.
MAX_STAMP = 1 << 62
# Lines cleared at a time, so that they stay in the CPU's cache.
CLEARED_LINES = 4096
# MAGIC, and the number of the valid record: 0 or 1.
_HEAD = struct.Struct("<8sQ")
# Length and CRC-32 of the record that follows.
_RECORD = struct.Struct("<II")

_ONE = np.uint32(1)

Versions: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]
Checksums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


class UseClock:
    """Counts uses of blocks in all tables, so that their recency can be compared."""

    def __init__(self) -> None:
        self.now = 0

    def advance(self, uses: int) -> int:
        """Count some uses; return the stamp of the last one."""
        self.now += uses
        return self.now


class BlockTable:
    """The block table in a memfd. Owns the descriptor.

    blank: the table is new. Its lines are not read, because that would allocate their pages.
    Raises Refused (BAD_LAYOUT, NOT_SHAREABLE) and closes the descriptor if it is no block table of
    this version.
    """

    def __init__(
        self, descriptor: int, clock: UseClock | None = None, *, blank: bool = False
    ) -> None:
        self.descriptor = descriptor
        self._clock = clock or UseClock()
        try:
            check_sealed(descriptor, "a kept block table")
            nbytes = os.fstat(descriptor).st_size
            if nbytes <= LINES_AT:
                message = f"the block table has {nbytes} bytes, not more than {LINES_AT}"
                raise Refused(Code.BAD_LAYOUT, message, nbytes)
            self._file = mmap.mmap(descriptor, 0)
            self.record = self._read_record()
            if nbytes != (expected := _file_bytes(self.record)):
                message = f"the block table has {nbytes} bytes, but its record needs {expected}"
                raise Refused(Code.BAD_LAYOUT, message, nbytes)
            self._lines = np.frombuffer(self._file, _line(self.record), -1, LINES_AT)
        except BaseException:
            os.close(descriptor)
            raise
        # Blocks that an earlier daemon committed, not yet compared with their checksums.
        self.unverified: Bools | None = None
        self._unverified_count = 0
        self._committed, self._versions = self._lines["committed"], self._lines["version"]
        self._stamps = self._lines["stamp"]
        # Blocks whose store completed, and that are not committed yet.
        self.stored: Bools = np.zeros(self.num_blocks, np.bool_)
        self.closed = False
        # No line from here on was ever used. Those of a blank table must not be read.
        self._end = 0
        if not blank:
            self._end = self.num_blocks
            self._continue_stamps()

    @classmethod
    def create(cls, record: RegionRecord, clock: UseClock | None = None) -> BlockTable:
        """Create a table without committed blocks.

        Raises Refused (BAD_LAYOUT) if the record is too long, and OSError.
        """
        data = _packed(record)
        descriptor = sealed_memfd("kvferry-block-table", _file_bytes(record))
        os.pwrite(descriptor, data, PAGE)
        os.pwrite(descriptor, _HEAD.pack(MAGIC, 0), 0)
        return cls(descriptor, clock, blank=True)

    @property
    def num_blocks(self) -> int:
        return self._lines.size

    @property
    def unverified_bytes(self) -> int:
        return 0 if self.closed else self._unverified_count * self.record.block_bytes

    def mark_unverified(self, blocks: Int64s) -> None:
        """Mark blocks that an earlier daemon committed; all other blocks become uncommitted."""
        unverified = np.zeros(self.num_blocks, np.bool_)
        unverified[blocks] = True
        self._committed &= unverified
        self.unverified, self._unverified_count = unverified if blocks.size else None, blocks.size

    def clear_unverified(self, blocks: Int64s) -> Int64s:
        """Mark blocks as compared or lost. Returns those that were unverified."""
        if self.unverified is None:
            return blocks[:0]
        decided = blocks[self.unverified[blocks]]
        self.unverified[decided] = False
        self._unverified_count -= decided.size
        if not self._unverified_count:
            self.unverified = None
        return decided

    def mark_corrupt(self, blocks: Int64s) -> None:
        """Mark blocks whose bytes are lost as uncommitted, until they are stored again."""
        self._committed[blocks] = self.stored[blocks] = False
        self._versions[blocks] += _ONE
        self.clear_unverified(blocks)

    def update(self, record: RegionRecord) -> None:
        """Replace the record. Number and size of the blocks, and the size of keys, must not change.

        Raises Refused (BAD_LAYOUT) if it is too long.
        """
        data = _packed(record)
        _, current = _HEAD.unpack_from(self._file)
        other = 1 - current
        at = PAGE + other * RECORD_BYTES
        self._file[at : at + len(data)] = data
        _HEAD.pack_into(self._file, 0, MAGIC, other)
        self.record = record

    def mark_void(self) -> None:
        """Make the file an invalid block table, for every process that has its descriptor."""
        _HEAD.pack_into(self._file, 0, bytes(8), 0)

    def clear_commits(self) -> None:
        """Mark every block as uncommitted."""
        self.unverified, self._unverified_count = None, 0
        for at in range(0, self._end, CLEARED_LINES):
            end = min(at + CLEARED_LINES, self._end)
            self._committed[at:end] = self.stored[at:end] = False
            self._versions[at:end] += _ONE

    def invalidate(self, blocks: Int64s) -> Versions:
        """Mark blocks as uncommitted before a store writes them. Returns their versions."""
        self._end = max(self._end, largest(blocks) + 1)
        self.mark_corrupt(blocks)
        self.touch(blocks)
        return self.versions(blocks)

    def store(
        self,
        blocks: Int64s,
        valid: Bools,
        keys: Sequence[OffloadKey],
        parts: dict[int, tuple[int, int]],
    ) -> None:
        """Mark blocks as stored, except those that were invalidated again.

        blocks, valid: (n,). keys: n, or none. parts: the stored sub-blocks (from, to) of blocks
        that were not stored whole.
        """
        lines, blocks = self._lines, blocks[valid]
        if keys:
            names = np.frombuffer(b"".join(keys), lines.dtype["key"])
            lines["key"][blocks] = names[valid]
        places = [parts.get(block, (0, 0)) for block in blocks.tolist()] if parts else []
        lines["part"][blocks] = places or (0, 0)
        self.stored[blocks] = True

    def commit(self, blocks: Int64s, versions: Versions, checksums: Checksums) -> Int64s:
        """Commit stored blocks, except those that were invalidated after they had these versions.

        blocks, versions, checksums: (n,). Returns the committed blocks.
        """
        same = self.unchanged(blocks, versions)
        blocks = blocks[same]
        self._lines["checksum"][blocks] = checksums[same]
        self._committed[blocks] = True
        self.stored[blocks] = False
        return blocks

    def touch(self, blocks: Int64s) -> None:
        """Record a use of blocks; the first becomes the most recent."""
        now = self._clock.advance(blocks.size)
        if blocks.size == 1:
            self._stamps[blocks] = now
        else:
            self._stamps[blocks] = now - np.arange(blocks.size)

    def unchanged(self, blocks: Int64s, versions: Versions) -> Bools:
        """Which blocks were not invalidated since they had these versions."""
        same: Bools = self._versions[blocks] == versions
        return same

    def committed_blocks(self, begin: int = 0, end: int = sys.maxsize) -> Int64s:
        """The committed blocks from `begin` to `end` - 1."""
        return np.flatnonzero(self._committed[begin : min(end, self._end)]) + begin

    def stamps(self, blocks: Int64s) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """The time of the last use of each block; larger is more recent."""
        stamps: np.ndarray[Any, np.dtype[np.uint64]] = self._stamps[blocks]
        return stamps

    def versions(self, blocks: Int64s) -> Versions:
        versions: Versions = self._versions[blocks]
        return versions

    def checksums(self, blocks: Int64s) -> Checksums:
        checksums: Checksums = self._lines["checksum"][blocks]
        return checksums

    def has_checksum(self, blocks: Int64s) -> Bools:
        """Which blocks are committed whole, and known to match their checksum."""
        valid: Bools = self._committed[blocks] & (self._lines["part"][blocks, 1] == 0)
        return valid if self.unverified is None else valid & ~self.unverified[blocks]

    def keys(self, blocks: Int64s) -> tuple[OffloadKey, ...]:
        """The keys of stored or committed blocks; empty if blocks of this region have no keys."""
        if not self.record.key_bytes:
            return ()
        return tuple(self._lines["key"][blocks].tolist())

    def residents(self) -> tuple[ResidentBlock, ...]:
        """Committed blocks, least recent first. If a key occurs twice, the recent block wins."""
        blocks = self.committed_blocks()
        blocks = blocks[np.argsort(self._stamps[blocks], kind="stable")]
        keys = self.keys(blocks) or (b"",) * blocks.size
        parts = [tuple(part) if part[1] else None for part in self._lines["part"][blocks].tolist()]
        residents = tuple(map(ResidentBlock, blocks.tolist(), keys, parts))
        if not self.record.key_bytes or len(set(keys)) == len(keys):
            return residents
        last = {resident.key: resident for resident in residents}
        return tuple(resident for resident in residents if last[resident.key] is resident)

    def close(self) -> None:
        """Unmap the table and close its descriptor; a stored duplicate stays valid."""
        self.closed = True
        del self._lines, self._committed, self._versions, self._stamps
        self._file.close()
        os.close(self.descriptor)

    def _continue_stamps(self) -> None:
        most = int(self._stamps.max(initial=0))
        if most >= MAX_STAMP:
            order = np.argsort(self._stamps, kind="stable")
            self._stamps[order] = np.arange(most := order.size)
        self._clock.now = max(self._clock.now, most)

    def _read_record(self) -> RegionRecord:
        magic, current = _HEAD.unpack_from(self._file)
        if magic != MAGIC or current > 1:
            message = f"the file begins with {magic.hex()}: no block table of this version"
            raise Refused(Code.BAD_LAYOUT, message, magic.hex())
        at = PAGE + current * RECORD_BYTES
        length, crc = _RECORD.unpack_from(self._file, at)
        data = self._file[at + _RECORD.size : at + _RECORD.size + min(length, RECORD_BYTES)]
        if zlib.crc32(data) != crc:
            message = f"the record of {length} bytes in the block table has a wrong CRC"
            raise Refused(Code.BAD_LAYOUT, message, length)
        try:
            record = decode_record(data, RegionRecord)
            _line(record)
        except (msgspec.MsgspecError, KVFerryError, ValueError) as error:
            message = f"the record of the block table cannot be decoded: {error}"
            raise Refused(Code.BAD_LAYOUT, message) from error
        return record


def _packed(record: RegionRecord) -> bytes:
    data = encode_record(record)
    if _RECORD.size + len(data) > RECORD_BYTES:
        message = (
            f"the record of region {record.name!r} has {len(data)} bytes, more than {RECORD_BYTES}"
        )
        raise Refused(Code.BAD_LAYOUT, message, len(data))
    return _RECORD.pack(len(data), zlib.crc32(data)) + data


def _file_bytes(record: RegionRecord) -> int:
    return LINES_AT + _line(record).itemsize * record.num_blocks


def _line(record: RegionRecord) -> np.dtype[np.void]:
    """The dtype of the line of a block.

    stamp: time of the last use (UseClock). part: stored sub-blocks (from, to); (0, 0): all.
    version: grows with each invalidation.
    """
    fields = [
        ("stamp", "<u8"),
        ("checksum", "<u8"),
        ("part", "<u4", (2,)),
        ("version", "<u4"),
        ("committed", "?"),
        ("key", f"V{max(1, record.key_bytes)}"),
    ]
    return np.dtype(fields, align=True)
