"""The block table of a region: the state of each of its host blocks.

Nothing else knows that state. A namespace finds blocks by key (cache/keyed_blocks.py), engines that
name blocks by number refine the state by sub-blocks (block_states.py), and persistence computes
and compares checksums. X* is X or X_PART:

    state            contents                            loadable  lookup       next
    FREE             none                                none      MISS         PENDING, UNVERIFIED*
    ORPHANED         none, but jobs hold it              none      MISS         FREE
    PENDING          a store or promotion writes it      none      HIT_PENDING  STORED*
    STORED           all sub-blocks, no checksum yet     all       HIT          COMMITTED
    STORED_PART      some sub-blocks, no checksum yet    those     MISS         COMMITTED_PART
    COMMITTED        all sub-blocks, with a checksum     all       HIT
    COMMITTED_PART   some sub-blocks, with a checksum    those     MISS
    UNVERIFIED       all, by an earlier daemon           none      HIT_PENDING  COMMITTED
    UNVERIFIED_PART  some, by an earlier daemon          none      MISS         COMMITTED_PART

A block in one of the last seven states may also be dropped: it becomes FREE, or ORPHANED while jobs
hold it. A store holds the blocks that it writes, a load or a pin those that it reads, each as often
as it names it. So a block whose key is discarded, or that a reset makes absent, is not used again
while jobs of before still read or write it. A new epoch drops all blocks, without their lines.

Everything is an array, which is never rebuilt. Event loop only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from kvferry.daemon.core.block_lines import (
    NO_PARTS,
    BlockLines,
    Checksums,
    Lines,
    Part,
    Versions,
)
from kvferry.daemon.core.block_story import BlockStory
from kvferry.daemon.core.key_table import Hashes, KeyTable
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.layout import Bools, Int64s

FREE, ORPHANED, PENDING = 0, 1, 2
STORED, COMMITTED, UNVERIFIED = 3, 4, 5
STORED_PART, COMMITTED_PART, UNVERIFIED_PART = 6, 7, 8
STATES = 9
# By number, for people.
NAMES = (
    *("free", "orphaned", "pending", "stored", "committed", "unverified"),
    *("stored in part", "committed in part", "unverified in part"),
)

# Sets of states, by what they have in common.
HITS = STORED, COMMITTED
HITS_PENDING = PENDING, UNVERIFIED
IN_PART = STORED_PART, COMMITTED_PART, UNVERIFIED_PART
# Stored without a checksum; with one that they match; with one that was not compared yet.
UNCOMMITTED = STORED, STORED_PART
CHECKED = COMMITTED, COMMITTED_PART
UNCHECKED = UNVERIFIED, UNVERIFIED_PART
LOADABLE = UNCOMMITTED + CHECKED
WITH_CONTENTS = LOADABLE + UNCHECKED
# All that can be dropped.
OCCUPIED = (PENDING, *WITH_CONTENTS)

# The states from which a block may enter each state.
_BEFORE: Mapping[int, tuple[int, ...]] = {
    FREE: (*OCCUPIED, ORPHANED),
    ORPHANED: OCCUPIED,
    PENDING: (FREE,),
    STORED: (PENDING,),
    STORED_PART: (PENDING,),
    COMMITTED: (STORED, UNVERIFIED),
    COMMITTED_PART: (STORED_PART, UNVERIFIED_PART),
    UNVERIFIED: (FREE,),
    UNVERIFIED_PART: (FREE,),
}
_LOOKUPS = [
    Lookup.HIT if state in HITS else Lookup.HIT_PENDING if state in HITS_PENDING else Lookup.MISS
    for state in range(STATES)
]


@cache
def _mask(states: tuple[int, ...]) -> Bools:
    return np.isin(np.arange(STATES), states)


class BlockTable:
    """The states of the host blocks of a region, how often jobs hold each, and their lines.

    key_bytes: of a key; 0: the lines have no keys. memory: the lines of an earlier daemon.
    """

    def __init__(self, num_blocks: int, key_bytes: int = 0, memory: Lines | None = None) -> None:
        self.num_blocks = num_blocks
        self.lines = BlockLines(num_blocks, key_bytes, memory)
        # The name of its contents. Lines of another one are free.
        self.epoch = 0
        # Where siblings find its keys; None if they do not search it.
        self.key_table: KeyTable | None = None
        self._states = np.zeros(num_blocks, np.uint8)
        self._counts = [num_blocks, *[0] * (STATES - 1)]
        # How often jobs hold each block, and the number of blocks that any job holds.
        self._holds = np.zeros(num_blocks, np.int32)
        self.held = 0
        self.story = BlockStory(NAMES)
        # Grows whenever blocks enter a state.
        self.changes = 0
        # Whether the region was freed: nobody uses its blocks again.
        self.closed = False

    # States

    @property
    def free(self) -> int:
        return self._counts[FREE]

    def count(self, *states: int) -> int:
        """How many blocks are in one of these states."""
        return sum(self._counts[state] for state in states)

    def among(self, blocks: Int64s, *states: int) -> Bools:
        """Which of these blocks are in one of these states."""
        found: Bools = _mask(states)[self._states[blocks]]
        return found

    def find(self, *states: int, begin: int = 0, end: int = sys.maxsize) -> Int64s:
        """The blocks from `begin` to `end` - 1 that are in one of these states."""
        return np.flatnonzero(_mask(states)[self._states[begin:end]]) + begin

    def state(self, block: int) -> int:
        return int(self._states[block])

    def lookups(self, blocks: Sequence[int]) -> list[Lookup | None]:
        """The result of a lookup of each block's key; None for a block of -1."""
        states = zip(blocks, self._states[np.array(blocks, np.int64)].tolist(), strict=True)
        return [None if block < 0 else _LOOKUPS[state] for block, state in states]

    def part(self, block: int) -> Part | None:
        """The stored sub-blocks of a block in part; None for others."""
        if self._states[block] not in IN_PART:
            return None
        first, end = self.lines.parts(np.array([block]))[0].tolist()
        return first, end

    # Holds

    @property
    def idle(self) -> int:
        """Number of blocks with a key that no job holds."""
        return self.num_blocks - self._counts[FREE] - self.held

    def idle_among(self, blocks: Int64s) -> Int64s:
        """Those of these blocks that no job holds."""
        idle: Int64s = blocks[self._holds[blocks] == 0]
        return idle

    def hold(self, blocks: Int64s) -> None:
        """A job holds these blocks, each as often as it is named."""
        self.held += np.unique(self.idle_among(blocks)).size
        np.add.at(self._holds, blocks, 1)

    def release(self, blocks: Int64s) -> Int64s:
        """A job that held these blocks has ended. Returns those that become free."""
        np.subtract.at(self._holds, blocks, 1)
        idle = np.unique(self.idle_among(blocks))
        self.held -= idle.size
        if not self._counts[ORPHANED]:
            return idle[:0]
        orphans: Int64s = idle[self.among(idle, ORPHANED)]
        self._move(orphans, FREE, "released")
        return orphans

    # Transitions

    def set_pending(self, blocks: Int64s) -> None:
        """Free blocks are about to be written, which counts as a use of them."""
        self._move(blocks, PENDING, "reserved")
        # Their lines may be of an earlier epoch, with contents.
        self.lines.invalidate(blocks)
        self.lines.touch(blocks)

    def set_stored(
        self, blocks: Int64s, keys: Sequence[OffloadKey] = (), parts: Mapping[int, Part] = NO_PARTS
    ) -> None:
        """Pending blocks have contents, with these keys, if any. parts: of blocks in part."""
        self.lines.store(blocks, keys, parts, self.epoch)
        if parts:
            some = np.fromiter(parts, np.int64)
            self._move(some, STORED_PART, "completed")
            blocks = blocks[~np.isin(blocks, some)]
        self._move(blocks, STORED, "completed")
        self._show_keys(blocks)

    def restore(self, factor: int) -> tuple[Int64s, tuple[OffloadKey, ...]]:
        """Mark the blocks that an earlier daemon committed as unverified.

        factor: sub-blocks of a block. Returns them, least recent first, and their keys. Raises
        ValueError if their lines are damaged, or there are blocks and no factor.
        """
        blocks, keys = self.lines.restore(self.epoch)
        if blocks.size and factor < 1:
            raise ValueError(
                f"{blocks.size} blocks are committed, but block_size_factor is {factor}"
            )
        parts = self.lines.parts(blocks)
        first, end = parts[:, 0], parts[:, 1]
        damaged = (end > factor) | ((first >= end) & (end > 0))
        if damaged.any():
            block, (at, to) = int(blocks[damaged][0]), parts[damaged][0].tolist()
            raise ValueError(f"sub-blocks {at} to {to - 1} of host block {block} do not exist")
        self._move(blocks[end == 0], UNVERIFIED, "restored")
        self._move(blocks[end > 0], UNVERIFIED_PART, "restored")
        return blocks, keys

    def commit(self, blocks: Int64s, versions: Versions, checksums: Checksums) -> None:
        """Commit stored blocks, except those that were dropped since they had these versions.

        blocks, versions, checksums: (n,).
        """
        same = self.lines.unchanged(blocks, versions) & self.among(blocks, *UNCOMMITTED)
        blocks = blocks[same]
        self.lines.commit(blocks, checksums[same])
        self._move(blocks[self.among(blocks, STORED)], COMMITTED, "checksum")
        self._move(blocks[self.among(blocks, STORED_PART)], COMMITTED_PART, "checksum")

    def unchanged(self, blocks: Int64s, versions: Versions) -> Bools:
        """Which blocks have contents, and have not lost them since they had these versions."""
        return self.lines.unchanged(blocks, versions) & self.among(blocks, *WITH_CONTENTS)

    def set_verified(self, blocks: Int64s) -> None:
        """Unverified blocks match their checksums. Others are ignored."""
        whole = blocks[self.among(blocks, UNVERIFIED)]
        self.lines.validate(blocks[self.among(blocks, *UNCHECKED)])
        self._move(whole, COMMITTED, "verified")
        self._move(blocks[self.among(blocks, UNVERIFIED_PART)], COMMITTED_PART, "verified")
        self._show_keys(whole)

    def drop(self, blocks: Int64s, cause: str = "dropped") -> Int64s:
        """Occupied blocks lose their contents. Returns those that become free. cause: for the
        story."""
        self.lines.invalidate(blocks)
        idle = self._holds[blocks] == 0
        self._move(blocks[~idle], ORPHANED, cause)
        freed: Int64s = blocks[idle]
        self._move(freed, FREE, cause)
        return freed

    def begin_epoch(self, epoch: int) -> None:
        """All blocks lose their contents, which were of another epoch. No line changes."""
        assert self.closed or epoch != self.epoch, f"epoch {epoch} has begun before"
        self.epoch = epoch
        self.story.add_for_all("new epoch")
        self._states = np.where(self._holds > 0, np.uint8(ORPHANED), np.uint8(FREE))
        self._counts = [self.num_blocks - self.held, self.held, *[0] * (STATES - 2)]
        self.changes += 1

    def check_integrity(self) -> None:
        """Raise AssertionError if the columns contradict each other. Slow, for tests."""
        counts = np.bincount(self._states, minlength=STATES).tolist()
        assert counts == self._counts, "the states of blocks are counted wrong"
        assert (self._holds >= 0).all(), "a block was released more often than it was held"
        assert np.count_nonzero(self._holds) == self.held, "the held blocks are counted wrong"
        assert self._holds[self.find(ORPHANED)].all(), "a block is orphaned but not held"
        assert not self._holds[self.find(FREE)].any(), "a job holds a free block"
        committed = self.lines.committed(self.epoch).tolist()
        assert committed == self.find(*CHECKED, *UNCHECKED).tolist(), "commits and states differ"
        odd = self.lines.versions(np.arange(self.num_blocks)) & 1 == 1
        own = self.lines.memory["epoch"] == self.epoch
        loadable = self.among(np.arange(self.num_blocks), *LOADABLE)
        assert (odd & own == loadable).all(), "versions and states differ"

    def share_keys(self, buckets: Hashes) -> None:
        """Show the keys of blocks that are loadable as a whole from now on in a key table."""
        self.key_table = KeyTable(buckets, self.num_blocks, lambda some: self.among(some, *HITS))

    def _show_keys(self, blocks: Int64s) -> None:
        if self.key_table is not None and blocks.size:
            self.key_table.add(self.lines.keys(blocks), blocks)

    def _move(self, blocks: Int64s, state: int, cause: str) -> None:
        """The one place where blocks enter a state. Raises IllegalTransition."""
        if not blocks.size:
            return
        states = self._states[blocks]
        self.story.check(blocks, states, state, _mask(_BEFORE[state]))
        self.story.add(blocks, states, state, cause)
        for before, count in enumerate(np.bincount(states).tolist()):
            self._counts[before] -= count
        self._counts[state] += blocks.size
        self._states[blocks] = state
        self.changes += 1
