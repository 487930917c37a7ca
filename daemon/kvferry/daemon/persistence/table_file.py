"""The file of a block table: the lines of a region's host blocks, and the record of the region.

It is a memfd, so it outlives the daemon while another process has its descriptor. Layout:

    0                          the head: the words MAGIC, number of the valid record, composition
                               (0: void) and incarnation of the pool
    PAGE                       record 0: length, CRC-32, data
    PAGE + RECORD_BYTES        record 1
    LINES_AT                   a line for each host block (core/block_lines.py)
    buckets_at                 the key table, if blocks have keys (core/key_table.py)

A record is written where the valid one is not, then the number changes. A daemon that has created
or adopted the table signs it with the incarnation of its pool. A sibling has mapped the file to be
read only, and may read it at any time (siblings/lent_table.py). Event loop only.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np

from kvferry.daemon.core.block_lines import Lines, line_type
from kvferry.daemon.core.key_table import BUCKET, Hashes, bucket_count
from kvferry.daemon.core.records import RegionRecord, decode_record, encode_record
from kvferry.daemon.memory.foreign_memory import SharedWords
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.shm.memfd import check_sealed, sealed_memfd

# The last character is the version of the format. The one before had no epochs.
MAGIC, OLD_MAGIC = b"kvferry3", b"kvferry2"
# Bytes reserved for a record; pages that are never written take no memory.
RECORD_BYTES = 1 << 20
LINES_AT = PAGE + 2 * RECORD_BYTES
# The words of the head.
MAGIC_WORD, NUMBER_WORD, COMPOSITION_WORD, INCARNATION_WORD = range(4)
HEAD_WORDS = 4
MAGIC_VALUE = int.from_bytes(MAGIC, "little")
_HEAD = struct.Struct("<8sQ")
# Length and CRC-32 of the record that follows.
_RECORD = struct.Struct("<II")


class TableFile:
    """A mapped file with the block table of a region. Owns the descriptor.

    lines: stay mapped as long as they are used. Raises Refused (BAD_LAYOUT, NOT_SHAREABLE) and
    closes the descriptor if it is no block table of this version.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        try:
            check_sealed(descriptor, "a kept block table")
            self._file = mmap.mmap(descriptor, check_table_size(os.fstat(descriptor).st_size))
            self.record = record = read_record(self._copy_bytes, len(self._file))
            self._head = SharedWords(self._file, 0, HEAD_WORDS)
            dtype = line_type(record.key_bytes)
            self.lines: Lines = np.frombuffer(self._file, dtype, record.num_blocks, LINES_AT)
            self._head.write(COMPOSITION_WORD, record.composition)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def create(cls, record: RegionRecord) -> TableFile:
        """Create a file whose lines were never used.

        Raises Refused (BAD_LAYOUT) if the record is too long, and OSError.
        """
        data = _packed(record)
        descriptor = sealed_memfd("kvferry-block-table", _file_bytes(record))
        os.pwrite(descriptor, data, PAGE)
        os.pwrite(descriptor, _HEAD.pack(MAGIC, 0), 0)
        return cls(descriptor)

    def update(self, record: RegionRecord) -> None:
        """Replace the record. Number and size of the blocks, and the size of keys, must not change.

        Raises Refused (BAD_LAYOUT) if it is too long.
        """
        data = _packed(record)
        other = 1 - self._head.read(NUMBER_WORD)
        at = PAGE + other * RECORD_BYTES
        self._file[at : at + len(data)] = data
        self._head.write(NUMBER_WORD, other)
        self._head.write(COMPOSITION_WORD, record.composition)
        self.record = record

    def sign(self, incarnation: int) -> None:
        """The lines are those of the pool with this incarnation. Every block that is loadable has
        contents in it."""
        self._head.write(INCARNATION_WORD, incarnation)

    def mark_void(self) -> None:
        """Make it an invalid block table, for every process that has mapped it."""
        self._head.write(COMPOSITION_WORD, 0)
        self._head.write(MAGIC_WORD, 0)

    @property
    def buckets(self) -> Hashes:
        """The key table; without keys, none."""
        count = bucket_count(self.record.num_blocks) if self.record.key_bytes else 0
        buckets: Hashes = np.frombuffer(self._file, BUCKET, count, buckets_at(self.record))
        return buckets

    def close(self) -> None:
        """Close the descriptor; a stored duplicate stays valid."""
        os.close(self.descriptor)

    def unmap(self) -> None:
        """Unmap the file, if nothing else uses its parts. They must not be used again.

        An mmap has a descriptor of its own, which garbage collection would close late.
        """
        del self.lines, self._head
        with suppress(BufferError):
            self._file.close()

    def _copy_bytes(self, at: int, nbytes: int) -> bytes:
        return self._file[at : at + nbytes]


def convert_table(descriptor: int) -> int | None:
    """The descriptor of a new file with what a table of the format before has committed.

    Its epoch is the number of its resets. None if it is no such table. Raises Refused (BAD_LAYOUT)
    if it is damaged, and OSError. The caller owns both descriptors.
    """
    if os.fstat(descriptor).st_size <= LINES_AT or os.pread(descriptor, 8, 0) != OLD_MAGIC:
        return None
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        record = read_record(lambda at, size: memory[at : at + size], len(memory), OLD_MAGIC)
        old = np.frombuffer(memory, _old_line_type(record.key_bytes), -1, LINES_AT).copy()
    file, rows = TableFile.create(record), np.flatnonzero(old["committed"])
    for field in ("stamp", "checksum", "part", "key", "committed"):
        file.lines[field][rows] = old[field][rows]
    file.lines["epoch"][rows] = record.epoch
    new = os.dup(file.descriptor)
    file.close()
    return new


def buckets_at(record: RegionRecord) -> int:
    """Where the key table begins."""
    end = LINES_AT + line_type(record.key_bytes).itemsize * record.num_blocks
    return -(-end // BUCKET.itemsize) * BUCKET.itemsize


def check_table_size(nbytes: int) -> int:
    """The size of a file. Raises Refused if it has no lines."""
    if nbytes <= LINES_AT:
        message = f"the block table has {nbytes} bytes, not more than {LINES_AT}"
        raise Refused(Code.BAD_LAYOUT, message, nbytes)
    return nbytes


def read_record(
    copy_bytes: Callable[[int, int], bytes], nbytes: int, expected_magic: bytes = MAGIC
) -> RegionRecord:
    """The valid record of a file of `nbytes`. Raises Refused."""
    magic, current = _HEAD.unpack(copy_bytes(0, _HEAD.size))
    if magic != expected_magic or current > 1:
        message = f"the file begins with {magic.hex()}: no block table of this version"
        raise Refused(Code.BAD_LAYOUT, message, magic.hex())
    at = PAGE + current * RECORD_BYTES
    length, crc = _RECORD.unpack(copy_bytes(at, _RECORD.size))
    data = copy_bytes(at + _RECORD.size, min(length, RECORD_BYTES))
    if zlib.crc32(data) != crc:
        message = f"the record of {length} bytes in the block table has a wrong CRC"
        raise Refused(Code.BAD_LAYOUT, message, length)
    try:
        if is_old := magic == OLD_MAGIC:
            fields = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
            generation = msgspec.msgpack.decode(fields.pop("generation", b"\x01"), type=int)
            # Siblings may have missed resets of a namespace that had some. Below all drawn epochs.
            fields["epoch"] = msgspec.Raw(msgspec.msgpack.encode(max(0, generation - 1)))
            data = msgspec.msgpack.encode(fields)
        record = decode_record(data, RegionRecord)
        expected = (_old_file_bytes if is_old else _file_bytes)(record)
    except (msgspec.MsgspecError, KVFerryError, ValueError, RecursionError) as error:
        message = f"the record of the block table cannot be decoded: {error}"
        raise Refused(Code.BAD_LAYOUT, message) from error
    if nbytes != expected:
        message = f"the block table has {nbytes} bytes, but its record needs {expected}"
        raise Refused(Code.BAD_LAYOUT, message, nbytes)
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
    count = bucket_count(record.num_blocks) if record.key_bytes else 0
    return buckets_at(record) + count * BUCKET.itemsize


def _old_file_bytes(record: RegionRecord) -> int:
    return LINES_AT + _old_line_type(record.key_bytes).itemsize * record.num_blocks


def _old_line_type(key_bytes: int) -> np.dtype[np.void]:
    """The dtype of a line in the format before."""
    kind = line_type(key_bytes)
    names = [name for name in kind.names or () if name != "epoch"]
    return np.dtype([(name, kind[name]) for name in names], align=True)
