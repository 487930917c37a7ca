"""The blocks of a cache and their keys, in parts that each know one thing by block number.

    KeyIndex         which block a key has
    BlockContents    what can be loaded of it, and so what a lookup answers
    BlockAllocator   which blocks are free, and which a job holds
    Policy           which idle block is evicted next
    WriteMarks       which block is in which tiers, and how often it was used
    UseOrder         which block was stored first: the head of a prompt before its tail

A change of one key changes all of them: that is here, with the events of it. Called by cache.py and
tier_access.py, on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.daemon.core.cache.block_allocator import BlockAllocator
from kvferry.daemon.core.cache.block_contents import BlockContents, Parts
from kvferry.daemon.core.cache.cache_events import CacheEvents
from kvferry.daemon.core.cache.key_index import KeyIndex
from kvferry.daemon.core.cache.policies import POLICIES
from kvferry.daemon.core.cache.use_order import UseOrder
from kvferry.daemon.core.cache.write_marks import WriteMarks
from kvferry.proto.keys import EventKind
from kvferry.proto.layout import Int64s

_NO_BLOCKS: Int64s = np.empty(0, np.int64)


class KeyedBlocks:
    """All parts of a cache, changed together.

    policy: a name in POLICIES. min_uses: see WriteMarks.
    """

    def __init__(self, capacity: int, policy: str, min_uses: Sequence[int]) -> None:
        self.capacity, self._min_uses = capacity, min_uses
        self.allocator = BlockAllocator(capacity)
        self.events = CacheEvents()
        # Counters of NamespaceStatus, by field.
        self.counts: Counter[str] = Counter()
        # For each tier, the blocks that were evicted before they were written into it.
        self.unwritten = [0] * len(min_uses)
        self._make_policy = POLICIES[policy]
        self._start()

    def configure_policy(self, policy: str) -> None:
        """Change the policy. The new one starts without history."""
        if POLICIES[policy] is not self._make_policy:
            self._make_policy = POLICIES[policy]
            self._replace_policy(self.policy.blocks())

    def reserve_blocks(self, keys: tuple[bytes, ...]) -> tuple[Int64s, list[bytes]]:
        """Hold a block for each of these absent keys, which are pending from now on.

        There must be enough free and idle blocks. Returns the blocks, and the keys evicted for
        them.
        """
        allocator = self.allocator
        victims = self.policy.choose_victims(keys, allocator.free, allocator.idle_among)
        evicted = self._evict_blocks(np.array(victims, np.int64))
        blocks = allocator.allocate_blocks(len(keys))
        allocator.hold_blocks(blocks)
        self.index.add_keys(keys, blocks.tolist())
        self.contents.set_pending(blocks)
        self.policy.insert_blocks(keys, blocks)
        self.store_order.append(blocks)
        self.marks.start(blocks)
        self.counts["evictions"] += len(evicted)
        self.events.add(EventKind.PENDING, keys)
        return blocks, evicted

    def set_stored(self, blocks: Int64s, keys: Sequence[bytes], parts: Parts) -> None:
        """Pending blocks are stored. parts: of the keys that are not whole; keys: of all blocks."""
        self.contents.set_stored(blocks, [*map(parts.get, keys)] if parts else ())
        self.marks.count_uses(blocks)

    def stored_in(self, entries: Iterable[tuple[bytes, int]]) -> Int64s:
        """The blocks of those entries whose keys are stored there."""
        where = dict(entries)
        found = self.index.find_numbers(where)
        same = [block for block, told in zip(found, where.values(), strict=True) if block == told]
        blocks: Int64s = np.array(same, np.int64)
        return blocks[self.contents.is_stored(blocks)]

    def discard_blocks(self, blocks: Int64s) -> None:
        """Remove keys, other than by eviction."""
        self.policy.remove_blocks(blocks)
        self._remove_keys(blocks)

    def clear(self) -> list[KeyIndex]:
        """Make every key absent. Held blocks become free when they are released.

        Returns the tables to be freed.
        """
        tables = [self.index, *self.policy.indexes()]
        self.allocator.drop_all_keys()
        self._start()
        self.events.add(EventKind.CLEARED, ())
        return tables

    def restore_keys(self, keys: Sequence[bytes], blocks: Int64s, parts: Parts) -> None:
        """Add keys to blocks without any, as unverified; the least recent first."""
        self.allocator.occupy_blocks(blocks)
        self.index.add_keys(keys, blocks.tolist())
        self.contents.set_stored(blocks, [*map(parts.get, keys)] if parts else (), verified=False)
        self.marks.count_uses(blocks)
        self.store_order.append(blocks[::-1])  # the head of a prompt was used last
        self._replace_policy(blocks)

    def count_loss(self) -> None:
        """The region of the cache was freed: count the blocks that were not written."""
        self._count_unwritten(self.contents.stored_or_pending())

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent. Slow, for tests."""
        for part in (self.index, self.contents, self.policy):
            part.check_integrity()
        order = self.policy.blocks().tolist()
        with_key = self.index.find_numbers(self.index)
        assert sorted(order) == sorted(with_key), "the policy has other blocks than the cache"
        with_state = self.contents.stored_or_pending().tolist()
        assert sorted(with_key) == with_state, "a block has a key and no contents"
        self.allocator.check_integrity(with_key)

    def _start(self) -> None:
        self.index, self.contents = KeyIndex(self.capacity), BlockContents(self.capacity)
        self.marks = WriteMarks(self.capacity, self._min_uses)
        self.store_order = UseOrder(self.capacity)
        self._replace_policy(_NO_BLOCKS)

    def _replace_policy(self, blocks: Int64s) -> None:
        self.policy = self._make_policy(self.capacity, self.index, blocks)
        self.marks.set_changed()

    def _evict_blocks(self, blocks: Int64s) -> list[bytes]:
        """Remove the keys of blocks that the policy has chosen, and return them."""
        self._count_unwritten(blocks)
        return self._remove_keys(blocks)

    def _count_unwritten(self, blocks: Int64s) -> None:
        if blocks.size and self.unwritten:
            missing = self.marks.count_missing(blocks[self.contents.is_whole(blocks)])
            self.unwritten = [sum(counts) for counts in zip(self.unwritten, missing, strict=True)]

    def _remove_keys(self, blocks: Int64s) -> list[bytes]:
        """Remove the keys of blocks that the policy does not have, and return them.

        The event of a key matches its lookup: REMOVED for a HIT, ABANDONED for a HIT_PENDING.
        """
        hits, pending = self.contents.hits_among(blocks)
        self.events.add(EventKind.REMOVED, self.index.keys_of(hits.tolist()))
        self.events.add(EventKind.ABANDONED, self.index.keys_of(pending.tolist()))
        self.contents.remove_blocks(blocks)
        self.store_order.remove(blocks)
        self.marks.set_changed()
        self.allocator.drop_keys(blocks)
        return self.index.remove_numbers(blocks.tolist())
