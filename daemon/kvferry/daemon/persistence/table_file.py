"""The file of a block table: the lines of a region's host blocks, and the record of the region.

It is a memfd, so it outlives the daemon while another process has its descriptor. Layout:

    0                          MAGIC, and the number of the valid record
    PAGE                       record 0: length, CRC-32, data
    PAGE + RECORD_BYTES        record 1
    LINES_AT                   a line for each host block (core/block_lines.py)

A record is written where the valid one is not, then the number changes. A sibling has mapped the
file to be read only, and may read it at any time. Event loop only, except LentTable.
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

from kvferry.daemon.core.block_lines import Lines, Versions, line_type
from kvferry.daemon.core.records import RegionRecord, decode_record, encode_record
from kvferry.daemon.memory.foreign_memory import WORD, ForeignMemory, SharedWords
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.layout import Bools, Int64s
from kvferry.shm.memfd import check_sealed, sealed_memfd

# The last character is the version of the format. The one before had no epochs.
MAGIC, OLD_MAGIC = b"kvferry3", b"kvferry2"
# Bytes reserved for a record; pages that are never written take no memory.
RECORD_BYTES = 1 << 20
LINES_AT = PAGE + 2 * RECORD_BYTES
# MAGIC, and the number of the valid record, 0 or 1: two words.
_HEAD = struct.Struct("<8sQ")
_MAGIC_WORD, _NUMBER_WORD = 0, 1
_MAGIC_VALUE = int.from_bytes(MAGIC, "little")
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
            self._file = mmap.mmap(descriptor, _check_size(os.fstat(descriptor).st_size))
            self.record = _read_record(self._copy_bytes, len(self._file))
            self._head = SharedWords(self._file, 0, 2)
            dtype = line_type(self.record.key_bytes)
            self.lines: Lines = np.frombuffer(self._file, dtype, -1, LINES_AT)
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
        other = 1 - self._head.read(_NUMBER_WORD)
        at = PAGE + other * RECORD_BYTES
        self._file[at : at + len(data)] = data
        self._head.write(_NUMBER_WORD, other)
        self.record = record

    def close(self) -> None:
        """Close the descriptor; a stored duplicate stays valid."""
        os.close(self.descriptor)

    def unmap(self) -> None:
        """Unmap the file, if nothing else uses the lines. They must not be used again.

        An mmap has a descriptor of its own, which garbage collection would close late.
        """
        del self.lines, self._head
        with suppress(BufferError):
            self._file.close()

    def _copy_bytes(self, at: int, nbytes: int) -> bytes:
        return self._file[at : at + nbytes]


class LentTable:
    """The block table of another daemon. Any thread.

    num_blocks: number of its lines. Owns the descriptor, and closes it at once. Raises Refused
    (BAD_LAYOUT, NOT_SHAREABLE) if it is no block table of this version.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            memory = ForeignMemory(descriptor, "the block table")
        finally:
            os.close(descriptor)
        record = _read_record(memory.copy_bytes, _check_size(memory.nbytes))
        self.num_blocks, kind = record.num_blocks, line_type(record.key_bytes)
        self._magic = memory.column(WORD, 0, 1)
        self._versions = memory.column(kind, LINES_AT, self.num_blocks, "version")

    def unchanged(self, blocks: Int64s, versions: Int64s) -> Bools:
        """Which blocks have not lost their contents since they had these versions. None of them if
        the table has become void."""
        found: Versions = self._versions.copy(blocks)
        same: Bools = (found == versions) & (self._magic.read() == _MAGIC_VALUE)
        return same

    def unmap(self) -> None:
        """Unmap the file. It must not be used again."""
        del self._magic, self._versions


def convert_table(descriptor: int) -> int | None:
    """The descriptor of a new file with what a table of the format before has committed.

    Its contents are of epoch 0. None if it is no such table. Raises Refused (BAD_LAYOUT) if it is
    damaged, and OSError. The caller owns both descriptors.
    """
    if os.fstat(descriptor).st_size <= LINES_AT or os.pread(descriptor, 8, 0) != OLD_MAGIC:
        return None
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        record = _read_record(lambda at, size: memory[at : at + size], len(memory), OLD_MAGIC)
        old = np.frombuffer(memory, _old_line_type(record.key_bytes), -1, LINES_AT).copy()
    file, rows = TableFile.create(record), np.flatnonzero(old["committed"])
    for field in ("stamp", "checksum", "part", "key", "committed"):
        file.lines[field][rows] = old[field][rows]
    new = os.dup(file.descriptor)
    file.close()
    return new


def mark_void(descriptor: int) -> None:
    """Make a file an invalid block table, for every process that has mapped it."""
    with suppress(OSError):
        os.pwrite(descriptor, bytes(len(MAGIC)), 0)


def _check_size(nbytes: int) -> int:
    """The size of a file. Raises Refused if it has no lines."""
    if nbytes <= LINES_AT:
        message = f"the block table has {nbytes} bytes, not more than {LINES_AT}"
        raise Refused(Code.BAD_LAYOUT, message, nbytes)
    return nbytes


def _read_record(
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
            fields.pop("generation", None)
            data = msgspec.msgpack.encode(fields)
        record = decode_record(data, RegionRecord)
        kind = (_old_line_type if is_old else line_type)(record.key_bytes)
    except (msgspec.MsgspecError, KVFerryError, ValueError, RecursionError) as error:
        message = f"the record of the block table cannot be decoded: {error}"
        raise Refused(Code.BAD_LAYOUT, message) from error
    if nbytes != (expected := LINES_AT + kind.itemsize * record.num_blocks):
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
    return LINES_AT + line_type(record.key_bytes).itemsize * record.num_blocks


def _old_line_type(key_bytes: int) -> np.dtype[np.void]:
    """The dtype of a line in the format before."""
    kind = line_type(key_bytes)
    names = [name for name in kind.names or () if name != "epoch"]
    return np.dtype([(name, kind[name]) for name in names], align=True)
