"""Free blocks of a cache, or free places, in an array that is never rebuilt. Event loop only."""

from __future__ import annotations

import numpy as np

from kvferry.proto.layout import Int64s


class FreeBlocks:
    """A stack of the blocks that the block table has as FREE: the one freed last is used first.

    Below the stack are the blocks from `_unused` on, in ascending order. They are in no array: for
    a million of them the kernel would clear megabytes at each reset.
    """

    def __init__(self, capacity: int) -> None:
        self._stack = np.empty(capacity, np.int32)
        self._count = self._unused = 0

    def pop_blocks(self, count: int) -> Int64s:
        """Take `count` blocks, in ascending order; there must be that many."""
        freed = min(count, self._count)
        self._count -= freed
        end = self._unused + count - freed
        unused, self._unused = np.arange(self._unused, end), end
        return np.concatenate((np.sort(self._stack[self._count : self._count + freed]), unused))

    def push_blocks(self, blocks: Int64s) -> None:
        self._stack[self._count : self._count + blocks.size] = blocks
        self._count += blocks.size

    def replace_blocks(self, blocks: Int64s) -> None:
        """Only these blocks are free. blocks: ascending; the first is used first."""
        self._count, self._unused = 0, self._stack.size
        self.push_blocks(blocks[::-1])

    def blocks(self) -> Int64s:
        """All free blocks, in ascending order."""
        unused = np.arange(self._unused, self._stack.size)
        return np.concatenate((np.sort(self._stack[: self._count]), unused))
