"""One namespace: a cache in a region of the host pool, and the sessions that use it.

Resolves the keys of a transfer to host blocks. A store reserves blocks for the keys that are absent
and leaves out the others together with their GPU blocks. A load pins all of its keys or is refused.
The transfer holds a Lease on them until it ends. Called by the core, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from kvferry.daemon.core.block_lines import Part
from kvferry.daemon.core.borrowed import BorrowedBlocks, BorrowedKeys
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.cache.jobs import Pins, Reservation
from kvferry.daemon.core.composition import Composition
from kvferry.daemon.core.layout import BlockLayout, GroupExtent, Int64s, ResolvedBlocks
from kvferry.daemon.core.namespace_use import NamespaceUse
from kvferry.daemon.core.ports import Ports
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.core.region import Region
from kvferry.daemon.core.retention import RetainedBlocks
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.core.store_name import StoreName
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import Lookup, OffloadKey
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.messages import KeyEvent, KeyEvents, Snapshot
from kvferry.proto.specs import MAX_KEYS, Direction, GPULoadStoreSpec, KeyLoadStoreSpec
from kvferry.proto.status import NamespaceStatus

# Host blocks whose keys are in one part of a snapshot, which is encoded between other messages.
SNAPSHOT_BLOCKS = MAX_KEYS


class Lease(msgspec.Struct, frozen=True):
    """The blocks that a keyed transfer holds in its namespace. borrowed: those it reads from
    siblings, which hold nothing."""

    namespace: Namespace
    held: Reservation | Pins
    borrowed: BorrowedBlocks | None = None

    def forget_changed(self) -> bool:
        """Forget borrowed keys whose blocks have changed since they were found. Returns whether
        there are any: the bytes of such a load must not be used."""
        changed = [] if self.borrowed is None else self.borrowed.changed_keys()
        self.namespace.borrowed.forget(changed)
        return bool(changed)

    def release_blocks(self, *, done: bool) -> None:
        """End the lease. The keys of a completed store become loadable."""
        if self.borrowed is not None:
            self.borrowed.release(done=done)
        if isinstance(self.held, Pins):
            self.namespace.cache.complete_load(self.held)
        else:
            self.namespace.cache.complete_store(self.held, done)


class Namespace:
    """One namespace: its cache, its region of the pool and its sessions.

    changed: called with the namespace when it has key events to take.
    """

    def __init__(
        self,
        region: Region,
        fingerprint: Fingerprint,
        policy: str,
        threshold: int,
        changed: Callable[[Namespace], None],
        ports: Ports,
    ) -> None:
        self.name = fingerprint.name
        self.region = region
        self.fingerprint = fingerprint
        # The engine of each session in it.
        self.sessions: dict[str, str] = {}
        # Numbers of the registrations that use it.
        self.registrations: set[int] = set()
        self.subscribers: set[str] = set()
        # Blocks that tiers may write into.
        self.promoting = 0
        self.sequence = 0
        # Whether the host has another epoch: then nothing in it is valid.
        self.is_behind = False
        self.policy, self.threshold = policy, threshold
        # Why its engines have less host memory than they asked for.
        self.shortfall = ""
        min_uses = [tier.min_uses for tier in ports.tiers]
        self.cache = Cache(region.num_blocks, policy, threshold, min_uses, region.table)
        self.cache.events.on_event = partial(changed, self)
        self.use = NamespaceUse(region.num_blocks)
        self.retained = RetainedBlocks(self.cache)
        self._ports = ports
        self.borrowed = BorrowedKeys(ports.siblings, self.cache)
        # Of its host blocks; None before any registration.
        self._composition: Composition | None = None
        # What siblings must have, too; None before any registration.
        self.contents: NamespaceContents | None = None

    @property
    def epoch(self) -> int:
        """Of its contents."""
        return self.region.table.epoch

    @property
    def in_use(self) -> bool:
        """Whether its region must not be given to another owner."""
        return bool(self.has_users or self.promoting or self.cache.tier_access.writing)

    @property
    def has_users(self) -> bool:
        return bool(self.sessions or self.registrations)

    @property
    def store_name(self) -> str | None:
        """The name of its store in the tiers; None before any registration."""
        if self._composition is None:
            return None
        return str(StoreName(self.name, self._composition.digest, self.epoch))

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.sessions.values())))

    @property
    def is_shared(self) -> bool:
        """Whether others wait for what its engines store."""
        siblings, tiers = self._ports.siblings, self._ports.tiers
        at_sibling = self.contents is not None and siblings.have(self.contents)
        return at_sibling or any(tier.is_shared for tier in tiers)

    def change_sessions(self, session: str, engine: str | None) -> None:
        """A session of an engine enters, or leaves (None). Spare blocks are those that the GPU of
        the only engine has."""
        before = self.engines
        if engine is None:
            del self.sessions[session]
        else:
            self.sessions[session] = engine
        if self.engines != before:
            self.cache.forget_spare()

    def configure(self, policy: str, threshold: int) -> None:
        """Change the eviction policy and the store threshold; keys stay."""
        if (policy, threshold) == (self.policy, self.threshold):
            return
        self.policy, self.threshold = policy, threshold
        self.cache.configure(policy, threshold)

    def add_registration(
        self, registration: int, layout_arrays: LayoutArrays, host_bytes: int | None
    ) -> None:
        """Add an engine's registration. Raises Refused if its host blocks differ."""
        if host_bytes is not None:
            raise Refused(
                Code.BAD_LAYOUT,
                f"host_bytes = {host_bytes} was given, but an engine in namespace {self.name} uses "
                "the namespace's host memory; leave host_bytes out",
                host_bytes,
            )
        most, nbytes = self.fingerprint.host_block_bytes, layout_arrays.host_block_bytes
        if nbytes > most:
            raise Refused(
                Code.NAMESPACE_MISMATCH,
                f"a host block of this layout has {nbytes} bytes, more than the {most} of the "
                "namespace's fingerprint; correct host_block_bytes in it",
                nbytes,
            )
        known, given = self._composition, Composition.of_layout(layout_arrays)
        if known is not None and known != given:
            if self.registrations or self.cache.usage.used:
                text = given.describe()
                raise Refused(
                    Code.NAMESPACE_MISMATCH,
                    f"a host block of this layout has {text}, but in namespace {self.name} "
                    f"{known.describe()}; put what differs into the fingerprint",
                    text,
                )
            self.borrowed.forget_all()
        self._composition = given
        self._update_contents()
        self.registrations.add(registration)

    @property
    def record(self) -> RegionRecord:
        return RegionRecord(
            self.name,
            self.region.start,
            self.region.nbytes,
            fingerprint=self.fingerprint,
            policy=self.policy,
            threshold=self.threshold,
            epoch=self.epoch,
            pages=None if self._composition is None else self._composition.pages,
            factor=0 if self._composition is None else self._composition.factor,
        )

    def restore_keys(self, record: RegionRecord) -> None:
        """Restore the keys of an earlier daemon that are of this epoch into a new namespace.

        Raises ValueError if the block table of its region is damaged.
        """
        if record.pages is not None:
            self._composition = Composition(record.pages, record.factor)
        self._update_contents()
        self.cache.restore_keys(record.factor)

    def check_keys(self, keys: Sequence[OffloadKey]) -> None:
        wanted = self.fingerprint.key_bytes
        if not {wanted}.issuperset(map(len, keys)):
            wrong = next(key for key in keys if len(key) != wanted)
            message = (
                f"key {wrong.hex()} has {len(wrong)} bytes, but keys of namespace {self.name} have "
                f"{wanted}; use the hash function of its fingerprint"
            )
            raise Refused(Code.BAD_KEY, message, wrong.hex())

    def resolve_transfer(
        self,
        layout: BlockLayout,
        direction: Direction,
        gpu: GPULoadStoreSpec,
        host: KeyLoadStoreSpec,
    ) -> tuple[ResolvedBlocks, Lease]:
        """Resolve a keyed transfer to held blocks. If it raises Refused, nothing has changed."""
        keys = host.keys
        self._check_epoch(direction, host)
        self.check_keys(keys)
        group_extents = layout.group_extents(direction, gpu, len(keys))
        parts = _parts(layout, group_extents)
        if direction is Direction.STORE:
            self.check_keys(host.keep)
            blocks, lease = self._reserve_keys(keys, parts, host.keep)
        else:
            blocks, lease = self._pin_keys(keys, parts, (0, layout.factor))
        if (borrowed := lease.borrowed) is not None:
            borrowed.hold()
            return layout.resolve_borrowed(group_extents, blocks, borrowed.rows[1]), lease
        return layout.resolve_extents(group_extents, blocks), lease

    def start_epoch(self, epoch: int) -> None:
        """The contents of a new namespace, without keys yet, are of this epoch."""
        if epoch != self.epoch:
            self.region.table.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> DeferredFree:
        """Make every key absent: the contents are of this epoch from now on. Returns the tables to
        be freed."""
        self.is_behind = False
        self.borrowed.clear()
        self.retained.end()
        deferred = self.cache.reset(epoch)
        self.use.forget_keys()
        self._update_contents()
        return deferred

    def lookups(self, keys: Sequence[OffloadKey]) -> list[Lookup | None]:
        """The lookup of each key, which is not counted. Borrowed keys are a HIT. None: it has no
        block."""
        if self.is_behind:
            return [None] * len(keys)
        return self.borrowed.add_to(keys, self.cache.lookups(keys))

    def count_prefix(
        self,
        keys: Sequence[OffloadKey],
        found: tuple[Lookup, ...] = (Lookup.HIT, Lookup.HIT_PENDING),
    ) -> int:
        """How many of `keys`, from the first on, are loadable or pending, or as in `found`."""
        lookups = enumerate(self.lookups(keys))
        return next((at for at, one in lookups if one not in found), len(keys))

    def take_key_events(self) -> KeyEvents | None:
        """The key events since the last call; None if there are none."""
        events = self.cache.events.take()
        if not events:
            return None
        self.sequence += 1
        parts = (
            KeyEvent(event.kind, event.keys[at : at + MAX_KEYS])
            for event in events
            for at in range(0, max(1, len(event.keys)), MAX_KEYS)
        )
        return KeyEvents(self.sequence, tuple(parts), self.epoch)

    def snapshot(self, part_blocks: int = SNAPSHOT_BLOCKS) -> Iterator[Snapshot]:
        """All keys, in messages that are created one at a time.

        A message lists the keys of `part_blocks` host blocks when it is created. Later changes are
        also in KeyEvents above the snapshot's sequence number, which the mirror applies last.
        """
        if self.is_behind:  # its subscribers are told when it is empty
            return iter((Snapshot(self.sequence, 0, False, (), True, self.epoch),))
        return _snapshots(self.cache, self.sequence, self.epoch, part_blocks)

    def status(self) -> NamespaceStatus:
        usage = self.cache.usage
        return NamespaceStatus(
            name=self.name,
            fingerprint=self.fingerprint,
            policy=self.policy,
            engines=self.engines,
            blocks=usage.capacity,
            block_bytes=self.fingerprint.host_block_bytes,
            free=usage.free,
            pending=usage.pending,
            ready=usage.ready,
            unverified=usage.unverified,
            orphaned=usage.orphaned,
            pinned=usage.pinned,
            shortfall=self.shortfall if self.has_users else "",
            **self.cache.counts,
            **self.use.fields(),
            **self.retained.fields(),
        )

    def _pin_keys(
        self, keys: Sequence[OffloadKey], parts: dict[int, Part], whole: Part
    ) -> tuple[Int64s, Lease]:
        """The host block of each key; -1 for those that are borrowed."""
        away = self.borrowed.places(keys)
        borrowed = None
        if away and self.contents is not None:
            borrowed = self.borrowed.blocks_of(self.contents, [keys[place] for place in away])
        if borrowed is not None and (changed := borrowed.changed_keys()):
            self.borrowed.forget(changed)
            text = f"the sibling no longer has key {changed[0].hex()}; treat it as a miss"
            raise Refused(Code.KEY_ABSENT, text, changed[0].hex())
        here = sorted({*range(len(keys))} - {*away}) if away else range(len(keys))
        pins = self.cache.prepare_load([keys[place] for place in here])
        try:
            for position in here if self.cache.has_parts else ():
                self._check_part(keys[position], parts.get(position, whole))
        except Refused:
            self.cache.complete_load(pins)
            raise
        if borrowed is None:
            return pins.blocks, Lease(self, pins)
        blocks = np.full(len(keys), -1, np.int64)
        blocks[here] = pins.blocks
        return blocks, Lease(self, pins, borrowed)

    def _check_epoch(self, direction: Direction, host: KeyLoadStoreSpec) -> None:
        """Raise Refused if a transfer is of another epoch, or if nothing can be transferred now."""
        if direction is Direction.STORE:
            if self.is_behind or host.epoch not in (None, self.epoch):
                raise Refused(
                    Code.STALE,
                    f"the blocks are of epoch {host.epoch}, but the namespace was reset since; "
                    "compute them again before you store them",
                    host.epoch,
                )
        elif self.is_behind and host.keys:
            first = host.keys[0].hex()
            text = f"the namespace was reset, so it has no key {first}; treat it as a miss"
            raise Refused(Code.KEY_ABSENT, text, first)

    def _update_contents(self) -> None:
        record, region = self.record, self.region
        if record.composition:
            self.contents = NamespaceContents(
                self.name, record.composition, self.epoch, region.block_bytes, region.start
            )

    def _check_part(self, key: OffloadKey, wanted: Part) -> None:
        stored = self.cache.stored_part(key)
        if stored is not None and not stored[0] <= wanted[0] < wanted[1] <= stored[1]:
            raise Refused(
                Code.KEY_ABSENT,
                f"key {key.hex()} has sub-blocks {stored[0]} to {stored[1] - 1} stored, but "
                f"{wanted[0]} to {wanted[1] - 1} were requested; treat it as a miss",
                key.hex(),
            )

    def _reserve_keys(
        self, keys: Sequence[OffloadKey], parts: dict[int, Part], keep: Sequence[OffloadKey]
    ) -> tuple[Int64s, Lease]:
        """The host block of each key; -1 for keys that are not stored."""
        # Of a key that occurs twice, the first place counts. One pass: each group has two parts.
        first = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True)) if parts else {}
        named = {keys[at]: part for at, part in parts.items() if first[keys[at]] == at}
        held = self.borrowed.held_elsewhere(self.contents, keys)
        offered = [key for key in keys if key not in held] if held else keys
        reservation = self.cache.prepare_store(offered, named, keep)
        if reservation is None:
            raise Refused(
                Code.CACHE_FULL,
                f"no room for {len(keys)} keys: too many of the {self.region.num_blocks} host "
                "blocks of the namespace are pinned or being stored; try again later",
                len(keys),
            )
        taken = dict(zip(reservation.keys, reservation.blocks, strict=True))
        blocks = np.fromiter((taken.pop(key, -1) for key in keys), np.int64, len(keys))
        return blocks, Lease(self, reservation)


def _snapshots(cache: Cache, sequence: int, epoch: int, part_blocks: int) -> Iterator[Snapshot]:
    part, capacity = 0, cache.usage.capacity
    for begin in range(0, capacity, part_blocks):
        end = begin + part_blocks
        ready, pending = cache.keys_between(begin, end)
        last = end >= capacity
        if ready or (last and not pending):
            yield Snapshot(sequence, part, False, tuple(ready), last and not pending, epoch)
            part += 1
        if pending:
            yield Snapshot(sequence, part, True, tuple(pending), last, epoch)
            part += 1


def _parts(layout: BlockLayout, group_extents: Sequence[GroupExtent]) -> dict[int, Part]:
    """Positions of host blocks that a transfer uses in part, and the part."""
    whole = (0, layout.factor)
    return {
        position: part
        for extent in group_extents
        for position, part in zip(
            (extent.begin, extent.end - 1), layout.end_parts(extent), strict=True
        )
        if part != whole
    }
