"""A tray of messages in shared memory: where a daemon finds at once what a client says.

The way of a message through two of ZeroMQ's threads takes longer than a small copy, and to write
it costs the client a wake-up. So a client may lay its messages on a tray that the daemon looks at
when a bell rings. The socket stays: what is too large, or finds no room, goes there. Nothing is
overtaken on either way: whatever lies on the tray says how many messages went by the socket before
it, and the daemon hears it between that one and the next. UseTray, which tells of the tray, is the
first of them.

    byte 0     uint64   bytes laid so far; only the client writes it
    byte 64    uint64   bytes taken so far; only the daemon writes it
    byte 128   SLOTS of SLOT_BYTES, round and round. A message begins in a slot of its own: uint64
               its size, uint64 messages by the socket before it, its bytes; it ends in that slot or
               the ones behind it. A size of SKIP: the next message begins in the first slot

The daemon takes nothing on trust that it reads here: `take` raises Refused where the page makes no
sense, and gives a copy that nobody can change any more.
"""

from __future__ import annotations

import ctypes
import mmap
import struct

from kvferry.proto.errors import Code, Refused
from kvferry.proto.page import map_page, sealed_memfd

SLOTS = 64
"""Messages there, at most: a daemon that has to take them all is kept for so many."""
SLOT_BYTES = 8192
CAPACITY = SLOTS * SLOT_BYTES
MAX_BYTES = CAPACITY // 2
"""A message with its header, at most: an empty tray has room for it wherever it begins."""
SKIP = (1 << 64) - 1
_HEADER = struct.Struct("=QQ")
_FIRST, _TAKEN = 128, 64
NBYTES = -(-(_FIRST + CAPACITY) // mmap.PAGESIZE) * mmap.PAGESIZE


def new_tray() -> int:
    """A descriptor of an empty tray."""
    return sealed_memfd("kvferry-tray", NBYTES)


class Tray:
    """One end of a tray: a client lays, a daemon takes. Does not own the descriptor.

    Raises Refused (NOT_SHAREABLE) where that is of something else.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = map_page("a tray", descriptor, NBYTES)
        self._laid = ctypes.c_uint64.from_buffer(self._page, 0)
        self._taken = ctypes.c_uint64.from_buffer(self._page, _TAKEN)
        self._at = 0
        """Bytes laid by the client, or taken by the daemon: what the page says of it is not read
        by whoever wrote it."""

    def lay(self, data: bytes, before: int) -> bool:
        """The client's part: put a message behind the others, unless there is no room for it.

        before: how many messages went by the socket before it.
        """
        nbytes = _slots(len(data))
        if nbytes > MAX_BYTES:
            return False
        place = self._at % CAPACITY
        skipped = CAPACITY - place if nbytes > CAPACITY - place else 0
        if self._at + skipped + nbytes - self._taken.value > CAPACITY:
            return False
        if skipped:
            _HEADER.pack_into(self._page, _FIRST + place, SKIP, 0)
            place = 0
        begin = _FIRST + place + _HEADER.size
        self._page[begin : begin + len(data)] = data
        _HEADER.pack_into(self._page, _FIRST + place, len(data), before)
        self._at += skipped + nbytes
        self._laid.value = self._at
        return True

    def take(self, heard: int) -> bytes | None:
        """The daemon's part: the next message that comes before more than `heard` by the socket.

        Raises Refused (BAD_MESSAGE) where the page makes no sense.
        """
        there = self._there()
        if not there:
            return None
        size, before = _HEADER.unpack_from(self._page, _FIRST + self._at % CAPACITY)
        if size == SKIP:
            skipped = CAPACITY - self._at % CAPACITY
            if skipped == CAPACITY or skipped >= there:
                raise _senseless(size)
            self._at += skipped
            there -= skipped
            size, before = _HEADER.unpack_from(self._page, _FIRST)
        place, nbytes = self._at % CAPACITY, _slots(size)
        if nbytes > min(there, MAX_BYTES, CAPACITY - place):
            raise _senseless(size)
        if before > heard:
            return None
        begin = _FIRST + place + _HEADER.size
        data = self._page[begin : begin + size]
        self._at += nbytes
        self._taken.value = self._at
        return data

    @property
    def laid(self) -> int:
        """Bytes laid so far, as the page says."""
        return int(self._laid.value)

    @property
    def unheard(self) -> bool:
        """For the daemon: whether more was laid than it has taken, as the page says."""
        return bool(self._laid.value != self._at)

    def _there(self) -> int:
        """Bytes that were laid and not taken."""
        there: int = self._laid.value - self._at
        if not 0 <= there <= CAPACITY or there % SLOT_BYTES:
            raise _senseless(there)
        return there

    def close(self) -> None:
        del self._laid, self._taken
        self._page.close()


def _slots(size: int) -> int:
    """Bytes of the slots that a message takes."""
    return -(-(_HEADER.size + size) // SLOT_BYTES) * SLOT_BYTES


def _senseless(number: int) -> Refused:
    return Refused(Code.BAD_MESSAGE, "what lies on the tray makes no sense", number)
