"""The blocks of a cache and their keys.

    BlockTable    the state of each block, and so what a lookup answers
    KeyIndex      which block a key has
    FreeBlocks    which free block is used next
    Policy        which idle block is evicted next
    spare         those that are evicted before
    TierMarks     which block is in which tiers, and how often it was used
    UseOrder      which block was stored first: the head of a prompt before its tail

A change of one key changes all of them: that is here, with the events of it. Called by cache.py and
tier_access.py, on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, islice

import numpy as np

from kvferry.daemon.core.block_lines import NO_PARTS, Part
from kvferry.daemon.core.block_table import (
    FREE,
    HITS,
    HITS_PENDING,
    IN_PART,
    LOADABLE,
    OCCUPIED,
    PENDING,
    UNCHECKED,
    UNVERIFIED,
    WITH_CONTENTS,
    BlockTable,
)
from kvferry.daemon.core.cache.cache_events import CacheEvents
from kvferry.daemon.core.cache.free_blocks import FreeBlocks
from kvferry.daemon.core.cache.key_index import KeyIndex
from kvferry.daemon.core.cache.policies import POLICIES
from kvferry.daemon.core.cache.policy import idle_blocks
from kvferry.daemon.core.cache.tier_marks import TierMarks
from kvferry.daemon.core.cache.use_order import UseOrder
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import EventKind
from kvferry.proto.layout import Int64s

_NO_BLOCKS: Int64s = np.empty(0, np.int64)


class KeyedBlocks:
    """All parts of a cache, changed together.

    policy: a name in POLICIES. min_uses: see TierMarks.
    """

    def __init__(self, table: BlockTable, policy: str, min_uses: Sequence[int]) -> None:
        self.table, self.capacity, self._min_uses = table, table.num_blocks, min_uses
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
            self._replace_policy(self.capacity, self.policy.blocks())

    def reserve_blocks(self, keys: tuple[bytes, ...]) -> tuple[Int64s, list[bytes]]:
        """Hold a block for each of these absent keys, which are pending from now on.

        There must be enough free and idle blocks. Returns the blocks, and the keys evicted for
        them.
        """
        table = self.table
        spare = self._take_spare(len(keys) - table.free)
        chosen = self.policy.choose_victims(keys, table.free + spare.size, table.idle_among)
        victims = np.concatenate((spare, np.array(chosen, np.int64)))
        self._count_unwritten(victims)
        evicted = self._remove_keys(victims, "evicted")
        blocks = self._free.pop_blocks(len(keys))
        table.set_pending(blocks)
        table.hold(blocks)
        self.index.add_keys(keys, blocks.tolist())
        self.policy.insert_blocks(keys, blocks)
        self.store_order.append(blocks)
        self.marks.start(blocks)
        self.counts["evictions"] += len(evicted)
        self.events.add(EventKind.PENDING, keys)
        return blocks, evicted

    def touch_blocks(self, blocks: Int64s) -> None:
        """Distinct blocks with keys are used, the last one most recently."""
        pending = self.table.among(blocks, PENDING)
        self.policy.touch_blocks(blocks, pending)
        self.marks.count_uses(blocks[~pending])
        self._forget_spare(blocks)

    def release_blocks(self, blocks: Int64s) -> None:
        """A job that held these blocks has ended."""
        freed = self.table.release(blocks)
        if freed.size:
            self._free.push_blocks(freed)

    def set_stored(
        self, blocks: Int64s, keys: Sequence[bytes], parts: Mapping[int, Part] = NO_PARTS
    ) -> None:
        """Pending blocks are stored under their keys. parts: of the blocks that are not whole."""
        self.table.set_stored(blocks, keys, parts)
        self.marks.count_uses(blocks)

    def stored_in(self, entries: Iterable[tuple[bytes, int]]) -> Int64s:
        """The blocks of those entries whose keys are stored there."""
        where = dict(entries)
        found = self.index.find_numbers(where)
        same = [block for block, told in zip(found, where.values(), strict=True) if block == told]
        blocks: Int64s = np.array(same, np.int64)
        return blocks[self.table.among(blocks, *WITH_CONTENTS)]

    def find_loadable(self, keys: Sequence[bytes]) -> Int64s:
        """The blocks of these keys. Raises Refused for the first one that is not loadable."""
        found = self.index.find_numbers(keys)
        blocks: Int64s = np.array(found, np.int64)
        if min(found, default=0) >= 0 and self.table.among(blocks, *LOADABLE).all():
            return blocks
        for key, block in zip(keys, found, strict=True):
            if block < 0:
                message = f"key {key.hex()} is not in the cache; treat it as a miss"
            elif (state := self.table.state(block)) == PENDING:
                message = f"key {key.hex()} is still being stored; load it when lookup says HIT"
            elif state in UNCHECKED:
                message = (
                    f"key {key.hex()} is unverified since the daemon's restart; load it when "
                    "lookup says HIT"
                )
            else:
                continue
            break
        raise Refused(Code.KEY_ABSENT, message, key.hex())

    def replaceable_among(self, found: Sequence[int], parts: Sequence[Part | None]) -> list[int]:
        """The blocks of an offer that a store replaces: unverified ones, and those of which it
        covers more.

        found: -1 for a key without a block. parts: what the store covers of each; None for all.
        """
        if not self.table.count(*UNCHECKED, *IN_PART):
            return []
        offered = zip(found, parts, strict=True)
        return [block for block, part in offered if block >= 0 and self._is_replaced(block, part)]

    def mark_verified(self, blocks: Int64s) -> None:
        """Unverified blocks match their checksums. Others are ignored."""
        hits = blocks[self.table.among(blocks, UNVERIFIED)]
        self.table.set_verified(blocks)
        self.events.add(EventKind.STORED, self.index.keys_of(hits.tolist()))

    def discard_blocks(self, blocks: Int64s, cause: str = "discarded") -> None:
        """Remove keys, other than by eviction. cause: for the story of the blocks."""
        self.policy.remove_blocks(blocks)
        self._remove_keys(blocks, cause)

    def clear(self, epoch: int) -> list[KeyIndex]:
        """Make every key absent: another epoch begins.

        Held blocks become free when they are released. Returns the tables to be freed.
        """
        tables = [self.index, *self.policy.indexes()]
        self.table.begin_epoch(epoch)
        self._start()
        if self.table.held:
            self._free.replace_blocks(self.table.find(FREE))
        self.events.add(EventKind.CLEARED, ())
        return tables

    def restore_keys(self, factor: int) -> None:
        """Restore the keys of the block table, as unverified. See BlockTable.restore.

        If the table is damaged and a key occurs twice, the more recent block keeps it.
        """
        blocks, keys = self.table.restore(factor)
        self.index.add_keys(keys, blocks.tolist())
        if self.index.has_repeated:
            keeps = np.array(self.index.find_numbers(keys), np.int64) == blocks
            self.table.drop(blocks[~keeps], "the key is in another block, too")
            blocks, keys = blocks[keeps], tuple(compress(keys, keeps.tolist()))
            self._start()
            self.index.add_keys(keys, blocks.tolist())
        self._free.replace_blocks(self.table.find(FREE))
        self.marks.count_uses(blocks)
        self.store_order.append(blocks[::-1])  # the head of a prompt was used last
        self._replace_policy(self.capacity, blocks)

    def count_loss(self) -> None:
        """The region of the cache was freed: count the blocks that were not written."""
        if self.unwritten:
            self._count_unwritten(self.table.find(*OCCUPIED))

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent. Slow, for tests."""
        for part in (self.table, self.index, self.policy):
            part.check_integrity()
        occupied, free = self.table.find(*OCCUPIED).tolist(), self.table.find(FREE).tolist()
        keyed = sorted(self.index.find_numbers(self.index))
        assert keyed == occupied, "other blocks have a key than have contents"
        assert sorted(self.policy.blocks().tolist()) == occupied, "the policy has other blocks"
        assert sorted(self.store_order.numbers().tolist()) == occupied, "the order has other blocks"
        assert self._free.blocks().tolist() == free, "other blocks are free"
        self.spare.check_integrity()
        assert {*self.spare.numbers().tolist()} <= {*occupied}, "a block without a key is spare"

    def _is_replaced(self, block: int, part: Part | None) -> bool:
        if self.table.state(block) in UNCHECKED:
            return True
        stored = self.table.part(block)
        if stored is None or part is None:
            return stored is not None
        return part[0] <= stored[0] and stored[1] <= part[1] and part != stored

    def _start(self) -> None:
        # After its region was freed, a cache gets no keys: it needs no memory for them.
        size = 0 if self.table.closed else self.capacity
        self._free = FreeBlocks(self.capacity)
        self.index = KeyIndex(size)
        self.marks = TierMarks(size, self._min_uses)
        self.store_order = UseOrder(size)
        self.spare = UseOrder(size)
        self._replace_policy(size, _NO_BLOCKS)

    def _replace_policy(self, size: int, blocks: Int64s) -> None:
        self.policy = self._make_policy(size, self.index, blocks)
        self.marks.changes += 1

    def _take_spare(self, count: int) -> Int64s:
        """At most so many spare blocks that are idle: they are evicted now."""
        idle = idle_blocks(self.spare, self.table.idle_among) if len(self.spare) else ()
        taken = np.array([*islice(idle, max(0, count))], np.int64)
        self.policy.remove_blocks(taken)
        return taken

    def _forget_spare(self, blocks: Int64s) -> None:
        if len(self.spare):
            self.spare.remove(blocks[self.spare.contains(blocks)])

    def _count_unwritten(self, blocks: Int64s) -> None:
        if blocks.size and self.unwritten:
            missing = self.marks.count_missing(blocks[self.table.among(blocks, *HITS)])
            self.unwritten = [sum(counts) for counts in zip(self.unwritten, missing, strict=True)]

    def _remove_keys(self, blocks: Int64s, cause: str) -> list[bytes]:
        """Remove the keys of blocks that the policy does not have, and return them.

        The event of a key matches its lookup: REMOVED for a HIT, ABANDONED for a HIT_PENDING.
        """
        for kind, states in ((EventKind.REMOVED, HITS), (EventKind.ABANDONED, HITS_PENDING)):
            found = blocks[self.table.among(blocks, *states)]
            self.events.add(kind, self.index.keys_of(found.tolist()))
        self.store_order.remove(blocks)
        self._forget_spare(blocks)
        self._free.push_blocks(self.table.drop(blocks, cause))
        return self.index.remove_numbers(blocks.tolist())
