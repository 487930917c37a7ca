"""Keeps the table of a sibling's keys up to date, from its snapshots and key events.

A snapshot replaces the table when it is complete. Events state what their keys are now, so they are
applied at once, also to an unfinished snapshot. If one is missing, the table stays in use, and a
new snapshot must be requested. Called on the thread of the links' event loop.
"""

from __future__ import annotations

from kvferry.daemon.tiers.siblings.key_table import KeyTable, hash_keys
from kvferry.proto.keys import EventKind
from kvferry.proto.messages import KeyEvents, Snapshot


class KeyFeed:
    """table: the keys of the sibling's namespace with this store.

    generation: of that namespace; 0: not known. is_incomplete: whether events are missing.
    """

    def __init__(self, store: str, table: KeyTable) -> None:
        self._store, self._table = store, table
        self.generation = 0
        self.is_incomplete = False
        self._sequence = self._parts = 0
        # The keys of an unfinished snapshot.
        self._fresh: KeyTable | None = None

    def apply(self, message: Snapshot | KeyEvents) -> None:
        if isinstance(message, Snapshot):
            self._add_snapshot_part(message)
        else:
            self._apply_events(message)

    def end(self) -> None:
        """The session with the sibling has ended."""
        self._table.clear()
        self.generation, self._fresh = 0, None

    def _add_snapshot_part(self, message: Snapshot) -> None:
        if message.part == 0:
            self._fresh, self._parts, self._sequence = KeyTable(), 0, message.sequence
        if self._fresh is None or message.part != self._parts:
            self._fresh, self.is_incomplete = None, True
            return
        self._parts += 1
        self.generation = message.generation
        if not message.pending:
            self._fresh.add(hash_keys(self._store, message.keys))
        if message.last:
            self._table.replace_by(self._fresh)
            self._fresh = None

    def _apply_events(self, message: KeyEvents) -> None:
        self.is_incomplete |= message.sequence > self._sequence + 1 or not message.events
        self._sequence, self.generation = message.sequence, message.generation
        tables = [self._table] if self._fresh is None else [self._table, self._fresh]
        for event in message.events:
            hashes = hash_keys(self._store, event.keys)
            for table in tables:
                if event.kind is EventKind.STORED:
                    table.add(hashes)
                elif event.kind is EventKind.CLEARED:
                    table.clear()
                else:
                    table.remove(hashes)
