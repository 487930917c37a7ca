"""Which block of a namespace is in which slot: the slot table and the hint file, changed together.

The caller holds the lock of the store, except for the constructor.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import structlog

from kvferry.daemon.tiers.disk.hints import FREE, HINTS, RETIRED, HintFile
from kvferry.daemon.tiers.disk.slabs import Slabs
from kvferry.daemon.tiers.disk.slot_table import Entry, SlotTable

log = structlog.get_logger()


class Catalog:
    """The index of one namespace's blocks on disk, read from its hints, and its free slots.

    slabs: its slots can be used. max_slots: it has, at most.

    Raises OSError if the hint file cannot be opened. Errors of later changes are noted.
    """

    def __init__(self, directory: Path, slabs: Slabs, max_slots: int, key_bytes: int) -> None:
        self._name, self._slabs = directory.name, slabs
        # Why nothing can be written; empty if it can.
        self.read_only = ""
        self.evictions = 0
        # After the size was reduced there may be more slabs than fit, for a moment.
        self.table = SlotTable(max(max_slots, slabs.end))
        self.hints = HintFile(directory / HINTS, key_bytes)
        with suppress(OSError):  # a full file system: some records cannot be written later
            self.hints.resize(slabs.end)
        for number in slabs.numbers:
            slots = slabs.slots_of(number)
            self.table.restore_slots(slots, self.hints.read(slots))
        for slot in self.table.end_restore():
            self._write_hint(slot, FREE)

    def insert(self, entry: Entry) -> None:
        """Insert a block that was written into a busy slot."""
        if self._write_hint(entry.slot, entry.stamp, entry.key):
            self.read_only = ""
        before = self.table.occupy_slot(entry)
        if before is not None:
            # Also if it is being read. If it is written again meanwhile, the reader gets another
            # key in the header, or bytes that the checksum of its header does not match.
            self._free(before)

    def insert_found(self, slot: int, entry: Entry | None) -> None:
        """Insert the block that was found in an unknown slot, unless there is a later one."""
        if entry is not None and self.table.is_latest(entry):
            self.insert(entry)
        else:
            self._free(slot)

    def forget(self, key: bytes, slot: int) -> None:
        """Drop a key, if it is in this slot."""
        if self.table.find([key]) == [slot]:
            self._free(slot)

    def retire(self, slot: int) -> None:
        """The device failed to read or write a slot: never use it again."""
        self._write_hint(slot, RETIRED)
        self.table.retire_slot(slot)

    def evict(self, count: int) -> list[int]:
        """Drop up to `count` of the coldest keys. Returns their slots, which are busy then; none as
        long as nothing can be written."""
        victims = self.table.take_victims(count)
        taken = list(takewhile(self._clear_hint, victims))
        for slot in victims[len(taken) :]:
            self.table.keep_victim(slot)
        self.evictions += len(taken)
        return taken

    def remove_slots(self, slots: range) -> None:
        """Remove the slots of a slab that was deleted, with their keys."""
        self.evictions += self.table.remove_slots(slots)
        with suppress(OSError):  # it stays larger than necessary
            self.hints.resize(self._slabs.end)

    def note_error(self, error: OSError) -> None:
        """Nothing can be written now."""
        reason = str(error)
        if not self.read_only:
            log.warning("disk tier cannot be written", namespace=self._name, reason=reason)
        self.read_only = reason

    def _free(self, slot: int) -> None:
        self._write_hint(slot, FREE)
        self.table.free_slot(slot)

    def _clear_hint(self, slot: int) -> bool:
        return self._write_hint(slot, FREE)

    def _write_hint(self, slot: int, generation: int, key: bytes = b"") -> bool:
        """False if that fails: then the next process finds the hint that the slot had before."""
        try:
            self.hints.write(slot, generation, key)
        except OSError as error:
            self.note_error(error)
            return False
        return True
