"""Memory that one process writes while others read it: key tables, block tables, timeline pages.

The writer may change a value between any two instructions of a reader. An algorithm that reads such
memory twice can fail: np.flatnonzero counts first and then fills, and raises if the count has
changed. So a reader has no array of the memory. It has columns, which can only be copied, and it
judges the copy. x86-64 keeps the order of loads and of stores, on which readers rely.

Only sealed memfds: reading a page that is gone would end the process. Any thread.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, TypeAlias

import numpy as np

from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import Int64s
from kvferry.shm.memfd import check_sealed

WORD = np.dtype(np.uint64)
Items: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class ForeignMemory:
    """A memfd that another process writes, mapped to be read only.

    what: what it holds, for errors. nbytes: how much of it is mapped; None: all. The caller owns
    the descriptor. The memory stays mapped as long as this object or one of its columns exists.
    Raises Refused (NOT_SHAREABLE; BAD_LAYOUT if it is smaller) and OSError.
    """

    def __init__(self, descriptor: int, what: str, nbytes: int | None = None) -> None:
        check_sealed(descriptor, what)
        size = os.fstat(descriptor).st_size
        self.nbytes = size if nbytes is None else nbytes
        if not 0 < self.nbytes <= size:
            least = max(1, self.nbytes)
            message = f"{what} has {size} bytes; create it with {least} or more"
            raise Refused(Code.BAD_LAYOUT, message, size)
        self._map = mmap.mmap(descriptor, self.nbytes, prot=mmap.PROT_READ)

    def copy_bytes(self, at: int, nbytes: int) -> bytes:
        """A copy of a range. The writer may change the memory meanwhile: check a CRC."""
        return self._map[at : at + nbytes]

    def column(
        self, kind: np.dtype[Any], at: int, count: int, field: str | None = None
    ) -> ForeignColumn:
        """`count` items of dtype `kind` from byte `at` on, or a field of each.

        Raises ValueError if they are not aligned: a load could see half of a value.
        """
        items: Items = np.frombuffer(self._map, kind, count, at)
        return ForeignColumn(_aligned(items if field is None else items[field]))


class ForeignColumn:
    """Items of foreign memory. Each is loaded once, by one instruction, if it has up to 8 bytes."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def copy(self, rows: Int64s) -> Items:
        """A copy of some items, (n, ...), in this order."""
        copied: Items = self._items[np.asarray(rows, np.int64).reshape(-1)]
        return copied

    def read(self, row: int = 0) -> int:
        """One number."""
        return int(self._items.item(row))


class SharedWords:
    """The writer's end: aligned 8-byte words, each written by one instruction.

    struct.pack_into would clear the bytes first, and a reader could see that. memory: mapped to be
    written. at: of the first word, in bytes.
    """

    def __init__(self, memory: mmap.mmap, at: int, count: int) -> None:
        self._words = _aligned(np.frombuffer(memory, WORD, count, at))

    def read(self, row: int) -> int:
        return int(self._words.item(row))

    def write(self, row: int, value: int) -> None:
        self._words[row] = value

    def count_up(self, row: int) -> int:
        """Add one, and return the sum. The word may have any value: the largest becomes 0."""
        value = (self.read(row) + 1) % (1 << 64)
        self.write(row, value)
        return value


def _aligned(items: Items) -> Items:
    if not items.flags.aligned:
        raise ValueError("shared items must be aligned to their size")
    return items
