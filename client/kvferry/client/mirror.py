"""The mirror: a client's copy of which keys of a namespace are resident.

A Snapshot, in parts, lists the resident keys as of a sequence number; numbered KeyEvents list the
changes after it. An event states what its keys are *now*, so it is valid after missed events, too:

    KeyEvents, next number           applied
    KeyEvents, a number is missing   applied; the mirror is incomplete and needs a new snapshot
    KeyEvents without events         the same: the events of its number were left out
    KeyEvents while incomplete       applied and buffered
    last part of a snapshot          buffered KeyEvents above its number are applied to it, and it
                                     replaces the known keys; the mirror is complete
    part 0 of a snapshot             a new snapshot begins, an incomplete one is discarded
    part of a discarded snapshot     ignored

An incomplete mirror answers for the keys that it knows. A HIT that is stale costs one failed load,
which is a miss; a RETRY would delay every request until the snapshot is complete. All other keys
are a RETRY. A busy daemon drops KeyEvents of clients that do not poll, but no part of a snapshot.

A message of another epoch than the known keys comes after a reset: they are cleared first. From
sending a reset until its reply, all keys are hidden: every lookup is a MISS. The KeyEvents of the
reset arrives before the reply, which names the epoch. If it was dropped, the mirror clears itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from kvferry.client.key_set import KeySet
from kvferry.proto.keys import EventKind, Lookup, OffloadKey
from kvferry.proto.messages import KeyEvent, KeyEvents, Snapshot

# Small sets of removed keys freed per message: 0.2 ms each for a million keys.
FREED_SHARDS = 4

HIT, MISS, HIT_PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY


@dataclass(slots=True)
class MirroredKeys:
    """Resident keys. A key in neither set is absent."""

    ready: KeySet = field(default_factory=KeySet)
    pending: KeySet = field(default_factory=KeySet)

    def take_shards(self) -> list[set[OffloadKey]]:
        """Remove all keys. Returns the sets that have them, to be freed one by one."""
        return self.ready.take_shards() + self.pending.take_shards()

    def apply(self, events: Iterable[KeyEvent]) -> list[set[OffloadKey]]:
        """Apply events in order. Returns sets of removed keys, to be freed one by one."""
        ready, pending = self.ready, self.pending
        removed = list[set[OffloadKey]]()
        for event in events:
            match event.kind:
                case EventKind.STORED | EventKind.BORROWED:
                    ready.add_keys(event.keys)
                    pending.discard_keys(event.keys)
                case EventKind.PENDING:
                    pending.add_keys(event.keys)
                    ready.discard_keys(event.keys)
                case EventKind.REMOVED | EventKind.ABANDONED:
                    ready.discard_keys(event.keys)
                    pending.discard_keys(event.keys)
                case EventKind.CLEARED:
                    removed += self.take_shards()
        return removed


@dataclass(slots=True)
class _PartialSnapshot:
    """A snapshot of which `parts` parts have arrived."""

    sequence: int
    epoch: int
    parts: int = 0
    resident: MirroredKeys = field(default_factory=MirroredKeys)

    def add(self, message: Snapshot) -> None:
        self.parts += 1
        resident = self.resident
        (resident.pending if message.pending else resident.ready).add_keys(message.keys)


class Mirror:
    """Applies the daemon's messages; no socket, no clock."""

    def __init__(self) -> None:
        # Whether all keys are known: not before the first snapshot, nor after missing KeyEvents.
        self.complete = False
        # The number of the newest KeyEvents received.
        self.sequence = 0
        # Of the known keys: another one after each reset. Epochs are compared for equality only.
        self.epoch = 0
        self._known = MirroredKeys()
        self._partial: _PartialSnapshot | None = None
        self._buffered: list[KeyEvents] = []
        # Removed keys that are not freed yet.
        self._removed: list[set[OffloadKey]] = []
        # The sequence number of the newest snapshot that was discarded.
        self._discarded = -1
        self._hidden = False
        # The epochs of the known keys since the last reset was sent.
        self._epochs_since = set[int]()
        # The keys that lookups see: `_known`, or none while hidden.
        self._ready, self._pending = self._known.ready, self._known.pending
        self._absent_result = RETRY
        self._changed: dict[OffloadKey, None] | None = None

    def lookup(self, key: OffloadKey) -> Lookup:
        """The state of a key in the mirror. Never waits."""
        if key in self._ready:
            return HIT
        if key in self._pending:
            return HIT_PENDING
        return self._absent_result

    def missing_keys(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """The keys that are no HIT."""
        return self._ready.missing_keys(keys)

    @property
    def ready_keys(self) -> Set[OffloadKey]:
        """The keys that are a HIT. The set changes, and is replaced by a new snapshot."""
        return self._ready

    @property
    def ready(self) -> int:
        """Number of keys that are a HIT."""
        return len(self._ready)

    @property
    def pending(self) -> int:
        """Number of keys that are a HIT_PENDING."""
        return len(self._pending)

    def apply_message(self, message: Snapshot | KeyEvents) -> bool:
        """Apply a message of the daemon. True if a new snapshot is needed: send Subscribe, once."""
        del self._removed[-FREED_SHARDS:]
        if isinstance(message, KeyEvents):
            return self._apply_events(message)
        return self._add_snapshot_part(message)

    def hide(self) -> None:
        """A reset was sent: every key is a MISS until `reveal`."""
        self._hidden = True
        self._epochs_since.clear()
        self._update_view()

    def clear_after_reset(self, epoch: int) -> None:
        """A reset is done, and the namespace has this epoch: clear the known keys if its KeyEvents
        was dropped."""
        if epoch not in self._epochs_since | {self.epoch}:
            self._begin_epoch(epoch)

    def reveal(self) -> None:
        """Lookups see the known keys again."""
        self._hidden = False
        self._update_view()

    def restart(self) -> None:
        """A new session begins: forget all keys. They are hidden until `reveal`."""
        self.complete, self.sequence, self._discarded = False, 0, -1
        self._removed += self._known.ready.shards + self._known.pending.shards
        self._known, self._partial, self._buffered = MirroredKeys(), None, []
        self.hide()

    def track_changes(self) -> None:
        """Record from now on which keys became a HIT or ceased to be one."""
        self._changed = dict.fromkeys(self._ready)

    def take_changed_keys(self) -> Iterable[OffloadKey]:
        """Keys that may have become a HIT, or ceased to be one, since the last call."""
        changed = self._changed
        if not changed:
            return ()
        self._changed = {}
        return changed

    def _apply_events(self, message: KeyEvents) -> bool:
        if message.sequence <= self.sequence:
            return False
        follows = bool(message.events) and message.sequence == self.sequence + 1
        missing = self.complete and not follows
        if missing:
            self.complete = False
            self._update_view()
        if not self.complete and message.events:
            self._buffered.append(message)
        self.sequence = message.sequence
        if message.epoch != self.epoch:
            self._begin_epoch(message.epoch)
        self._record_changes(message.events)
        self._removed += self._known.apply(message.events)
        return missing

    def _begin_epoch(self, epoch: int) -> None:
        """Clear the known keys, which are of another epoch."""
        self._record_changes((KeyEvent(EventKind.CLEARED, ()),))
        self._removed += self._known.take_shards()
        self._note_epoch(epoch)

    def _note_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._epochs_since.add(epoch)

    def _add_snapshot_part(self, message: Snapshot) -> bool:
        if self.complete:
            return False
        if message.part == 0:
            self._partial = _PartialSnapshot(message.sequence, message.epoch)
        partial, sequence = self._partial, message.sequence
        if partial is not None and sequence == partial.sequence and message.part <= partial.parts:
            if message.part == partial.parts:
                partial.add(message)
                return message.last and self._finish_snapshot(partial)
            return False
        if sequence <= self._discarded or (partial is not None and sequence < partial.sequence):
            return False
        self._partial, self._discarded = None, sequence
        return True

    def _finish_snapshot(self, partial: _PartialSnapshot) -> bool:
        """Use a complete snapshot, with the buffered KeyEvents above it if none is missing."""
        self._partial, sequence, epoch = None, partial.sequence, partial.epoch
        for message in self._buffered:
            if message.sequence == sequence + 1:
                self._removed += partial.resident.apply(message.events)
                sequence, epoch = message.sequence, message.epoch
        if sequence < self.sequence:
            return True
        before, self._known = self._known, partial.resident
        self.sequence, self._buffered, self.complete = sequence, [], True
        self._note_epoch(epoch)
        self._update_view()
        self._removed += before.ready.shards + before.pending.shards
        return False

    def _update_view(self) -> None:
        """Let lookups see the known keys, or none while hidden."""
        before = self._ready
        shown = MirroredKeys() if self._hidden else self._known
        self._ready, self._pending = shown.ready, shown.pending
        self._absent_result = MISS if self.complete or self._hidden else RETRY
        if self._changed is not None and before is not self._ready:
            self._changed.update(dict.fromkeys(before.different_keys(self._ready)))

    def _record_changes(self, events: Iterable[KeyEvent]) -> None:
        if self._changed is not None:
            for event in events:
                cleared = event.kind is EventKind.CLEARED
                self._changed.update(dict.fromkeys(self._ready if cleared else event.keys))
