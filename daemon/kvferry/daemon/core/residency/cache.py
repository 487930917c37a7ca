"""The cache of one namespace: which keys are in which host blocks.

A key is pending (a store of it is on its way), ready (it can be loaded), or absent:

    absent --prepare_store--> pending --complete_store--> ready --evicted--> absent
                                 \\_______ it failed ______> absent

A block holds one pending or ready key, or it is free, or it is *doomed*. Doomed is what makes a
reset safe: at once every key is absent, yet jobs from before still write and read their blocks. So
those blocks belong to nobody until the last of these jobs has ended. A job is the object that was
handed out for it, a Reservation or Pins, and nothing else: what comes back is looked for among the
jobs of the present and among those of the past, so that a late end can name no key of today.

An offer is all or nothing without undoing anything: whether enough keys may go is a matter of
counting, and only then the policy is asked, which takes the new keys in and names those that go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse

from kvferry.daemon.core.residency.blocks import Blocks
from kvferry.daemon.core.residency.offers import Offers
from kvferry.daemon.core.residency.policy import POLICIES, Sieve
from kvferry.daemon.core.residency.rubble import Rubble
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import EventKind, Lookup

OFFERS_REMEMBERED = 1 << 16
"""Keys whose offers are remembered, or as many as there are blocks, if that is more."""

HIT, MISS, HIT_PENDING = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """A store to be done: keys in the order offered, the block of each, and who went for it."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pins:
    """A load to be done: the block of each key, which stays until complete_load."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Event:
    kind: EventKind
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks now (capacity = free + pending + ready + doomed), and keys counted since the start."""

    capacity: int
    free: int
    pending: int
    ready: int
    pinned: int
    doomed: int
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

    policy: a name in POLICIES. store_threshold: the offer from which on a key is stored. Raises
    ValueError where one of the three makes no sense.
    """

    def __init__(self, capacity: int, policy: str = "lru", store_threshold: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"a cache has one block or more, not {capacity}")
        if policy not in POLICIES:
            raise ValueError(f"policy is one of {', '.join(POLICIES)}, not {policy!r}")
        self._capacity = capacity
        self._make_policy = POLICIES[policy]
        self._policy = self._make_policy(capacity)
        self._offers = _offers(store_threshold, capacity)
        self._blocks = Blocks(capacity)
        self._pending: dict[bytes, int] = {}
        self._ready: dict[bytes, int] = {}
        self._pins: Counter[bytes] = Counter()
        """How often each ready key is pinned, where it is."""
        self._condemned: dict[bytes, int] = {}
        """The blocks of keys that were discarded while pinned; such a key is not stored anew."""
        self._stores: set[Reservation] = set()
        self._loads: set[Pins] = set()
        self._past: set[Reservation | Pins] = set()
        """Jobs from before a reset."""
        self._recording = False
        self._events: list[Event] = []
        self.notice: Callable[[], None] = _nobody
        """Called whenever there is an event to take."""
        self._hits = self._misses = self._skipped = self._stored = self._evictions = 0

    @property
    def recording(self) -> bool:
        """Whether events are kept for take_events. Off, none are, nor those kept so far."""
        return self._recording

    @recording.setter
    def recording(self, on: bool) -> None:
        self._recording = on
        if not on:
            self._events = []

    def configure(self, policy: str, store_threshold: int) -> None:
        """Evict and store otherwise from now on. Keys stay and counters go on; what the policy
        has learnt and what was offered is forgotten."""
        if POLICIES[policy] is not self._make_policy:
            self._make_policy = POLICIES[policy]
            self._policy = self._make_policy(self._capacity, self._policy.give_up())
        self._offers = _offers(store_threshold, self._capacity)

    @property
    def usage(self) -> Usage:
        return Usage(
            capacity=self._capacity,
            free=self._blocks.free,
            pending=len(self._pending),
            ready=len(self._ready),
            pinned=len(self._pins) - len(self._condemned),
            doomed=self._blocks.doomed + len(self._condemned),
            hits=self._hits,
            misses=self._misses,
            stores_skipped=self._skipped,
            stored=self._stored,
            evictions=self._evictions,
        )

    def lookup(self, key: bytes) -> Lookup:
        """HIT, MISS or HIT_PENDING, which counts as neither. Changes nothing else."""
        if key in self._ready:
            self._hits += 1
            return HIT
        if key in self._pending:
            return HIT_PENDING
        self._misses += 1
        return MISS

    def count_lookups(self, hits: int, misses: int) -> None:
        """Lookups that were answered elsewhere."""
        self._hits += hits
        self._misses += misses

    def prepare_store(self, keys: Sequence[bytes]) -> Reservation | None:
        """Reserve blocks for those of `keys` that are absent and were offered often enough.

        None where not enough keys may go, and nothing changed, except that it was an offer and
        counts for the threshold. Stores skipped are keys below the threshold, and all of those
        that found no room. Of keys offered together the first becomes the most recent.
        """
        offered = dict.fromkeys(keys)
        absent = list(_outside(offered, self._ready, self._pending, self._condemned))
        wanted = self._offers.count(absent)
        self._skipped += len(absent) - len(wanted)
        if not wanted:
            return Reservation((), (), ())
        room = self._blocks.free
        known = offered if len(absent) < len(offered) else ()
        if len(wanted) - room > self._evictable(known):
            self._skipped += len(wanted)
            return None
        return self._reserve(tuple(wanted), room, self._sieve(offered))

    def complete_store(self, reservation: Reservation, success: bool) -> None:
        """A store ended: its keys can be loaded, or are absent. A second time is harmless."""
        if reservation in self._past:
            self._past.remove(reservation)
            self._blocks.redeem(reservation.blocks)
        elif reservation in self._stores:
            self._stores.remove(reservation)
            for key in reservation.keys:
                del self._pending[key]
            if success:
                self._settle(reservation)
            else:
                self._abandon(reservation)

    def prepare_load(self, keys: Sequence[bytes]) -> Pins:
        """Pin ready keys, each as often as it is named. Raises Refused (KEY_ABSENT) for the first
        that is absent or pending, and nothing changed."""
        ready = self._ready
        try:
            pins = Pins(tuple(keys), tuple([ready[key] for key in keys]))
        except KeyError as missing:
            (key,) = missing.args
            message = "only keys in the cache can be loaded: look them up first"
            if key in self._pending:
                message = "a store of this key is on its way: load it when it is there"
            raise Refused(Code.KEY_ABSENT, message, key.hex()) from None
        self._pins.update(keys)
        self._loads.add(pins)
        return pins

    def complete_load(self, pins: Pins) -> None:
        """A load ended. Raises Refused (NOT_PINNED) where these pins were released already."""
        if pins in self._past:
            self._past.remove(pins)
            self._blocks.redeem(pins.blocks)
        elif pins in self._loads:
            self._loads.remove(pins)
            self._unpin(pins.keys)
        else:
            message = "these pins were released: a load ends once"
            raise Refused(Code.NOT_PINNED, message, b"".join(pins.keys[:1]).hex())

    def take_apart(self, pins: Pins) -> list[Pins]:
        """Instead of pins that were not released, as many of one key each."""
        singles = [
            Pins((key,), (block,)) for key, block in zip(pins.keys, pins.blocks, strict=True)
        ]
        if pins in self._past:
            self._past.remove(pins)
            self._past.update(singles)
        else:
            self._loads.remove(pins)
            self._loads.update(singles)
        return singles

    def touch(self, keys: Sequence[bytes]) -> None:
        """Keys were asked for: the first ends up most recent. Absent ones are ignored."""
        self._policy.touch(keys, self._pending)

    def discard(self, keys: Iterable[bytes]) -> None:
        """These keys cannot be loaded any more: they are absent. Those not ready are ignored.

        The block of a key that is pinned is doomed until the last pin has gone.
        """
        gone = tuple(key for key in dict.fromkeys(keys) if key in self._ready)
        self._policy.forget(gone)
        for key in gone:
            block = self._ready.pop(key)
            if key in self._pins:
                self._condemned[key] = block
            else:
                self._blocks.give_back([block])
        self._tell(EventKind.REMOVED, gone)

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def reset(self) -> Rubble:
        """Everything becomes absent, and recency, ghosts and offers are forgotten; counters stay.

        Blocks of jobs under way are free once those jobs have ended. Returns what is to be freed.
        """
        jobs: set[Reservation | Pins] = {*self._stores, *self._loads}
        self._blocks.vacate([job.blocks for job in jobs])
        self._past |= jobs
        self._stores, self._loads = set(), set()
        rubble = Rubble(
            self._pending, self._ready, self._pins, *self._policy.heaps(), self._offers.give_up()
        )
        self._pending, self._ready, self._pins, self._condemned = {}, {}, Counter(), {}
        self._policy = self._make_policy(self._capacity)
        self._tell(EventKind.CLEARED, ())
        return rubble

    def restore(self, entries: Sequence[tuple[bytes, int]]) -> None:
        """Make keys ready in the blocks where they are, least recent first, in an empty cache.

        Raises ValueError, and nothing changed, where a block is in use or out of range, or a key
        or a block comes twice.
        """
        ready = dict(entries)
        blocks = set(ready.values())
        if self._blocks.free < self._capacity:
            raise ValueError("only an empty cache can be restored")
        if not len(entries) == len(ready) == len(blocks):
            raise ValueError("a key or a block comes twice")
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._capacity:
            raise ValueError(f"blocks are 0 to {self._capacity - 1}: {min(blocks)}, {max(blocks)}")
        self._blocks.occupy(blocks)
        self._ready = ready
        self._policy = self._make_policy(self._capacity)
        self._policy.admit(list(ready)[::-1], len(ready), iter)
        self._tell(EventKind.STORED, tuple(ready))

    def entries(self) -> list[tuple[bytes, int]]:
        """Ready keys and their blocks, least recent first as far as the policy knows."""
        ready = self._ready
        return [(key, ready[key]) for key in self._policy if key in ready]

    def ready_keys(self) -> list[bytes]:
        return list(self._ready)

    def ready_among(self, keys: Iterable[bytes]) -> list[bytes]:
        ready = self._ready
        return [key for key in keys if key in ready]

    def pending_keys(self) -> list[bytes]:
        return list(self._pending)

    def check_integrity(self) -> None:
        """AssertionError where the books disagree. Takes long: for tests."""
        pending, ready = self._pending, self._ready
        stores = [pair for s in self._stores for pair in zip(s.keys, s.blocks, strict=True)]
        pins = Counter(chain.from_iterable(load.keys for load in self._loads))
        assert len(stores) == len(pending), "two stores reserve one key, or none does"
        assert dict(stores) == pending, "pending keys are not those that stores reserve"
        assert pins == self._pins, "pins are not those of the loads"
        condemned = self._condemned
        assert pins.keys() <= {*ready, *condemned}, "a key is pinned that is not ready"
        assert condemned.keys() <= pins.keys(), "a condemned key is not pinned any more"
        assert condemned.keys().isdisjoint({*ready, *pending}), "a condemned key is there"
        assert pending.keys().isdisjoint(ready), "a key is both pending and ready"
        order = list(self._policy)
        assert len(order) == len(set(order)), "the policy has a key twice"
        assert set(order) == {*pending, *ready}, "the policy has other keys than the cache"
        self._policy.check_integrity()
        held = [*pending.values(), *ready.values(), *condemned.values()]
        self._blocks.check_integrity(held, [job.blocks for job in self._past])

    def _evictable(self, besides: Iterable[bytes]) -> int:
        """How many keys may go, `besides` these."""
        ready, pins = self._ready, self._pins
        held = len(pins) - len(self._condemned)
        return len(ready) - held - sum(key in ready and key not in pins for key in besides)

    def _sieve(self, offered: Collection[bytes]) -> Sieve:
        return lambda keys: _outside(keys, self._pending, self._pins, offered)

    def _reserve(self, keys: tuple[bytes, ...], room: int, may_go: Sieve) -> Reservation:
        evicted = tuple(self._policy.admit(keys, room, may_go))
        self._blocks.give_back([self._ready.pop(key) for key in evicted])
        reservation = Reservation(keys, self._blocks.take(len(keys)), evicted)
        self._pending.update(zip(keys, reservation.blocks, strict=True))
        self._stores.add(reservation)
        self._evictions += len(evicted)
        self._tell(EventKind.REMOVED, evicted)
        self._tell(EventKind.PENDING, keys)
        return reservation

    def _settle(self, reservation: Reservation) -> None:
        self._ready.update(zip(reservation.keys, reservation.blocks, strict=True))
        self._stored += len(reservation.keys)
        self._tell(EventKind.STORED, reservation.keys)

    def _abandon(self, reservation: Reservation) -> None:
        self._policy.forget(reservation.keys)
        self._blocks.give_back(reservation.blocks)
        self._tell(EventKind.ABANDONED, reservation.keys)

    def _unpin(self, keys: Iterable[bytes]) -> None:
        pins, condemned = self._pins, self._condemned
        for key in keys:
            if pins[key] > 1:
                pins[key] -= 1
            else:
                pins.pop(key)  # not del, which a Counter does in Python
                if key in condemned:
                    self._blocks.give_back([condemned.pop(key)])

    def _tell(self, kind: EventKind, keys: tuple[bytes, ...]) -> None:
        if self._recording and (keys or kind is EventKind.CLEARED):
            self._events.append(Event(kind, keys))
            self.notice()


def _offers(threshold: int, capacity: int) -> Offers:
    return Offers(threshold, max(capacity, OFFERS_REMEMBERED))


def _outside(keys: Iterable[bytes], *kinds: Collection[bytes]) -> Iterator[bytes]:
    """Those keys that are none of these kinds, which do not change meanwhile; without any Python
    for each of them."""
    for kind in kinds:
        if kind:
            keys = filterfalse(kind.__contains__, keys)
    return iter(keys)


def _nobody() -> None:
    """Nobody wants to know."""
