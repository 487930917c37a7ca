"""The cache of one namespace: which keys are in which host blocks.

A key is pending (a store of it is on its way), ready (its bytes are in its block), or absent:

    absent --prepare_store--> pending --complete_store--> ready --evicted--> absent
                                 \\_______ failed _________> absent

Not every ready key is a HIT: it may be stored in part, or unverified (resident_keys.py).

A block has one pending or ready key, or it is free, or it is *orphaned*. A reset makes every key
absent at once, but jobs in flight still read and write their blocks. These blocks are orphaned
until the last of the jobs has ended. A job is identified by the object that it was given, a
Reservation or Pins, which is either current or from before a reset. So the late end of an old job
cannot change a key of today.

An offer is all or nothing, and nothing has to be undone: the cache first counts how many keys may
be evicted, and only then the policy inserts the new keys and names the victims. Event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvferry.daemon.core.cache.admission_filter import AdmissionFilter
from kvferry.daemon.core.cache.block_allocator import BlockAllocator
from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.cache.policy import POLICIES, EvictableFilter
from kvferry.daemon.core.cache.resident_keys import NO_PARTS, Parts, ResidentKeys, outside
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import EventKind, Lookup

# Keys whose offers are counted; the capacity if that is more.
OFFERS_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """A store: its keys in the order offered, the block of each, and the keys evicted for it.

    parts: the sub-blocks of keys that are stored in part.
    """

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    evicted: tuple[bytes, ...]
    parts: Parts = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Pins:
    """A load: its keys, and the block of each, which stays in place until complete_load."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    kind: EventKind
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks now, and keys counted since the start.

    capacity = free + pending + ready + unverified + orphaned. Keys stored in part count as ready.
    """

    capacity: int
    free: int
    pending: int
    ready: int
    unverified: int
    pinned: int
    orphaned: int
    hits: int
    misses: int
    stores_skipped: int
    stored: int
    evictions: int

    @property
    def used(self) -> int:
        """Blocks that are not free."""
        return self.capacity - self.free


class Cache:
    """Keys in `capacity` host blocks.

    policy: a name in POLICIES. store_threshold: a key is stored from this offer on. Raises
    ValueError if an argument is invalid.
    """

    def __init__(self, capacity: int, policy: str = "lru", store_threshold: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity} blocks; give at least 1")
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; use {' or '.join(POLICIES)}")
        self._capacity = capacity
        self._make_policy = POLICIES[policy]
        self._policy = self._make_policy(capacity)
        self._admission_filter = _make_filter(store_threshold, capacity)
        self._allocator = BlockAllocator(capacity)
        self._pending: dict[bytes, int] = {}
        self._ready = ResidentKeys()
        # Pin count of each pinned key.
        self._pins: Counter[bytes] = Counter()
        # Blocks of keys that were discarded while pinned; such a key cannot be stored again yet.
        self._orphaned: dict[bytes, int] = {}
        self._stores: set[Reservation] = set()
        self._loads: set[Pins] = set()
        # Jobs in flight from before a reset.
        self._past_jobs: set[Reservation | Pins] = set()
        self._recording = False
        self._events: list[CacheEvent] = []
        # Called when there is an event to take.
        self.on_event: Callable[[], None] = _ignore
        self._hits = self._misses = self._skipped = self._stored = self._evictions = 0

    @property
    def recording(self) -> bool:
        """Whether events are kept for take_events. Turning it off drops those kept so far."""
        return self._recording

    @recording.setter
    def recording(self, on: bool) -> None:
        self._recording = on
        if not on:
            self._events = []

    def configure(self, policy: str, store_threshold: int) -> None:
        """Change the policy and the threshold. Keys and counters stay.

        The new policy starts without history, and offers are counted from 0.
        """
        if POLICIES[policy] is not self._make_policy:
            self._make_policy = POLICIES[policy]
            self._policy = self._make_policy(self._capacity, self._policy.take_keys())
        self._admission_filter = _make_filter(store_threshold, self._capacity)

    @property
    def usage(self) -> CacheUsage:
        return CacheUsage(
            capacity=self._capacity,
            free=self._allocator.free,
            pending=len(self._pending),
            ready=len(self._ready) - len(self._ready.unverified),
            unverified=len(self._ready.unverified),
            pinned=len(self._pins) - len(self._orphaned),
            orphaned=self._allocator.orphaned + len(self._orphaned),
            hits=self._hits,
            misses=self._misses,
            stores_skipped=self._skipped,
            stored=self._stored,
            evictions=self._evictions,
        )

    def lookup(self, key: bytes) -> Lookup:
        """HIT, MISS or HIT_PENDING, which counts as neither. Changes nothing else."""
        found = Lookup.HIT_PENDING if key in self._pending else self._ready.lookup(key)
        self._hits += found is Lookup.HIT
        self._misses += found is Lookup.MISS
        return found

    @property
    def parts(self) -> Parts:
        """The stored sub-blocks of ready keys that are stored in part."""
        return self._ready.parts

    def count_lookups(self, hits: int, misses: int) -> None:
        """Count lookups that a client's mirror answered."""
        self._hits += hits
        self._misses += misses

    def prepare_store(
        self, keys: Sequence[bytes], parts: Parts = NO_PARTS, keep: Iterable[bytes] = ()
    ) -> Reservation | None:
        """Reserve blocks for those of `keys` that are absent and were offered often enough.

        parts: the sub-blocks of keys that are stored in part. Ready keys that are not pinned are
            stored again if they are unverified, or if this store covers more sub-blocks.
        keep: further keys of the same offer. No key of the offer is evicted for another.

        Returns None if too few keys can be evicted. Then nothing changes, except that the offer
        counts for the threshold. Keys below the threshold, and all keys of an offer without room,
        count as skipped stores. The first key of an offer becomes the most recent.
        """
        offered, ready = dict.fromkeys(keys), self._ready
        replaced = ready.replaceable(offered, parts, self._pins)
        absent = list(outside(offered, ready.blocks, self._pending, self._orphaned))
        all_absent = len(absent) == len(offered)
        if replaced:
            stored_again = replaced.union(absent)
            absent = [key for key in offered if key in stored_again]
        wanted = self._admission_filter.count_offers(absent)
        self._skipped += len(absent) - len(wanted)
        if not wanted:
            return Reservation((), (), ())
        replaced.intersection_update(wanted)
        room = self._allocator.free + len(replaced)
        kept = dict.fromkeys(keep)
        known = () if all_absent and not kept else {**offered, **kept}
        if len(wanted) - room > self._count_evictable(known):
            self._skipped += len(wanted)
            return None
        self._remove_keys(list(replaced))
        reserved = {key: parts[key] for key in wanted if key in parts} if parts else {}
        return self._reserve_blocks(
            tuple(wanted), reserved, room, self._evictable_filter({**offered, **kept})
        )

    def complete_store(self, reservation: Reservation, success: bool) -> None:
        """End a store: its keys become loadable, or absent. A second call has no effect."""
        if reservation in self._past_jobs:
            self._past_jobs.remove(reservation)
            self._allocator.release_orphaned(reservation.blocks)
        elif reservation in self._stores:
            self._stores.remove(reservation)
            for key in reservation.keys:
                del self._pending[key]
            if success:
                self._commit_store(reservation)
            else:
                self._abort_store(reservation)

    def prepare_load(self, keys: Sequence[bytes]) -> Pins:
        """Pin ready keys, each as often as it is named.

        Raises Refused (KEY_ABSENT) for the first key that is not loadable, and changes nothing.
        """
        ready = self._ready.blocks
        try:
            pins = Pins(tuple(keys), tuple([ready[key] for key in keys]))
        except KeyError as missing:
            (key,) = missing.args
            message = f"key {key.hex()} is not in the cache; treat it as a miss"
            if key in self._pending:
                message = f"key {key.hex()} is still being stored; load it when lookup says HIT"
            raise Refused(Code.KEY_ABSENT, message, key.hex()) from None
        if (unverified := self._ready.first_unverified(keys)) is not None:
            message = (
                f"key {unverified.hex()} is unverified since the daemon's restart; load it when "
                "lookup says HIT"
            )
            raise Refused(Code.KEY_ABSENT, message, unverified.hex())
        self._pins.update(keys)
        self._loads.add(pins)
        return pins

    def complete_load(self, pins: Pins) -> None:
        """End a load. Raises Refused (NOT_PINNED) if these pins were already released."""
        if pins in self._past_jobs:
            self._past_jobs.remove(pins)
            self._allocator.release_orphaned(pins.blocks)
        elif pins in self._loads:
            self._loads.remove(pins)
            self._unpin_keys(pins.keys)
        else:
            first = b"".join(pins.keys[:1]).hex()
            message = f"the pins of key {first} were already released; complete each load once"
            raise Refused(Code.NOT_PINNED, message, first)

    def split_pins(self, pins: Pins) -> list[Pins]:
        """Split pins into pins of one key each."""
        singles = [
            Pins((key,), (block,)) for key, block in zip(pins.keys, pins.blocks, strict=True)
        ]
        if pins in self._past_jobs:
            self._past_jobs.remove(pins)
            self._past_jobs.update(singles)
        else:
            self._loads.remove(pins)
            self._loads.update(singles)
        return singles

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark keys as used; the first ends up most recent. Absent ones are ignored."""
        self._policy.touch_keys(keys, self._pending)

    def mark_verified(self, entries: Iterable[tuple[bytes, int]]) -> None:
        """Mark keys in these blocks as verified. Entries that are not unverified are ignored."""
        self._add_event(EventKind.STORED, tuple(self._ready.mark_verified(entries)))

    def discard_keys(self, entries: Iterable[tuple[bytes, int]]) -> None:
        """Make keys whose bytes are lost absent. Keys that are in another block now are ignored.

        The block of a pinned key is orphaned until its last pin is released.
        """
        self._remove_keys(self._ready.keys_in_blocks(entries))

    def take_events(self) -> list[CacheEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def reset(self) -> DeferredFree:
        """Make every key absent. Recency, ghosts and offers are forgotten; counters stay.

        Blocks of jobs in flight become free when these jobs end. Returns the tables to be freed.
        """
        jobs: set[Reservation | Pins] = {*self._stores, *self._loads}
        self._allocator.reset_blocks([job.blocks for job in jobs])
        self._past_jobs |= jobs
        self._stores, self._loads = set(), set()
        deferred = DeferredFree(
            self._pending,
            self._ready.blocks,
            self._ready.unverified,
            self._pins,
            *self._policy.key_tables(),
            self._admission_filter.take_counts(),
        )
        self._pending, self._ready = {}, ResidentKeys()
        self._pins, self._orphaned = Counter(), {}
        self._policy = self._make_policy(self._capacity)
        self._add_event(EventKind.CLEARED, ())
        return deferred

    def restore_keys(self, entries: Sequence[tuple[bytes, int]], parts: Parts = NO_PARTS) -> None:
        """Add keys that an earlier daemon stored to an empty cache, as unverified.

        entries: (key, block), least recent first. Raises ValueError and changes nothing if the
        cache is not empty, a block is out of range, or a key or a block occurs twice.
        """
        ready = dict(entries)
        blocks = set(ready.values())
        if self._allocator.free < self._capacity:
            used = self._capacity - self._allocator.free
            raise ValueError(f"{used} blocks are in use; restore into an empty cache")
        if not len(entries) == len(ready) == len(blocks):
            raise ValueError(
                f"{len(entries)} entries have {len(ready)} different keys in {len(blocks)} "
                "different blocks"
            )
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._capacity:
            raise ValueError(
                f"blocks {min(blocks)} to {max(blocks)} exceed the capacity of {self._capacity}"
            )
        self._allocator.occupy_blocks(blocks)
        self._ready.restore_keys(ready, parts)
        self._policy = self._make_policy(self._capacity)
        self._policy.insert_keys(list(ready)[::-1], len(ready), iter)

    def entries(self) -> list[tuple[bytes, int]]:
        """Ready keys and their blocks, least recent first as far as the policy knows."""
        ready = self._ready.blocks
        return [(key, ready[key]) for key in self._policy if key in ready]

    def ready_keys(self) -> list[bytes]:
        """Keys that are a HIT."""
        return list(self._ready.hits())

    def ready_among(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of these keys that are loadable, in whole or in part."""
        return self._ready.loadable_among(keys)

    def pending_keys(self) -> list[bytes]:
        """Keys that are a HIT_PENDING."""
        return [*self._pending, *self._ready.pending()]

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent. Slow, for tests."""
        pending, ready = self._pending, self._ready.blocks
        stores = [pair for s in self._stores for pair in zip(s.keys, s.blocks, strict=True)]
        pins = Counter(chain.from_iterable(load.keys for load in self._loads))
        assert len(stores) == len(pending), "two stores reserve one key, or none does"
        assert dict(stores) == pending, "pending keys are not those that stores reserve"
        assert pins == self._pins, "pins are not those of the loads"
        orphaned = self._orphaned
        assert pins.keys() <= {*ready, *orphaned}, "a key is pinned that is not ready"
        assert orphaned.keys() <= pins.keys(), "a discarded key has no pin"
        assert orphaned.keys().isdisjoint({*ready, *pending}), "a discarded key is present"
        assert pending.keys().isdisjoint(ready), "a key is both pending and ready"
        assert pins.keys().isdisjoint(self._ready.unverified), "an unverified key is pinned"
        self._ready.check_integrity()
        order = list(self._policy)
        assert len(order) == len(set(order)), "the policy has a key twice"
        assert set(order) == {*pending, *ready}, "the policy has other keys than the cache"
        self._policy.check_integrity()
        held = [*pending.values(), *ready.values(), *orphaned.values()]
        self._allocator.check_integrity(held, [job.blocks for job in self._past_jobs])

    def _count_evictable(self, besides: Iterable[bytes]) -> int:
        """Number of keys that may be evicted, not counting `besides`."""
        ready, pins = self._ready, self._pins
        held = len(pins) - len(self._orphaned)
        return len(ready) - held - sum(key in ready and key not in pins for key in besides)

    def _evictable_filter(self, offered: Collection[bytes]) -> EvictableFilter:
        return lambda keys: outside(keys, self._pending, self._pins, offered)

    def _remove_keys(self, keys: Sequence[bytes]) -> None:
        """Remove ready keys, other than by eviction."""
        self._policy.remove_keys(keys)
        blocks = self._remove_resident(keys)
        for key, block in zip(keys, blocks, strict=True):
            if key in self._pins:
                self._orphaned[key] = block
            else:
                self._allocator.free_blocks([block])

    def _remove_resident(self, keys: Sequence[bytes]) -> list[int]:
        """Remove ready keys and return their blocks.

        The event of a key matches its lookup: REMOVED for a HIT, ABANDONED for a HIT_PENDING.
        """
        blocks, hits, pending = self._ready.remove_keys(keys)
        self._add_event(EventKind.REMOVED, tuple(hits))
        self._add_event(EventKind.ABANDONED, tuple(pending))
        return blocks

    def _reserve_blocks(
        self, keys: tuple[bytes, ...], parts: Parts, room: int, evictable: EvictableFilter
    ) -> Reservation:
        evicted = tuple(self._policy.insert_keys(keys, room, evictable))
        self._allocator.free_blocks(self._remove_resident(evicted))
        reservation = Reservation(keys, self._allocator.allocate_blocks(len(keys)), evicted, parts)
        self._pending.update(zip(keys, reservation.blocks, strict=True))
        self._stores.add(reservation)
        self._evictions += len(evicted)
        self._add_event(EventKind.PENDING, keys)
        return reservation

    def _commit_store(self, reservation: Reservation) -> None:
        self._ready.add_keys(reservation.keys, reservation.blocks, reservation.parts)
        self._stored += len(reservation.keys)
        self._add_event(EventKind.STORED, tuple(outside(reservation.keys, reservation.parts)))
        self._add_event(EventKind.ABANDONED, tuple(reservation.parts))

    def _abort_store(self, reservation: Reservation) -> None:
        self._policy.remove_keys(reservation.keys)
        self._allocator.free_blocks(reservation.blocks)
        self._add_event(EventKind.ABANDONED, reservation.keys)

    def _unpin_keys(self, keys: Iterable[bytes]) -> None:
        pins, orphaned = self._pins, self._orphaned
        for key in keys:
            if pins[key] > 1:
                pins[key] -= 1
            else:
                pins.pop(key)  # not del, which a Counter does in Python
                if key in orphaned:
                    self._allocator.free_blocks([orphaned.pop(key)])

    def _add_event(self, kind: EventKind, keys: tuple[bytes, ...]) -> None:
        if self._recording and (keys or kind is EventKind.CLEARED):
            self._events.append(CacheEvent(kind, keys))
            self.on_event()


def _make_filter(threshold: int, capacity: int) -> AdmissionFilter:
    return AdmissionFilter(threshold, max(capacity, OFFERS_REMEMBERED))


def _ignore() -> None:
    """Do nothing."""
