"""Slab files: preallocated files of equal slots, each a header page and a host block.

A slot is written and read with one vectored call, directly between the device and the host pool
where the file system has O_DIRECT and the block is aligned; otherwise through a bounce buffer. The
calls release the GIL. Any thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvferry.daemon.tiers.block_memory import PAGE, BounceBuffer, view_memory
from kvferry.daemon.tiers.own_files import NotAFileError, open_file

# The last character is the version of the format.
_MAGIC = b"kvfslot1"
# Magic, generation, bytes of the block, checksum, bytes of the namespace's name and of the key.
_FIELDS = struct.Struct("<8sQQQHH")
_CRC = struct.Struct("<I")
# Larger generations on disk are damage: a million writes each second reach this one in nine years.
MAX_GENERATION = 1 << 48


class SlabTruncatedError(Exception):
    """The file is shorter than its slots."""


class SlotHeader(NamedTuple):
    """The header before the bytes of a block on disk.

    generation: grows with every block written in the namespace.
    """

    namespace: str
    key: bytes
    generation: int
    nbytes: int
    checksum: int

    def encode(self) -> bytes:
        name = self.namespace.encode()
        head = _FIELDS.pack(
            _MAGIC, self.generation, self.nbytes, self.checksum, len(name), len(self.key)
        )
        data = head + name + self.key
        return data + _CRC.pack(zlib.crc32(data))


def decode_header(page: memoryview) -> SlotHeader | None:
    """The header in a slot's first page; None if the slot was never written or is torn."""
    magic, generation, nbytes, checksum, name_bytes, key_bytes = _FIELDS.unpack_from(page)
    end = _FIELDS.size + name_bytes + key_bytes
    if magic != _MAGIC or end + _CRC.size > PAGE or generation > MAX_GENERATION:
        return None
    data = bytes(page[:end])
    if (zlib.crc32(data),) != _CRC.unpack_from(page, end):
        return None
    name = data[_FIELDS.size : _FIELDS.size + name_bytes].decode(errors="replace")
    return SlotHeader(name, data[end - key_bytes :], generation, nbytes, checksum)


def slot_bytes_of(block_bytes: int) -> int:
    """Bytes of a slot: whole pages for the header and the block."""
    return PAGE + -(-block_bytes // PAGE) * PAGE


class SlabFile:
    """A slab file. Owns its descriptor; `close` must not be called while a slot is in use."""

    def __init__(self, path: Path, slot_bytes: int, slots: int) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        self.nbytes = slot_bytes * slots
        self.written = False
        self._descriptor, self._direct = _open(path)

    @classmethod
    def create(cls, path: Path, slot_bytes: int, slots: int) -> SlabFile:
        """Create and preallocate a file. Raises OSError, and leaves no file then."""
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(descriptor, 0, slot_bytes * slots)
            os.close(descriptor)
            return cls(path, slot_bytes, slots)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise

    @property
    def is_whole(self) -> bool:
        return os.fstat(self._descriptor).st_size == self.nbytes

    def write_slot(self, slot: int, header: SlotHeader, address: int, nbytes: int) -> None:
        """Write a block and its header. Raises OSError."""
        buffer = _buffer(self.slot_bytes)
        encoded = header.encode()
        buffer.view[: len(encoded)] = encoded
        at = slot * self.slot_bytes
        if self._is_transferable(address, nbytes):
            parts = [buffer.view[:PAGE], view_memory(address, nbytes)]
            expected = PAGE + nbytes
        else:
            ctypes.memmove(buffer.address + PAGE, address, nbytes)
            parts, expected = [buffer.view[: self.slot_bytes]], self.slot_bytes
        self.written = True
        written = os.pwritev(self._descriptor, parts, at)
        if written != expected:
            raise OSError(errno.EIO, f"{written} of {expected} bytes were written to {self.path}")

    def read_slot(self, slot: int, address: int, nbytes: int) -> SlotHeader | None:
        """Read a block to `address`, and return its header.

        Raises OSError, and SlabTruncatedError if the file ends before the block does.
        """
        buffer = _buffer(self.slot_bytes)
        at = slot * self.slot_bytes
        if self._is_transferable(address, nbytes):
            parts = [buffer.view[:PAGE], view_memory(address, nbytes)]
        else:
            parts = [buffer.view[: self.slot_bytes]]
        if os.preadv(self._descriptor, parts, at) < PAGE + nbytes:
            raise SlabTruncatedError(self.path)
        if len(parts) == 1:
            ctypes.memmove(address, buffer.address + PAGE, nbytes)
        return decode_header(buffer.view)

    def read_header(self, slot: int) -> SlotHeader | None:
        """Raises OSError and SlabTruncatedError."""
        buffer = _buffer(PAGE)
        if os.preadv(self._descriptor, [buffer.view[:PAGE]], slot * self.slot_bytes) < PAGE:
            raise SlabTruncatedError(self.path)
        return decode_header(buffer.view)

    def start_sync(self) -> int:
        """Returns a descriptor. The caller syncs the written slots with it, then closes it."""
        self.written = False
        return os.dup(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def delete(self) -> None:
        """Close and remove the file."""
        self.close()
        with suppress(OSError):
            self.path.unlink()

    def _is_transferable(self, address: int, nbytes: int) -> bool:
        """Whether the kernel can transfer a block without a copy in this process."""
        return not self._direct or not (address | nbytes) % PAGE


def _open(path: Path) -> tuple[int, bool]:
    """Open a file with O_DIRECT if its file system has it."""
    try:
        return open_file(path, os.O_RDWR | os.O_DIRECT), True
    except NotAFileError:
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_file(path, os.O_RDWR), False


_local = threading.local()


def _buffer(nbytes: int) -> BounceBuffer:
    """This thread's buffer, at least `nbytes` long."""
    buffer: BounceBuffer | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = _local.buffer = BounceBuffer(nbytes)
    return buffer
