"""A page of results in shared memory: where a client that polls sees first that a job was done.

The way of a result through two event loops and a socket takes longer than a small copy. So the
thread that sees a copy done also writes it here, and a client that polls reads it with a plain
load. The page hastens, it decides nothing: every result goes through the socket as well, in the
same order, though later and with others, and the reader passes over what it has had from the one
or the other. Only results of
jobs that were done are written out; for any other the entry says that the socket will tell. A
client that reads too late loses nothing: once the page is full, nothing more is written to it.

    byte 0     uint64   entries written so far; only the daemon writes it
    byte 64    uint64   entries read so far; only the client writes it
    byte 128   CAPACITY entries of 32 bytes, round and round: job id, bytes moved, seconds, kind
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator

from kvferry.proto.messages import JobResult, Outcome
from kvferry.proto.page import map_page, sealed_memfd
from kvferry.proto.specs import Direction

CAPACITY = 1024
_ENTRY = struct.Struct("=QQdQ")
_FIRST, _READ = 128, 64
NBYTES = -(-(_FIRST + CAPACITY * _ENTRY.size) // mmap.PAGESIZE) * mmap.PAGESIZE
_SEE_SOCKET = 0
_KINDS = {Direction.STORE: 1, Direction.LOAD: 2}
_DIRECTIONS = {kind: direction for direction, kind in _KINDS.items()}


def new_bulletin() -> int:
    """A descriptor of an empty bulletin."""
    return sealed_memfd("kvferry-bulletin", NBYTES)


class Bulletin:
    """One end of a bulletin: a daemon writes, a client reads. Does not own the descriptor.

    Raises Refused (NOT_SHAREABLE) where that is of something else.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = map_page("a bulletin", descriptor, NBYTES)
        self._written = ctypes.c_uint64.from_buffer(self._page, 0)
        self._read = ctypes.c_uint64.from_buffer(self._page, _READ)
        self._count = 0
        self.full = False
        """The reader left no room once: nothing is written any more."""

    def write(self, result: JobResult) -> None:
        """The daemon's part: from one thread, in order."""
        if self.full or self._count - self._read.value >= CAPACITY:
            self.full = True
            return
        done = result.outcome is Outcome.DONE
        kind = _KINDS[result.direction] if done else _SEE_SOCKET
        at = _FIRST + self._count % CAPACITY * _ENTRY.size
        _ENTRY.pack_into(self._page, at, result.job_id, result.nbytes, result.seconds, kind)
        self._count += 1
        self._written.value = self._count

    def shows_more_than(self, count: int) -> bool:
        """The client's part: whether more results were written."""
        return bool(self._written.value > count)

    def read(self, first: int) -> Iterator[JobResult]:
        """The client's part: results from number `first` on, up to one that the socket tells."""
        while first < self._written.value:
            at = _FIRST + first % CAPACITY * _ENTRY.size
            job_id, nbytes, seconds, kind = _ENTRY.unpack_from(self._page, at)
            if kind == _SEE_SOCKET:
                return
            first += 1
            yield JobResult(job_id, _DIRECTIONS[kind], Outcome.DONE, nbytes, seconds)

    def keep_from(self, first: int) -> None:
        """The client's part: entries before number `first` may be written over."""
        self._read.value = first
