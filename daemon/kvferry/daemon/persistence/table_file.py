"""The file of a block table: the lines of a region's host blocks, and the record of the region.

It is a memfd, so it outlives the daemon while another process has its descriptor. Layout:

    0                          MAGIC, and the number of the valid record
    PAGE                       record 0: length, CRC-32, data
    PAGE + RECORD_BYTES        record 1
    LINES_AT                   a line for each host block (core/block_lines.py)

A record is written where the valid one is not, then the number changes. Event loop only.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from contextlib import suppress

import msgspec
import numpy as np

from kvferry.daemon.core.block_lines import Lines, line_type
from kvferry.daemon.core.records import RegionRecord, decode_record, encode_record
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.layout import Bools, Int64s
from kvferry.shm.memfd import check_sealed, sealed_memfd

# The last character is the version of the format.
MAGIC = b"kvferry2"
# Bytes reserved for a record; pages that are never written take no memory.
RECORD_BYTES = 1 << 20
LINES_AT = PAGE + 2 * RECORD_BYTES
# MAGIC, and the number of the valid record: 0 or 1.
_HEAD = struct.Struct("<8sQ")
# Length and CRC-32 of the record that follows.
_RECORD = struct.Struct("<II")


class TableFile:
    """A mapped file with the block table of a region. Owns the descriptor.

    lines: stay mapped as long as they are used. writable: False for the table of another daemon.
    Raises Refused (BAD_LAYOUT, NOT_SHAREABLE) and closes the descriptor if it is no block table of
    this version.
    """

    def __init__(self, descriptor: int, *, writable: bool = True) -> None:
        self.descriptor = descriptor
        try:
            check_sealed(descriptor, "a kept block table")
            nbytes = os.fstat(descriptor).st_size
            if nbytes <= LINES_AT:
                message = f"the block table has {nbytes} bytes, not more than {LINES_AT}"
                raise Refused(Code.BAD_LAYOUT, message, nbytes)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._file = mmap.mmap(descriptor, 0, prot=access)
            self.record = self._read_record()
            if nbytes != (expected := _file_bytes(self.record)):
                message = f"the block table has {nbytes} bytes, but its record needs {expected}"
                raise Refused(Code.BAD_LAYOUT, message, nbytes)
            dtype = line_type(self.record.key_bytes)
            self.lines: Lines = np.frombuffer(self._file, dtype, -1, LINES_AT)
        except BaseException as error:
            if writable and isinstance(error, KVFerryError):
                mark_void(descriptor)  # siblings may have mapped it, and its blocks are freed
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
        _, current = _HEAD.unpack_from(self._file)
        other = 1 - current
        at = PAGE + other * RECORD_BYTES
        self._file[at : at + len(data)] = data
        _HEAD.pack_into(self._file, 0, MAGIC, other)
        self.record = record

    def unchanged(self, blocks: Int64s, versions: Int64s) -> Bools:
        """Which blocks have not lost their contents since they had these versions. For the table of
        another daemon, which may have become void."""
        same: Bools = self.lines["version"][blocks] == versions
        return same & (self._file[: len(MAGIC)] == MAGIC)

    def close(self) -> None:
        """Close the descriptor; a stored duplicate stays valid."""
        os.close(self.descriptor)

    def unmap(self) -> None:
        """Unmap the file, if nothing else uses the lines. They must not be used again.

        An mmap has a descriptor of its own, which garbage collection would close late.
        """
        del self.lines
        with suppress(BufferError):
            self._file.close()

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
            line_type(record.key_bytes)
        except (msgspec.MsgspecError, KVFerryError, ValueError, RecursionError) as error:
            message = f"the record of the block table cannot be decoded: {error}"
            raise Refused(Code.BAD_LAYOUT, message) from error
        return record


def mark_void(descriptor: int) -> None:
    """Make a file an invalid block table, for every process that has mapped it."""
    with suppress(OSError):
        os.pwrite(descriptor, bytes(len(MAGIC)), 0)


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
