"""The cache of one namespace: which keys are in which host blocks.

A key is pending (a store of it is on its way), stored (its bytes are in its block), or absent:

    absent --prepare_store--> pending --complete_store--> stored --evicted--> absent
                                 \\_______ failed _________> absent

What each block has is in KeyedBlocks; what the tiers below do with blocks is TierAccess.

A job is identified by the object that it was given, a Reservation or Pins. It holds its blocks
until it ends, whatever becomes of their keys. So the late end of a job from before a reset cannot
change a key of today.

An offer is all or nothing, and nothing has to be undone: the cache first counts how many blocks may
be evicted, and only then the policy names the victims. Event loop only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import numpy as np

from kvferry.daemon.core.block_lines import NO_PARTS, Part
from kvferry.daemon.core.block_table import (
    HITS,
    HITS_PENDING,
    IN_PART,
    LOADABLE,
    ORPHANED,
    PENDING,
    UNCHECKED,
    WITH_CONTENTS,
    BlockTable,
)
from kvferry.daemon.core.cache.admission_filter import AdmissionFilter
from kvferry.daemon.core.cache.cache_events import CacheEvents
from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.cache.jobs import CacheUsage, Parts, Pins, Reservation
from kvferry.daemon.core.cache.keyed_blocks import KeyedBlocks
from kvferry.daemon.core.cache.policies import POLICIES
from kvferry.daemon.core.cache.tier_access import TierAccess
from kvferry.daemon.core.layout import NO_BLOCKS
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import EventKind, Lookup
from kvferry.proto.layout import Int64s

# Keys whose offers are counted; the capacity if that is more.
OFFERS_REMEMBERED = 1 << 16


class Cache:
    """Keys in `capacity` host blocks.

    policy: a name in POLICIES. store_threshold: a key is stored from this offer on. min_uses: for
    each tier below the use from which on a key is written; 0: none is. table: of the blocks.
    Raises ValueError if an argument is invalid.
    """

    def __init__(
        self,
        capacity: int,
        policy: str = "lru",
        store_threshold: int = 1,
        min_uses: Sequence[int] = (),
        table: BlockTable | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity} blocks; give at least 1")
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; use {' or '.join(POLICIES)}")
        self._capacity = capacity
        self.table = table or BlockTable(capacity)
        self._blocks = KeyedBlocks(self.table, policy, min_uses)
        self.tier_access = TierAccess(self._blocks)
        self._admission_filter = AdmissionFilter(store_threshold, max(capacity, OFFERS_REMEMBERED))
        # Jobs in flight, those from before a reset included.
        self._jobs: set[Reservation | Pins] = set()
        self.counts = self._blocks.counts

    def configure(self, policy: str, store_threshold: int) -> None:
        """Change the policy and the threshold. Keys and counters stay.

        The new policy starts without history, and offers are counted from 0.
        """
        self._blocks.configure_policy(policy)
        self._admission_filter = AdmissionFilter(
            store_threshold, max(self._capacity, OFFERS_REMEMBERED)
        )

    @property
    def events(self) -> CacheEvents:
        return self._blocks.events

    @property
    def usage(self) -> CacheUsage:
        table = self.table
        pending, orphaned = table.count(PENDING), table.count(ORPHANED)
        return CacheUsage(
            capacity=self._capacity,
            free=table.free,
            pending=pending,
            ready=table.count(*LOADABLE),
            unverified=table.count(*UNCHECKED),
            pinned=table.held - orphaned - pending,
            orphaned=orphaned,
        )

    def lookups(self, keys: Sequence[bytes]) -> list[Lookup | None]:
        """The lookup of each key, which is not counted; None if it has no block."""
        return self.table.lookups(self._blocks.index.find_numbers(keys))

    # Stores

    def prepare_store(
        self, keys: Sequence[bytes], parts: Parts = NO_PARTS, keep: Iterable[bytes] = ()
    ) -> Reservation | None:
        """Reserve blocks for those of `keys` that are absent and were offered often enough.

        parts: the sub-blocks of keys that are stored in part. Stored keys that are not pinned are
            stored again if they are unverified, or if this store covers more sub-blocks.
        keep: further keys of the same offer. No key of the offer is evicted for another.

        Returns None if too few keys can be evicted. Then nothing changes, except that the offer
        counts for the threshold. Keys below the threshold, and all keys of an offer without room,
        count as skipped stores. The first key of an offer becomes the most recent.
        """
        offered = tuple(dict.fromkeys(keys))
        found = self._blocks.index.find_numbers(offered)
        # Blocks whose keys must be stored again.
        again = self._blocks.replaceable_among(found, [*map(parts.get, offered)])
        replaceable = set(self.table.idle_among(_array(again)).tolist())
        candidates = [
            key
            for key, block in zip(offered, found, strict=True)
            if block < 0 or block in replaceable
        ]
        wanted = self._admission_filter.count_offers(candidates)
        self.counts["stores_skipped"] += len(candidates) - len(wanted)
        if not wanted:
            return Reservation((), (), ())
        replaced = (
            set(self._blocks.index.find_numbers(wanted)) & replaceable if replaceable else set()
        )
        kept = {*found, *self._blocks.index.find_numbers(keep)} - replaced - {-1}
        needed = len(wanted) - self.table.free
        held = _array(kept)
        self.table.hold(held)
        try:
            if needed > self.table.idle:
                self.counts["stores_skipped"] += len(wanted)
                return None
            self._blocks.discard_blocks(_array(replaced), "replaced")
            blocks, evicted = self._blocks.reserve_blocks(tuple(wanted))
            stored = {key: parts[key] for key in wanted if key in parts} if parts else NO_PARTS
            reservation = Reservation(tuple(wanted), tuple(blocks.tolist()), tuple(evicted), stored)
            self._jobs.add(reservation)
            return reservation
        finally:
            self._blocks.release_blocks(held)

    def complete_store(
        self, reservation: Reservation, success: bool, lost: Int64s = NO_BLOCKS
    ) -> None:
        """End a store: its keys become loadable, or absent. A second call has no effect.

        lost: blocks of a successful store that could not be packed: their keys become absent.
        """
        if reservation not in self._jobs:
            return
        self._jobs.remove(reservation)
        blocks, keys, parts = _array(reservation.blocks), reservation.keys, reservation.parts
        present = self.table.state(reservation.blocks[0]) == PENDING
        self._blocks.release_blocks(blocks)
        if present and success:
            if lost.size:
                stored = ~np.isin(blocks, lost)
                self._blocks.discard_blocks(blocks[~stored], "could not be packed")
                self.counts["stores_unpackable"] += lost.size
                blocks, keys = blocks[stored], tuple(compress(keys, stored.tolist()))
                parts = {key: parts[key] for key in keys if key in parts}
            places = zip(blocks.tolist(), keys, strict=True) if parts else ()
            in_part = {block: parts[key] for block, key in places if key in parts}
            self._blocks.set_stored(blocks, keys, in_part)
            self.counts["stored"] += len(keys)
            whole = [key for key in keys if key not in parts] if parts else keys
            self.events.add(EventKind.STORED, whole)
            self.events.add(EventKind.ABANDONED, tuple(parts))
        elif present:
            self._blocks.discard_blocks(blocks, "store failed")

    # Loads

    def prepare_load(self, keys: Sequence[bytes]) -> Pins:
        """Pin loadable keys, each as often as it is named.

        Raises Refused (KEY_ABSENT) for the first key that is not loadable, and changes nothing.
        """
        pins = Pins(self._blocks.find_loadable(keys))
        self.table.hold(pins.blocks)
        self._blocks.marks.count_uses(pins.blocks)
        self._jobs.add(pins)
        return pins

    def complete_load(self, pins: Pins) -> None:
        """End a load. Raises Refused (NOT_PINNED) if these pins were already released."""
        if pins not in self._jobs:
            number = pins.blocks.size
            message = f"the pins of {number} blocks were already released; complete each load once"
            raise Refused(Code.NOT_PINNED, message, number)
        self._jobs.remove(pins)
        self._blocks.release_blocks(pins.blocks)

    def pin_loadable(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the loadable keys for a session. Returns the block of each key, -1 for
        the others."""
        found = _array(self._blocks.index.find_numbers(keys))
        found[(found >= 0) & ~self.table.among(found, *LOADABLE)] = -1
        self.table.hold(found[found >= 0])
        blocks: list[int] = found.tolist()
        return blocks

    def unpin_blocks(self, blocks: Sequence[int]) -> None:
        """Release blocks that `pin_loadable` has held."""
        self._blocks.release_blocks(_array(blocks))

    @property
    def has_parts(self) -> bool:
        """Whether any key is stored in part."""
        return self.table.count(*IN_PART) > 0

    def stored_part(self, key: bytes) -> Part | None:
        """The stored sub-blocks of a key that is stored in part; None for others."""
        block = self._blocks.index.find_number(key)
        return None if block < 0 else self.table.part(block)

    # Changes

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark keys as used; the first ends up most recent. Absent ones are ignored."""
        found = self._blocks.index.find_numbers(dict.fromkeys(keys))
        self._blocks.touch_blocks(_array([block for block in reversed(found) if block >= 0]))

    def spare(self, keys: Sequence[bytes]) -> None:
        """Evict these keys first, the last one before the others, until they are touched. Absent
        ones are ignored."""
        found = self._blocks.index.find_numbers(dict.fromkeys(keys))
        self._blocks.spare.append(_array([block for block in reversed(found) if block >= 0]))

    def forget_spare(self) -> None:
        """No key is evicted before the others any more."""
        self._blocks.spare.remove(self._blocks.spare.numbers())

    def mark_verified(self, blocks: Int64s) -> None:
        """Mark the keys in these blocks as verified. Those that are not unverified are ignored."""
        self._blocks.mark_verified(blocks)

    def discard_blocks(self, blocks: Int64s) -> None:
        """Make keys absent whose blocks have lost their bytes. Blocks without are ignored.

        A block that jobs still read is orphaned until the last of them ends.
        """
        self._blocks.discard_blocks(blocks[self.table.among(blocks, *WITH_CONTENTS)], "corrupt")

    def reset(self, epoch: int) -> DeferredFree:
        """Make every key absent: another epoch begins.

        Recency, ghosts and offers are forgotten; counters stay. Blocks of jobs in flight become
        free when these jobs end. Returns the keys to be freed.
        """
        return DeferredFree(*self._blocks.clear(epoch), self._admission_filter.take_index())

    def restore_keys(self, factor: int) -> None:
        """Restore what an earlier daemon committed into a new cache, as unverified keys.

        factor: sub-blocks of a block. Raises ValueError if the block table is damaged.
        """
        self._blocks.restore_keys(factor)

    # Keys

    def keys_between(self, begin: int, end: int) -> tuple[list[bytes], list[bytes]]:
        """Of the keys in blocks `begin` to `end` - 1, those that are a HIT, and a HIT_PENDING."""
        hits, pending = (
            self._blocks.index.keys_of(self.table.find(*states, begin=begin, end=end).tolist())
            for states in (HITS, HITS_PENDING)
        )
        return hits, pending

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent. Slow, for tests."""
        self._blocks.check_integrity()


def _array(blocks: Iterable[int]) -> Int64s:
    return np.fromiter(blocks, np.int64)
