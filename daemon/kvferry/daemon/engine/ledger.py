"""The ledger of a region: for each host block whether it is good, under which key, with which sum.

It is a memfd, so that whoever holds its descriptor holds what it says, also when the daemon was
killed between any two instructions. What makes that safe is the order of writing:

    vacate   before a store may touch a block: it is not good, and its version is another one
    seal     after it was stored and read back for its sum: key, part and sum first, `sealed` last

so that a block which is sealed holds exactly what its sum is of. A block that was stored and not
sealed yet is lost with the daemon: that is a miss. The deed at the head of the file has two places
and a number that says which one counts.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from kvferry.daemon.core.deeds import Deed, Resident, decode_record, encode_record
from kvferry.daemon.core.geometry import Bools, Int64s
from kvferry.daemon.engine.memory import PAGE, check_sealed
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.keys import OffloadKey
from kvferry.proto.page import sealed_memfd

MAGIC = b"kvferry1"
"""Its last character is the version of this file's format."""
DEED_ROOM = 1 << 20
"""Bytes for a deed; memory that is never written takes no room."""
SLOTS_AT = PAGE + 2 * DEED_ROOM
MAX_STAMP = 1 << 62
"""Beyond it a stamp is damaged: no daemon counts so far."""
LINES = 4096
_HEAD = struct.Struct("<8sQ")
"""MAGIC, and which of the two deeds counts."""
_DEED = struct.Struct("<II")
"""Length and CRC-32 of the deed that follows."""

_ONE = np.uint32(1)

Versions: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]
Sums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


class Ledger:
    """The ledger behind a descriptor, which is its own from now on.

    Raises Refused (BAD_LAYOUT, NOT_SHAREABLE) where it is none, or one of another version, and the
    descriptor is closed. blank: it was made just now. Not to be read then: that would take memory
    for what was never written.
    """

    def __init__(self, descriptor: int, *, blank: bool = False) -> None:
        self.descriptor = descriptor
        try:
            check_sealed(descriptor)
            nbytes = os.fstat(descriptor).st_size
            if nbytes <= SLOTS_AT:
                raise Refused(Code.BAD_LAYOUT, "that is no ledger: too short")
            self._file = mmap.mmap(descriptor, 0)
            self.deed = self._read_deed()
            if nbytes != _file_bytes(self.deed):
                raise Refused(Code.BAD_LAYOUT, "the ledger is of other blocks", nbytes)
            self._slots = np.frombuffer(self._file, _slot(self.deed), -1, SLOTS_AT)
        except BaseException:
            os.close(descriptor)
            raise
        self.suspect: Bools | None = None
        """Blocks that an earlier daemon stored, and this one has not read yet."""
        self._sealed, self._versions = self._slots["sealed"], self._slots["version"]
        self._stamps = self._slots["stamp"]
        self.closed = False
        self._stamp = 0 if blank else int(self._stamps.max(initial=0))
        if self._stamp >= MAX_STAMP:
            self._renumber()

    @classmethod
    def create(cls, deed: Deed) -> Ledger:
        """A new one, in which nothing is sealed. Raises Refused where the deed is too long."""
        data = _packed(deed)
        descriptor = sealed_memfd("kvferry-ledger", _file_bytes(deed))
        os.pwrite(descriptor, data, PAGE)
        os.pwrite(descriptor, _HEAD.pack(MAGIC, 0), 0)
        return cls(descriptor, blank=True)

    def suspect_all(self) -> None:
        """An earlier daemon wrote this. Without keys somebody may ask for any block."""
        keys = self.deed.key_bytes
        self.suspect = self._sealed.copy() if keys else np.ones_like(self._sealed)

    def suspected(self, blocks: Int64s) -> Bools:
        if self.suspect is None:
            return np.zeros(blocks.size, dtype=np.bool_)
        suspect: Bools = self.suspect[blocks]
        return suspect

    def trust(self, blocks: Int64s) -> None:
        """These were read, and are what they were."""
        if self.suspect is not None:
            self.suspect[blocks] = False
            if not self.suspect.any():
                self.suspect = None

    def distrust(self, blocks: Int64s) -> None:
        """These are to be read again with every load."""
        if self.suspect is None:
            self.suspect = np.zeros(self._slots.size, dtype=np.bool_)
        self.suspect[blocks] = True

    def amend(self, deed: Deed) -> None:
        """Put another deed in the place of this one: for the same blocks and keys."""
        data = _packed(deed)
        _, current = _HEAD.unpack_from(self._file)
        other = 1 - current
        at = PAGE + other * DEED_ROOM
        self._file[at : at + len(data)] = data
        _HEAD.pack_into(self._file, 0, MAGIC, other)
        self.deed = deed

    def void(self) -> None:
        """From now on this is no ledger, whoever holds it."""
        _HEAD.pack_into(self._file, 0, bytes(8), 0)

    def wipe(self) -> None:
        """No block is good."""
        for at in range(0, self._slots.size, LINES):  # both of a line while a CPU's cache has it
            self._sealed[at : at + LINES] = False
            self._versions[at : at + LINES] += _ONE

    def vacate(self, blocks: Int64s) -> Versions:
        """These are about to be written. Returns their versions, which `seal` wants to see."""
        self._sealed[blocks] = False
        versions: Versions = self._versions[blocks] + _ONE
        self._versions[blocks] = versions
        self.used(blocks)
        if self.suspect is not None:
            self.suspect[blocks] = False
        return versions

    def seal(
        self,
        blocks: Int64s,
        versions: Versions,
        sums: Sums,
        keys: Sequence[OffloadKey],
        parts: dict[int, tuple[int, int]],
    ) -> None:
        """These hold what was stored in them, unless they were vacated since."""
        slots = self._slots
        same = self.current(blocks, versions)
        if keys:
            names = np.frombuffer(b"".join(keys), slots.dtype["key"])
            slots["key"][blocks[same]] = names[same]
        blocks = blocks[same]
        places = [parts.get(block, (0, 0)) for block in blocks.tolist()] if parts else []
        slots["part"][blocks] = places or (0, 0)
        slots["sum"][blocks] = sums[same]
        slots["sealed"][blocks] = True

    def used(self, blocks: Int64s) -> None:
        """These were of use: the first became the most recent."""
        self._stamp += blocks.size
        if blocks.size == 1:
            self._stamps[blocks] = self._stamp
        else:
            self._stamps[blocks] = self._stamp - np.arange(blocks.size)

    def current(self, blocks: Int64s, versions: Versions) -> Bools:
        same: Bools = self._versions[blocks] == versions
        return same

    def sealed(self, blocks: Int64s) -> Bools:
        sealed: Bools = self._sealed[blocks]
        return sealed

    def sealed_blocks(self) -> Int64s:
        return np.flatnonzero(self._sealed)

    def versions(self, blocks: Int64s) -> Versions:
        versions: Versions = self._versions[blocks]
        return versions

    def sums(self, blocks: Int64s) -> Sums:
        sums: Sums = self._slots["sum"][blocks]
        return sums

    def keys(self, blocks: Int64s) -> tuple[OffloadKey, ...]:
        """The keys of sealed blocks; none where host blocks have none."""
        if not self.deed.key_bytes:
            return ()
        return tuple(self._slots["key"][blocks].tolist())

    def residents(self) -> tuple[Resident, ...]:
        """What is good, least recent first; of a key that comes twice the more recent."""
        blocks = self.sealed_blocks()
        blocks = blocks[np.argsort(self._slots["stamp"][blocks], kind="stable")]
        parts = self._slots["part"][blocks].tolist()
        found = {
            key: Resident(block, key, (part[0], part[1]) if part[1] else None)
            for block, key, part in zip(blocks.tolist(), self.keys(blocks), parts, strict=False)
        }
        return tuple(found.values())

    def close(self) -> None:
        self.closed = True
        del self._slots, self._sealed, self._versions, self._stamps
        self._file.close()
        os.close(self.descriptor)

    def _renumber(self) -> None:
        order = np.argsort(self._stamps, kind="stable")
        self._stamps[order] = np.arange(order.size)
        self._stamp = order.size

    def _read_deed(self) -> Deed:
        magic, current = _HEAD.unpack_from(self._file)
        if magic != MAGIC or current > 1:
            raise Refused(Code.BAD_LAYOUT, "that is no ledger of this version", magic.hex())
        at = PAGE + current * DEED_ROOM
        length, crc = _DEED.unpack_from(self._file, at)
        data = self._file[at + _DEED.size : at + _DEED.size + min(length, DEED_ROOM)]
        if zlib.crc32(data) != crc:
            raise Refused(Code.BAD_LAYOUT, "the ledger's deed is damaged", length)
        try:
            deed = decode_record(data, Deed)
            _slot(deed)
        except (msgspec.MsgspecError, KVFerryError, ValueError) as error:
            raise Refused(Code.BAD_LAYOUT, f"the ledger's deed cannot be read: {error}") from error
        return deed


def _packed(deed: Deed) -> bytes:
    data = encode_record(deed)
    if _DEED.size + len(data) > DEED_ROOM:
        raise Refused(Code.BAD_LAYOUT, f"a deed has at most {DEED_ROOM} bytes", len(data))
    return _DEED.pack(len(data), zlib.crc32(data)) + data


def _file_bytes(deed: Deed) -> int:
    return SLOTS_AT + _slot(deed).itemsize * deed.num_blocks


def _slot(deed: Deed) -> np.dtype[np.void]:
    """A block's line: its version counts its stores, stamps tell the order of use."""
    fields = [
        ("stamp", "<u8"),
        ("sum", "<u8"),
        ("part", "<u4", (2,)),
        ("version", "<u4"),
        ("sealed", "?"),
        ("key", f"V{max(1, deed.key_bytes)}"),
    ]
    return np.dtype(fields, align=True)
