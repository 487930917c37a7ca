"""The hint file of a namespace: which key is in which slot, so that a start reads no slot.

    record of slot n, at n * (key bytes + 12):    key | generation | CRC32 of both

A record is overwritten in place. It is only a hint: a read compares the key with the slot's header,
and a slot whose record has a wrong CRC is known again once its header was read. Zeros have a wrong
CRC, too, so a missing, short, torn or foreign file costs time, and never a wrong block. What cannot
be opened as a file is replaced. Records are reserved with their slab, so that a full file system
does not prevent a change.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.tiers.disk.slab import MAX_GENERATION
from kvferry.daemon.tiers.own_files import (
    NotAFileError,
    open_file,
    open_or_replace,
    remove_entry,
)

HINTS = "hints"
# Instead of the generation of a block: the slot is free, is never used again, or is unknown.
FREE, RETIRED, UNKNOWN = 0, -1, -2

_CRC = struct.Struct("<I")


class Hints(NamedTuple):
    """Hints about successive slots. generations: of their blocks; else FREE, RETIRED or UNKNOWN."""

    keys: list[bytes]
    generations: Int64s


class HintFile:
    """Opens the file, and creates or replaces it unless `read_only`. The methods raise OSError."""

    def __init__(self, path: Path, key_bytes: int, *, read_only: bool = False) -> None:
        self._descriptor = _open_to_read(path) if read_only else _open(path)
        self._fields = struct.Struct(f"<{key_bytes}sq")
        self._record = np.dtype([("key", f"V{key_bytes}"), ("generation", "<i8"), ("crc", "<u4")])
        self.nbytes = os.fstat(self._descriptor).st_size

    def bytes_of(self, slots: int) -> int:
        return slots * self._record.itemsize

    def read(self, slots: range) -> Hints:
        """The records of consecutive slots. Those that cannot be read are unknown."""
        record, end = self._record.itemsize, self._fields.size
        nbytes, data = self.bytes_of(len(slots)), b""
        with suppress(OSError):
            data = os.pread(self._descriptor, nbytes, self.bytes_of(slots.start))
        data = data.ljust(nbytes, b"\0")
        records = np.frombuffer(data, self._record)
        crcs = [zlib.crc32(data[at : at + end]) for at in range(0, nbytes, record)]
        generations = records["generation"]
        is_good = records["crc"] == np.array(crcs, np.uint32)
        is_good &= (generations >= RETIRED) & (generations <= MAX_GENERATION)
        return Hints(records["key"].tolist(), np.where(is_good, generations, UNKNOWN))

    def write(self, slot: int, generation: int, key: bytes = b"") -> None:
        """Overwrite a slot's record."""
        os.pwrite(self._descriptor, self._encode(generation, key), self.bytes_of(slot))

    def add_slots(self, slots: range) -> None:
        """Reserve the records of a new slab, and write that its slots are free."""
        at, data = self.bytes_of(slots.start), self._encode(FREE, b"") * len(slots)
        os.posix_fallocate(self._descriptor, at, len(data))
        self.nbytes = max(self.nbytes, at + len(data))
        os.pwrite(self._descriptor, data, at)

    def resize(self, slots: int) -> None:
        """Remove the records of all slots from this one on, and reserve those before it."""
        self.nbytes = self.bytes_of(slots)
        os.ftruncate(self._descriptor, self.nbytes)
        if self.nbytes:
            os.posix_fallocate(self._descriptor, 0, self.nbytes)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _encode(self, generation: int, key: bytes) -> bytes:
        data = self._fields.pack(key, generation)
        return data + _CRC.pack(zlib.crc32(data))


def _open_to_read(path: Path) -> int:
    try:
        return open_file(path, os.O_RDONLY)
    except (FileNotFoundError, NotAFileError):  # it knows as little as one that is empty
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _open(path: Path) -> int:
    try:
        return open_or_replace(path, os.O_RDWR)
    except PermissionError:
        remove_entry(path)
        return open_or_replace(path, os.O_RDWR)
