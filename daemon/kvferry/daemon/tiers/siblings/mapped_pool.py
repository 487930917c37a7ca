"""The pool of a sibling, mapped read-only in the process of the tier. Any thread.

The memory of a sibling that dies stays as long as it is mapped, so a link that is lost drops its
pool. It is unmapped when the last copy from it has ended. The descriptors stay open as long: the
daemon maps the same files (lent_memory.py).
"""

from __future__ import annotations

import os
import weakref
from itertools import count
from pathlib import Path

from kvferry.daemon.memory.shared_memory import ReadOnlyFiles
from kvferry.daemon.tiers.messages import FileOf, LentFiles
from kvferry.proto.errors import Code, Refused
from kvferry.shm.memfd import check_sealed

# Numbers of windows, which processes that follow each other do not use twice.
_windows = count(os.getpid() << 20)
# Each takes a descriptor of this process, which all siblings share.
MAX_CHUNKS = 1 << 14


class MappedPool:
    """Chunks of the pool from number `first` on, in which a namespace begins.

    chunk_bytes: of all chunks but the last of the pool. start: of the namespace, in bytes in the
    pool. window: see LentFiles. Owns the descriptors that it is given, also if it raises an error.
    """

    def __init__(self, chunk_bytes: int, start: int) -> None:
        self._chunk_bytes, self._start = chunk_bytes, start
        self.first = start // chunk_bytes
        self.window = next(_windows)
        self._chunks = list[int]()
        self._table: int | None = None
        # The incarnation page, and what it must say.
        self._page, self._incarnation = -1, 0
        self._open = list[int]()
        weakref.finalize(self, _close_all, self._open)
        self._memory: ReadOnlyFiles | None = None

    def add_chunk(self, descriptor: int) -> None:
        """Add the next chunk. Raises Refused or OSError."""
        self._open.append(descriptor)
        check_sealed(descriptor, "the sibling's pool memory")
        if len(self._chunks) == MAX_CHUNKS:
            text = f"the sibling's pool has more than {MAX_CHUNKS} chunks; raise its pool.chunk"
            raise Refused(Code.BAD_LAYOUT, text, MAX_CHUNKS)
        sizes = [os.fstat(each).st_size for each in (*self._chunks[-1:], descriptor)]
        if not 0 < sizes[-1] <= self._chunk_bytes or sizes[0] < sizes[-1]:
            text = f"a chunk of the sibling's pool has {sizes[-1]} bytes, not up to"
            raise Refused(Code.BAD_LAYOUT, f"{text} {self._chunk_bytes}", sizes[-1])
        self._chunks.append(descriptor)

    def add_table(self, descriptor: int) -> None:
        """Add the block table of the namespace. Only the daemon reads it, and checks it."""
        self._open.append(descriptor)
        self._table = descriptor

    def add_page(self, descriptor: int, incarnation: int) -> None:
        """Add the incarnation page of the pool, and the number that the sibling named."""
        self._open.append(descriptor)
        self._page, self._incarnation = descriptor, incarnation

    def map(self) -> None:
        """Map the chunks. Raises OSError."""
        self._memory = ReadOnlyFiles(self._chunks, self._chunk_bytes)
        weakref.finalize(self, self._memory.close)

    def files_of(self, directory: Path) -> LentFiles | None:
        """What the daemon needs to map it, too; None if it has no block table."""
        if self._table is None or self._page < 0:
            return None
        chunks, table = tuple(map(_file_of, self._chunks)), _file_of(self._table)
        place, page = (self._chunk_bytes, self._start), _file_of(self._page)
        return LentFiles(
            self.window, str(directory), *place, chunks, table, page, self._incarnation
        )

    def copy_block(self, offset: int, nbytes: int, address: int) -> bool:
        """Copy a block to memory of this process. False if it is not in the mapped chunks.

        offset: in bytes in the sibling's pool. Releases the GIL.
        """
        memory, at = self._memory, offset - self.first * self._chunk_bytes
        if memory is None or not 0 <= at <= memory.nbytes - nbytes:
            return False
        memory.copy_to(address, at, nbytes)
        return True


def _file_of(descriptor: int) -> FileOf:
    return FileOf(descriptor, os.fstat(descriptor).st_ino)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
