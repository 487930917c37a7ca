"""The free blocks of a cache, in an array that is never rebuilt. Event loop only."""

from __future__ import annotations

import numpy as np

from kvferry.proto.layout import Int64s


class FreeBlocks:
    """A stack of the blocks that the block table has as FREE: the one freed last is used first."""

    def __init__(self, capacity: int) -> None:
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._count = capacity

    def pop_blocks(self, count: int) -> Int64s:
        """Take `count` blocks, in ascending order; there must be that many."""
        self._count -= count
        return np.sort(self._stack[self._count : self._count + count]).astype(np.int64)

    def push_blocks(self, blocks: Int64s) -> None:
        self._stack[self._count : self._count + blocks.size] = blocks
        self._count += blocks.size

    def replace_blocks(self, blocks: Int64s) -> None:
        """Only these blocks are free. blocks: ascending; the first is used first."""
        self._count = 0
        self.push_blocks(blocks[::-1])

    def blocks(self) -> Int64s:
        """All free blocks, in ascending order."""
        return np.sort(self._stack[: self._count]).astype(np.int64)
