"""One namespace: a cache in a region of the host pool, and the sessions that use it.

Called by the core, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvferry.daemon.core.borrowed import BorrowedKeys
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.deferred_free import DeferredFree
from kvferry.daemon.core.composition import Composition
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
from kvferry.proto.specs import MAX_KEYS
from kvferry.proto.status import NamespaceStatus

# Host blocks whose keys are in one part of a snapshot, which is encoded between other messages.
SNAPSHOT_BLOCKS = MAX_KEYS


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

    def _update_contents(self) -> None:
        record, region = self.record, self.region
        if record.composition:
            self.contents = NamespaceContents(
                self.name, record.composition, self.epoch, region.block_bytes, region.start
            )


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
