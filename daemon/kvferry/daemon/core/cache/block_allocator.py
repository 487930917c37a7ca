"""The blocks of a cache: which are free, and how many jobs hold each of the others.

    state      key    held by jobs    becomes free
    free       no     no
    idle       yes    no              if it loses its key (eviction)
    held       yes    yes
    orphaned   no     yes             when the last job releases it

A store holds the blocks that it writes, a load or a pin those that it reads, each as often as it
names it. So a block whose key is discarded, or that a reset makes absent, is not used again while
jobs of before still read or write it. Everything is an array, which is never rebuilt. Event loop
only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvferry.proto.layout import Bools, Int64s


class BlockAllocator:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # The free blocks are the first `free` of these; the next one to be used is the last.
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._holds = np.zeros(capacity, np.int32)
        self._is_orphaned = np.zeros(capacity, np.bool_)
        self.free = capacity
        # Blocks that jobs hold, with or without a key.
        self.held = 0
        self.orphaned = 0

    @property
    def idle(self) -> int:
        """Number of blocks with a key that no job holds."""
        return self._capacity - self.free - self.held

    def idle_among(self, blocks: Int64s) -> Int64s:
        """Those of these blocks, which have a key, that no job holds."""
        idle: Int64s = blocks[self._holds[blocks] == 0]
        return idle

    def is_orphaned(self, block: int) -> bool:
        return bool(self._is_orphaned[block])

    def are_orphaned(self, blocks: Int64s) -> Bools:
        orphaned: Bools = self._is_orphaned[blocks]
        return orphaned

    def allocate_blocks(self, count: int) -> Int64s:
        """Take `count` free blocks for keys, in ascending order; there must be that many."""
        self.free -= count
        return np.sort(self._stack[self.free : self.free + count]).astype(np.int64)

    def occupy_blocks(self, blocks: Int64s) -> None:
        """Take these blocks for keys; all blocks must be free."""
        taken = np.zeros(self._capacity, np.bool_)
        taken[blocks] = True
        self._set_free(np.flatnonzero(~taken))

    def hold_blocks(self, blocks: Int64s) -> None:
        """A job holds these blocks, each as often as it is named."""
        self.held += np.unique(self.idle_among(blocks)).size
        np.add.at(self._holds, blocks, 1)

    def release_blocks(self, blocks: Int64s) -> None:
        """A job that held these blocks has ended."""
        np.subtract.at(self._holds, blocks, 1)
        idle = np.unique(self.idle_among(blocks))
        self.held -= idle.size
        if self.orphaned:
            orphans = idle[self._is_orphaned[idle]]
            self._is_orphaned[orphans] = False
            self.orphaned -= orphans.size
            self._push_free(orphans)

    def drop_keys(self, blocks: Int64s) -> None:
        """These blocks have lost their keys: those that are held are orphaned, the others free."""
        idle = self._holds[blocks] == 0
        self._push_free(blocks[idle])
        orphans = blocks[~idle]
        self._is_orphaned[orphans] = True
        self.orphaned += orphans.size

    def drop_all_keys(self) -> None:
        """All blocks have lost their keys."""
        self._is_orphaned = self._holds > 0
        self.orphaned = self.held
        self._set_free(np.flatnonzero(~self._is_orphaned))

    def check_integrity(self, with_key: Iterable[int]) -> None:
        """with_key: the blocks that have a key."""
        assert (self._holds >= 0).all(), "a block was released more often than it was held"
        assert np.count_nonzero(self._holds) == self.held, "the held blocks are counted wrong"
        orphans = np.flatnonzero(self._is_orphaned).tolist()
        assert len(orphans) == self.orphaned, "the orphaned blocks are counted wrong"
        assert self._holds[orphans].all(), "a block is orphaned that no job holds"
        blocks = [*with_key, *orphans, *self._stack[: self.free].tolist()]
        assert sorted(blocks) == list(range(self._capacity)), "a block is in two places, or in none"

    def _push_free(self, blocks: Int64s) -> None:
        self._stack[self.free : self.free + blocks.size] = blocks
        self.free += blocks.size

    def _set_free(self, blocks: Int64s) -> None:
        self.free = blocks.size
        self._stack[: self.free] = blocks[::-1]
