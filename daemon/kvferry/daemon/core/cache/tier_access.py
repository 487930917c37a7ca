"""The access of the tiers below the host pool to the blocks of a cache.

    promotion    absent --prepare_promotion--> pending --end_promotion--> stored or absent
    write        stored --take_writes--> held --end_writes--> stored, in that tier or not

Blocks are held as long as a tier may write into them or read them, whatever becomes of their keys.
Called by the core, on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.daemon.core.block_table import COMMITTED, PENDING
from kvferry.daemon.core.cache.keyed_blocks import KeyedBlocks
from kvferry.proto.keys import EventKind
from kvferry.proto.layout import Bools, Int64s

_NO_BLOCKS: Int64s = np.empty(0, np.int64)
# Blocks that are looked at in one step.
CHECKED_BLOCKS = 1 << 13


class TierAccess:
    def __init__(self, blocks: KeyedBlocks) -> None:
        self._blocks = blocks
        # Blocks held by writes into each tier.
        self._writing = Counter[int]()
        # For each tier, the share and the numbers of changes when `take_writes` found nothing.
        self._found_nothing: dict[int, tuple[float, int, int]] = {}

    @property
    def writing(self) -> int:
        """Holds of blocks by writes into all tiers."""
        return self._writing.total()

    @property
    def unwritten(self) -> list[int]:
        """For each tier, the blocks that were evicted before they were written into it."""
        return self._blocks.unwritten

    def count_loss(self) -> None:
        """The region of the cache was freed. Add its blocks that no tier has to `unwritten`."""
        self._blocks.count_loss()

    def prepare_promotion(self, keys: Sequence[bytes], keep: Sequence[bytes] = ()) -> Int64s:
        """Hold a block for each of these distinct absent keys, which are pending from now on.

        keep: keys that are not evicted for them. If too few others can be evicted, only the first
        keys get a block. Returns the blocks, which are held until `release_promotion`.
        """
        table = self._blocks.table
        kept = [block for block in self._blocks.index.find_numbers(keep) if block >= 0]
        kept_blocks: Int64s = np.array(kept, np.int64)
        table.hold(kept_blocks)
        fitting = tuple(keys[: table.free + table.idle])
        blocks = self._blocks.reserve_blocks(fitting)[0] if fitting else _NO_BLOCKS
        self._blocks.release_blocks(kept_blocks)
        return blocks

    def end_promotion(
        self, keys: Sequence[bytes], blocks: Int64s, ok: Bools, written_in: Sequence[int]
    ) -> Bools:
        """Make promoted keys loadable where `ok`, and the others absent. Blocks stay held.

        keys, blocks, ok: (n,). written_in: the tiers into which the loadable ones need not be
        written. Keys from before a reset are ignored. Returns which are loadable.
        """
        present = self._blocks.table.among(blocks, PENDING)
        stored: Bools = present & ok
        names = [key for key, done in zip(keys, stored.tolist(), strict=True) if done]
        self._blocks.set_stored(blocks[stored], names)
        self._blocks.marks.set_written(blocks[stored], written_in)
        self._blocks.events.add(EventKind.STORED, names)
        self._blocks.discard_blocks(blocks[present & ~ok], "promotion failed")
        return stored

    def release_promotion(self, blocks: Int64s) -> None:
        """Nothing writes into these promoted blocks any longer."""
        self._blocks.release_blocks(blocks)

    def take_writes(self, tier: int, limit: int, coldest: float) -> tuple[list[bytes], Int64s]:
        """Hold blocks to be written into a tier, until `end_writes`: their keys, and the blocks.

        They are loadable as a whole, have a checksum, were used often enough, and are not in this
        tier. coldest: the share of each queue of the policy that is written, from its cold end, 0
        to 1, with all blocks that were stored before. Within a prompt the tail is coldest, and is
        useless without the head; so blocks are written in the order in which they were stored. At
        most `limit` blocks. The writes into one tier hold at most a quarter of the cache, or one
        block.
        """
        marks, table, capacity = self._blocks.marks, self._blocks.table, self._blocks.capacity
        limit = min(limit, max(1, capacity // 4) - self._writing[tier])
        state = coldest, table.changes, marks.changes
        if limit <= 0 or self._found_nothing.get(tier) == state:
            return [], _NO_BLOCKS
        parts, left = list[Int64s](), limit
        order = self._blocks.store_order
        last = self._last_to_write(coldest)
        for blocks in order.oldest():
            blocks = blocks[order.stamps_of(blocks) <= last]
            if left <= 0 or not blocks.size:
                break
            blocks = blocks[table.among(blocks, COMMITTED)]
            found = blocks[marks.are_missing(blocks, tier)][:left]
            parts.append(found)
            left -= found.size
        taken = np.concatenate((_NO_BLOCKS, *parts))
        if not taken.size:
            self._found_nothing[tier] = state
            return [], taken
        table.hold(taken)
        marks.set_written(taken, [tier])
        self._writing[tier] += taken.size
        return self._blocks.index.keys_of(taken.tolist()), taken

    def written_blocks(self, tier: int, begin: int, limit: int) -> tuple[list[bytes], Int64s]:
        """Up to `limit` blocks from block `begin` on that were written into a tier, and used since;
        and their keys. Those that are held are left out: they may be on the way there.
        """
        found, capacity = list[Int64s](), self._blocks.capacity
        while begin < capacity and limit > 0:
            blocks = np.arange(begin, min(begin + CHECKED_BLOCKS, capacity))
            used = blocks[self._blocks.marks.are_used(blocks, tier)]
            used = self._blocks.table.idle_among(used)[:limit]
            found.append(used)
            begin, limit = begin + blocks.size, limit - used.size
        written = np.concatenate((_NO_BLOCKS, *found))
        return self._blocks.index.keys_of(written.tolist()), written

    def reopen_writes(self, tier: int, entries: Iterable[tuple[bytes, int]]) -> None:
        """Keys in these blocks are not in a tier, other than `written_blocks` assumed."""
        blocks = self._blocks.table.idle_among(self._blocks.stored_in(entries))
        self._blocks.marks.set_unwritten(blocks, tier)

    def end_writes(self, tier: int, blocks: Int64s, done: Bools) -> None:
        """Release blocks of `take_writes`. done: which of them are in the tier now; (n,)."""
        self._writing[tier] -= blocks.size
        self._blocks.marks.set_unwritten(blocks[~done], tier)
        self._blocks.release_blocks(blocks)

    def _last_to_write(self, coldest: float) -> int:
        """The newest stamp, in the order of stores, of this coldest share of the blocks."""
        last, store_order = 0, self._blocks.store_order
        for order in self._blocks.policy.orders():
            unseen = int(np.ceil(coldest * len(order)))
            for blocks in order.oldest():
                if unseen <= 0:
                    break
                stamps = store_order.stamps_of(blocks[:unseen])
                last, unseen = max(last, int(stamps.max())), unseen - blocks.size
        return last
