"""Which block of a namespace is in which slot: the index and the slot table, changed together.

It also notes the errors that prevent changes. The caller holds the lock of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import lmdb
import numpy as np
import structlog

from kvferry.daemon.tiers.disk.index import DAMAGE, INDEX, Entry, Index
from kvferry.daemon.tiers.disk.slabs import Slabs
from kvferry.daemon.tiers.disk.slot_table import SlotTable

log = structlog.get_logger()


class Catalog:
    """directory: holds the index. slabs: its slots can be used. max_slots: it has, at most.

    Raises lmdb.Error if the index cannot be opened. Errors of later changes are noted.
    """

    def __init__(self, directory: Path, slabs: Slabs, max_slots: int, key_bytes: int) -> None:
        self._name, self._slabs, self._key_bytes = directory.name, slabs, key_bytes
        # After the size was reduced there may be more slabs than fit, for a moment.
        end = max((slabs.slots_of(number).stop for number in slabs.numbers), default=0)
        self.table = SlotTable(max(max_slots, end), key_bytes)
        for number in slabs.numbers:
            self.table.add_slots(slabs.slots_of(number))
        self.index = Index(directory / INDEX, slabs.num_slots)
        with suppress(OSError):  # writes may fail later, and then no key is evicted
            self.index.reserve(slabs.num_slots)
        # The generation of the last block that was written.
        self.generation = 0
        # Why nothing can be written; empty if it can.
        self.read_only = ""
        # Why the index must be rebuilt; empty if it need not be.
        self.damage = ""
        self.evictions = 0

    def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        try:
            entries = self.index.find(keys)
        except lmdb.Error as error:
            self._note_damage(error)
            return [None] * len(keys)
        return [
            entry if entry is not None and self._slabs.has(entry.slot) else None
            for entry in entries
        ]

    def new_entry(self, slot: int) -> Entry:
        """An entry for a block that will be written into a busy slot."""
        self.generation += 1
        return Entry(slot, self.generation)

    def insert(self, written: Sequence[tuple[bytes, Entry]]) -> bool:
        """Insert the entries of blocks that were written. False if that fails."""
        try:
            replaced = self.index.insert(written)
        except lmdb.Error as error:
            self.note_error(error)
            for _, entry in written:
                self.table.free_slot(entry.slot)
            return False
        for key, entry in written:
            self.table.occupy_slot(entry.slot, key)
        for slot in replaced:
            self.table.free_slot(slot)
        self.read_only = ""
        return True

    def forget(self, key: bytes, slot: int, *, retire: bool) -> None:
        """Drop a key, if it is in this slot. retire: the slot is never used again."""
        try:
            self.index.remove([(key, slot)])
            if retire:
                self.index.retire(slot)
        except lmdb.Error as error:
            self.note_error(error)
        if retire:
            self.table.retire_slot(slot)
        elif self.table.holds(slot, key):
            self.table.free_slot(slot)

    def evict(self, count: int) -> list[int]:
        """Drop up to `count` of the coldest keys. Returns their slots, which are busy then; none as
        long as the index cannot be changed, because new keys could not be inserted either."""
        if self.read_only:
            try:
                self.index.check_writable()
            except lmdb.Error as error:
                self.note_error(error)
                return []
        victims = self.table.take_victims(count)
        try:
            self.index.remove((key, slot) for slot, key in victims)
        except lmdb.Error as error:
            self.note_error(error)
            for slot, key in victims:
                self.table.occupy_slot(slot, key)
            return []
        self.evictions += len(victims)
        return [slot for slot, _ in victims]

    def add_slots(self, slots: range) -> bool:
        """Add the slots of a new slab. False if that is not possible."""
        try:
            self.index.resize(self._slabs.num_slots)
        except lmdb.Error as error:
            self._note_damage(error)
            return False
        self.table.add_slots(slots)
        return True

    def remove_slots(self, slots: range) -> None:
        """Remove the slots of a slab that was deleted, with their keys."""
        entries = self.table.keys_in(slots)
        self.evictions += len(entries)
        self.table.remove_slots(slots)
        try:
            self.index.remove_slots(entries, slots)
        except lmdb.Error as error:
            self.note_error(error)
        try:
            self.index.resize(self._slabs.num_slots)
        except lmdb.Error as error:
            self._note_damage(error)

    def restore(self, entries: Sequence[tuple[bytes, Entry]]) -> None:
        """Fill the slot table from the index, a part at a time. `end_restore` must follow.

        Entries that cannot be right are removed from the index. Raises lmdb.Error.
        """
        keys = [key for key, _ in entries]
        if any(len(key) != self._key_bytes for key in keys):
            raise lmdb.CorruptedError(f"a key does not have {self._key_bytes} bytes")
        slots = np.array([entry.slot for _, entry in entries], np.int64)
        generations = np.array([entry.generation for _, entry in entries], np.int64)
        known = np.array([self._slabs.has(slot) for slot in slots.tolist()], np.bool_)
        slots[~known] = self.table.capacity
        good = self.table.restore_slots(keys, slots, generations)
        stale = [(keys[n], entries[n][1].slot) for n in np.flatnonzero(~good).tolist()]
        if stale:
            try:
                self.index.remove(stale)
            except lmdb.Error as error:
                if isinstance(error, DAMAGE):
                    raise
                self.note_error(error)  # a fetch finds that their slots have other blocks
        self.generation = max(self.generation, int(generations.max(initial=0)))

    def end_restore(self) -> None:
        """Raises lmdb.Error."""
        self.table.restore_retired(self.index.retired())
        self.table.end_restore()

    def note_error(self, error: Exception) -> None:
        """Nothing can be written now, or the index is damaged."""
        if isinstance(error, DAMAGE):
            self._note_damage(error)
        reason = str(error)
        if not self.read_only:
            log.warning("disk tier cannot be written", namespace=self._name, reason=reason)
        self.read_only = reason

    def _note_damage(self, error: Exception) -> None:
        """The tier rebuilds the index."""
        self.damage = self.damage or str(error)
