"""Slab files: preallocated files of equal slots, each a header page and a host block.

A slot is written and read with one vectored call, directly between the device and the host pool
where the file system has O_DIRECT and the block is aligned; otherwise through a bounce buffer. The
calls release the GIL. An encrypted block goes through the buffer, and only its ciphertext is ever
in the buffer or in the file; its header has the seal. Any thread.
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
from typing import TYPE_CHECKING, NamedTuple

from kvferry.daemon.tiers.base import block_checksum
from kvferry.daemon.tiers.block_memory import PAGE, BounceBuffer, view_memory
from kvferry.daemon.tiers.encryption import SEAL_BYTES
from kvferry.daemon.tiers.own_files import NotAFileError, open_file

if TYPE_CHECKING:
    from kvferry.daemon.tiers.block_cipher import BlockCipher

# The last character is the version of the format. The second one is of encrypted blocks.
_MAGIC, _SEALED_MAGIC = b"kvfslot1", b"kvfseal1"
# Magic, generation, bytes of the block, checksum, bytes of the namespace's name and of the key.
_FIELDS = struct.Struct("<8sQQQHH")
_CRC = struct.Struct("<I")
# Larger generations on disk are damage: a million writes each second reach this one in nine years.
MAX_GENERATION = 1 << 48


class SlabTruncatedError(Exception):
    """The file is shorter than its slots."""


class SealBrokenError(Exception):
    """An encrypted block is damaged, was moved or forged, or its slot has a block in the clear."""


class SlotHeader(NamedTuple):
    """The header before the bytes of a block on disk.

    generation: grows with every block written in the namespace. seal: of an encrypted block, whose
    checksum on disk is that of its ciphertext; empty if it is not encrypted.
    """

    namespace: str
    key: bytes
    generation: int
    nbytes: int
    checksum: int
    seal: bytes = b""

    def encode(self) -> bytes:
        name = self.namespace.encode()
        magic = _SEALED_MAGIC if self.seal else _MAGIC
        head = _FIELDS.pack(
            magic, self.generation, self.nbytes, self.checksum, len(name), len(self.key)
        )
        data = head + name + self.key + self.seal
        return data + _CRC.pack(zlib.crc32(data))


def decode_header(page: memoryview) -> SlotHeader | None:
    """The header in a slot's first page; None if the slot was never written or is torn."""
    magic, generation, nbytes, checksum, name_bytes, key_bytes = _FIELDS.unpack_from(page)
    key_at = _FIELDS.size + name_bytes
    seal_at = key_at + key_bytes
    end = seal_at + (SEAL_BYTES if magic == _SEALED_MAGIC else 0)
    if magic not in (_MAGIC, _SEALED_MAGIC):
        return None
    if end + _CRC.size > PAGE or generation > MAX_GENERATION:
        return None
    data = bytes(page[:end])
    if (zlib.crc32(data),) != _CRC.unpack_from(page, end):
        return None
    name = data[_FIELDS.size : key_at].decode(errors="replace")
    return SlotHeader(name, data[key_at:seal_at], generation, nbytes, checksum, data[seal_at:])


def slot_bytes_of(block_bytes: int) -> int:
    """Bytes of a slot: whole pages for the header and the block."""
    return PAGE + -(-block_bytes // PAGE) * PAGE


class SlabFile:
    """A slab file. Owns its descriptor; `close` must not be called while a slot is in use.

    cipher: of its store; None: blocks are read and written as they are.
    """

    def __init__(
        self, path: Path, slot_bytes: int, slots: int, cipher: BlockCipher | None = None
    ) -> None:
        self.path, self._cipher = path, cipher
        self.slot_bytes = slot_bytes
        self.nbytes = slot_bytes * slots
        self.written = False
        self._descriptor, self._direct = _open(path)

    @classmethod
    def create(
        cls, path: Path, slot_bytes: int, slots: int, cipher: BlockCipher | None
    ) -> SlabFile:
        """Create and preallocate a file. Raises OSError, and leaves no file then."""
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(descriptor, 0, slot_bytes * slots)
            os.close(descriptor)
            return cls(path, slot_bytes, slots, cipher)
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
        at = slot * self.slot_bytes
        if self._is_transferable(address, nbytes):
            parts = [buffer.view[:PAGE], view_memory(address, nbytes)]
            expected = PAGE + nbytes
        else:
            header = self._copy_to(buffer, header, address, nbytes)
            parts, expected = [buffer.view[: self.slot_bytes]], self.slot_bytes
        encoded = header.encode()
        buffer.view[: len(encoded)] = encoded
        self.written = True
        written = os.pwritev(self._descriptor, parts, at)
        if written != expected:
            raise OSError(errno.EIO, f"{written} of {expected} bytes were written to {self.path}")

    def read_slot(self, slot: int, address: int, nbytes: int) -> SlotHeader | None:
        """Read a block to `address`, and return its header.

        Raises OSError, SlabTruncatedError if the file ends before the block does, and
        SealBrokenError.
        """
        buffer = _buffer(self.slot_bytes)
        at = slot * self.slot_bytes
        if self._is_transferable(address, nbytes):
            parts = [buffer.view[:PAGE], view_memory(address, nbytes)]
        else:
            parts = [buffer.view[: self.slot_bytes]]
        if os.preadv(self._descriptor, parts, at) < PAGE + nbytes:
            raise SlabTruncatedError(self.path)
        header = decode_header(buffer.view)
        if self._cipher is not None and header is not None:
            block, target = buffer.view[PAGE : PAGE + nbytes], view_memory(address, nbytes)
            checksum = self._cipher.decrypt(header.key, header.seal, block, target)
            if checksum is None:
                raise SealBrokenError(self.path)
            return header._replace(checksum=checksum)
        if len(parts) == 1:
            ctypes.memmove(address, buffer.address + PAGE, nbytes)
        return header

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

    def _copy_to(
        self, buffer: BounceBuffer, header: SlotHeader, address: int, nbytes: int
    ) -> SlotHeader:
        """Copy a block behind its header, encrypted if there is a cipher. Returns its header."""
        if self._cipher is None:
            ctypes.memmove(buffer.address + PAGE, address, nbytes)
            return header
        block, target = view_memory(address, nbytes), buffer.view[PAGE : PAGE + nbytes]
        seal = self._cipher.encrypt(header.key, header.checksum, block, target)
        return header._replace(checksum=block_checksum(header.key, target), seal=seal)

    def _is_transferable(self, address: int, nbytes: int) -> bool:
        """Whether the kernel can transfer a block without a copy in this process."""
        return self._cipher is None and (not self._direct or not (address | nbytes) % PAGE)


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
