"""The local copy of a namespace: what is resident, as the daemon tells it.

A Snapshot in parts says what is resident as of a number; numbered KeyEvents say what happened next.
What makes the copy robust is that an event says what its keys are *now*, not what changed: it
holds whatever was heard before. So:

- Where a number is missing, the mirror is astray, and wants a new snapshot. KeyEvents that come
  meanwhile still count. Keys that it knows are answered as it knows them: a HIT that is no more
  costs one failed load, which is a miss, while a RETRY would hold back every request for as long
  as a snapshot takes. Only of the others it cannot tell, and says RETRY.
- KeyEvents that arrive during a snapshot are kept. When the snapshot is complete, those above its
  number are applied to it, and it replaces what was known.
- A snapshot that begins is begun anew. What is left of one that was given up is passed over.

- A daemon that is busy drops KeyEvents for those who do not poll, never a part of a snapshot.

Between a reset that was sent and the daemon's answer the mirror is hidden: whatever is told,
everything is a MISS. The KeyEvents of the reset comes before its answer, so what shows then is new;
where it was dropped, the mirror forgets by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.proto.keys import EventKind, Lookup, OffloadKey
from kvferry.proto.messages import KeyEvent, KeyEvents, Snapshot

Keys: TypeAlias = set[OffloadKey]

HIT, MISS, HIT_PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY


@dataclass(slots=True)
class Resident:
    """The keys that are there: one that is in neither set is absent."""

    ready: Keys = field(default_factory=set)
    pending: Keys = field(default_factory=set)

    def apply(self, events: Iterable[KeyEvent]) -> None:
        ready, pending = self.ready, self.pending
        for event in events:
            match event.kind:
                case EventKind.STORED:
                    ready.update(event.keys)
                    pending.difference_update(event.keys)
                case EventKind.PENDING:
                    pending.update(event.keys)
                    ready.difference_update(event.keys)
                case EventKind.REMOVED | EventKind.ABANDONED:
                    ready.difference_update(event.keys)
                    pending.difference_update(event.keys)
                case EventKind.CLEARED:
                    ready.clear()
                    pending.clear()


@dataclass(slots=True)
class _Gathering:
    """A snapshot of which so many parts are here."""

    sequence: int
    parts: int = 0
    resident: Resident = field(default_factory=Resident)

    def add(self, message: Snapshot) -> None:
        self.parts += 1
        resident = self.resident
        (resident.pending if message.pending else resident.ready).update(message.keys)


class Mirror:
    """Fed with what the daemon says; no socket, no clock."""

    def __init__(self) -> None:
        self.whole = False
        """Whether it knows everything: before the first snapshot, and astray, it does not."""
        self.sequence = 0
        """The number of the newest KeyEvents it has heard of."""
        self.generation = 0
        """Of the namespace: one more with each reset."""
        self._known = Resident()
        self._gathering: _Gathering | None = None
        self._held: list[KeyEvents] = []
        self._void = -1
        """The newest snapshot that was given up, by its number."""
        self._hidden = self._cleared = False
        self._ready, self._pending, self._others = self._known.ready, self._known.pending, RETRY
        self._changed: dict[OffloadKey, None] | None = None

    def lookup(self, key: OffloadKey) -> Lookup:
        """What is known of a key."""
        if key in self._ready:
            return HIT
        if key in self._pending:
            return HIT_PENDING
        return self._others

    def lacking(self, keys: Iterable[OffloadKey]) -> set[OffloadKey]:
        """Those that are no HIT."""
        return set(keys) - self._ready

    @property
    def ready_keys(self) -> Set[OffloadKey]:
        """The keys that are a HIT; the set changes, and another may take its place."""
        return self._ready

    @property
    def ready(self) -> int:
        """How many keys can be loaded."""
        return len(self._ready)

    @property
    def pending(self) -> int:
        """How many keys are being stored."""
        return len(self._pending)

    def feed(self, message: Snapshot | KeyEvents) -> bool:
        """Apply a message of the daemon. True if something is missing: send Subscribe, once."""
        self.generation = max(self.generation, message.generation)
        return self._hear(message) if isinstance(message, KeyEvents) else self._gather(message)

    def hide(self) -> None:
        """A reset was sent: everything is absent, whatever is told, until `reveal`."""
        self._hidden, self._cleared = True, False
        self._show()

    def forget(self) -> None:
        """A reset is done: where its KeyEvents did not come, what is known is from before it."""
        if not self._cleared:
            self._known.apply([KeyEvent(EventKind.CLEARED, ())])
        self._cleared = False

    def reveal(self) -> None:
        """What is known shows again."""
        self._hidden = False
        self._show()

    def restart(self) -> None:
        """Another session tells from now on. What is known is void, and hidden until `reveal`."""
        self.whole, self.sequence, self.generation, self._void = False, 0, 0, -1
        self._known, self._gathering, self._held = Resident(), None, []
        self.hide()

    def watch(self) -> None:
        """Remember from now on which keys became a HIT or ceased to be one: `take_changed`."""
        self._changed = dict.fromkeys(self._ready)

    def take_changed(self) -> Iterable[OffloadKey]:
        """Keys that may be a HIT and were none when last taken, or the other way round."""
        changed = self._changed
        if not changed:
            return ()
        self._changed = {}
        return changed

    def _hear(self, news: KeyEvents) -> bool:
        if news.sequence <= self.sequence:
            return False
        missing = self.whole and news.sequence != self.sequence + 1
        if missing:
            self.whole = False
            self._show()
        if not self.whole:
            self._held.append(news)
        self.sequence = news.sequence
        self._note(news.events)
        self._known.apply(news.events)
        self._cleared |= any(event.kind is EventKind.CLEARED for event in news.events)
        return missing

    def _gather(self, message: Snapshot) -> bool:
        if self.whole:
            return False
        if message.part == 0:
            self._gathering = _Gathering(message.sequence)
        now, sequence = self._gathering, message.sequence
        if now is not None and sequence == now.sequence and message.part <= now.parts:
            if message.part == now.parts:
                now.add(message)
                return message.last and self._finish(now)
            return False
        if sequence <= self._void or (now is not None and sequence < now.sequence):
            return False
        self._gathering, self._void = None, sequence
        return True

    def _finish(self, gathered: _Gathering) -> bool:
        """The snapshot is all there: it holds, with the KeyEvents above it, if none is missing."""
        self._gathering, sequence = None, gathered.sequence
        for news in self._held:
            if news.sequence == sequence + 1:
                gathered.resident.apply(news.events)
                sequence = news.sequence
        if sequence < self.sequence:
            return True
        self.sequence, self._known, self._held, self.whole = sequence, gathered.resident, [], True
        self._show()
        return False

    def _show(self) -> None:
        """Have lookups see what is known, or nothing while hidden."""
        before = self._ready
        shown = Resident() if self._hidden else self._known
        self._ready, self._pending = shown.ready, shown.pending
        self._others = MISS if self.whole or self._hidden else RETRY
        if self._changed is not None and before is not self._ready:
            self._changed.update(dict.fromkeys(before ^ self._ready))

    def _note(self, events: Iterable[KeyEvent]) -> None:
        if self._changed is not None:
            for event in events:
                cleared = event.kind is EventKind.CLEARED
                self._changed.update(dict.fromkeys(self._ready if cleared else event.keys))
