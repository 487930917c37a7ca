"""The blocks of one namespace on disk: its slab files, its index and its slot table.

A block is written in three steps: slots are taken, and their victims leave the index; the slots are
written; their keys enter the index. So an entry leads to a slot with other bytes only after a power
cut, and then the slot's header differs. Any thread; `lock` is never held during I/O on slots.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import msgspec
import structlog

from kvferry.daemon.tiers.base import Blocks, Fetched, Result
from kvferry.daemon.tiers.disk.index import DAMAGE, Entry, Index, index_bytes
from kvferry.daemon.tiers.disk.slab import SlabTruncatedError, SlotHeader, slot_bytes_of
from kvferry.daemon.tiers.disk.slabs import Slabs
from kvferry.daemon.tiers.disk.slot_table import SlotTable

INDEX, META = "index", "meta"
# Errors of a file system on which nothing can be written, while reads go on.
NO_WRITES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# Seconds without another attempt to add a slab, after one that failed.
RETRY_SLAB = 1.0

log = structlog.get_logger()


class StoreMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all slots of a namespace have in common."""

    block_bytes: int
    key_bytes: int
    slots_per_slab: int

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_of(self.block_bytes)

    @property
    def slab_bytes(self) -> int:
        return self.slot_bytes * self.slots_per_slab


class NamespaceStore:
    """directory: holds `meta`. max_slots: it has, at most. grow: called without the lock if there
    is no free slot; it may call `add_slab`, and returns whether it did.

    Until `loaded` is set (recovery.py), blocks can be read, but not written. Raises OSError and
    lmdb.Error.
    """

    def __init__(
        self,
        directory: Path,
        meta: StoreMeta,
        max_slots: int,
        grow: Callable[[NamespaceStore], bool],
    ) -> None:
        self.directory, self.meta = directory, meta
        self.name = directory.name
        self.lock = threading.Lock()
        self.slabs = Slabs(directory, meta.slot_bytes, meta.slots_per_slab)
        # After the size was reduced there may be more slabs than fit, for a moment.
        found = (max(self.slabs.numbers, default=-1) + 1) * meta.slots_per_slab
        self.table = SlotTable(max(max_slots, found), meta.key_bytes)
        for number in self.slabs.numbers:
            self.table.add_slots(self.slabs.slots_of(number))
        try:
            self.index = Index(directory / INDEX, self.slabs.num_slots)
        except BaseException:
            self.slabs.close()
            raise
        self.loaded = False
        # The generation of the last block that was written.
        self.generation = 0
        self.read_only = ""
        # Why the index must be rebuilt; empty if it need not be.
        self.damage = ""
        self.evictions = 0
        self._grow = grow
        self._max_slots = max_slots
        self._stopped = False
        # Calls of `put` in progress.
        self._puts = 0
        self._full_until = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the file system that are reserved for this store."""
        return self.slabs.nbytes + index_bytes(self.slabs.num_slots)

    @property
    def growth(self) -> int:
        """Bytes that another slab takes."""
        slots = self.slabs.num_slots
        more = index_bytes(slots + self.meta.slots_per_slab) - index_bytes(slots)
        return self.meta.slab_bytes + more

    def matches(self, blocks: Blocks) -> bool:
        """Whether blocks have this namespace's size and length of keys."""
        meta = self.meta
        return blocks.nbytes == meta.block_bytes and all(
            len(key) == meta.key_bytes for key in blocks.keys
        )

    # Reading

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self.lock:
            return [entry is not None for entry in self._find(keys)]

    def fetch(self, blocks: Blocks, deadline: float) -> list[Fetched]:
        with self.lock:
            entries = self._find(blocks.keys)
            for entry in entries:
                if entry is not None:
                    self.table.begin_read(entry.slot)
        return [
            Fetched(Result.MISS)
            if entry is None
            else self._fetch_one(key, entry, address, blocks.nbytes, deadline)
            for key, entry, address in zip(blocks.keys, entries, blocks.addresses, strict=True)
        ]

    def _find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        if self._stopped:
            return [None] * len(keys)
        try:
            entries = self.index.find(keys)
        except lmdb.Error as error:
            self._note_damage(error)
            return [None] * len(keys)
        return [
            entry if entry is not None and self.slabs.has(entry.slot) else None for entry in entries
        ]

    def _fetch_one(
        self, key: bytes, entry: Entry, address: int, nbytes: int, deadline: float
    ) -> Fetched:
        slab, at = self.slabs.place(entry.slot)
        header, result = None, Result.MISS
        if time.monotonic() >= deadline:
            result = Result.LATE
        else:
            try:
                header = slab.read_slot(at, address, nbytes)
            except SlabTruncatedError:
                if self.slabs.has(entry.slot):
                    log.error("slab file truncated; its blocks are lost", slab=str(slab.path))
                self.slabs.mark_lost(entry.slot)
            except OSError as error:
                log.warning("slot retired", slab=str(slab.path), slot=at, reason=str(error))
                result = Result.ERROR
        with self.lock:
            self.table.end_read(entry.slot)
            if header is not None and header == SlotHeader(
                self.name, key, entry.generation, nbytes, header.checksum
            ):
                self.table.touch_slot(entry.slot)
                return Fetched(Result.OK, header.checksum)
            if result is not Result.LATE:
                self._forget(key, entry.slot, retire=result is Result.ERROR)
        return Fetched(result)

    def forget_keys(self, keys: Sequence[bytes]) -> None:
        """Drop keys."""
        with self.lock:
            for key, entry in zip(keys, self._find(keys), strict=True):
                if entry is not None:
                    self._forget(key, entry.slot, retire=False)

    def _forget(self, key: bytes, slot: int, *, retire: bool) -> None:
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

    # Writing

    def put(self, blocks: Blocks, checksums: Sequence[int]) -> list[Result]:
        checksum_of = dict(zip(blocks.keys, checksums, strict=True))
        address_of = dict(zip(blocks.keys, blocks.addresses, strict=True))
        with self.lock:
            if self._stopped or not self.loaded:
                return [Result.FULL] * len(blocks.keys)
            self._puts += 1
        try:
            return self._put(blocks, checksum_of, address_of)
        finally:
            with self.lock:
                self._puts -= 1

    def _put(
        self, blocks: Blocks, checksum_of: dict[bytes, int], address_of: dict[bytes, int]
    ) -> list[Result]:
        results = dict.fromkeys(blocks.keys, Result.OK)
        with self.lock:
            for key, entry in zip(blocks.keys, self._find(blocks.keys), strict=True):
                if entry is not None:
                    self.table.touch_slot(entry.slot)
                    checksum_of.pop(key, None)
                    results[key] = Result.PRESENT
        slots = self._take_slots(len(checksum_of))
        written = list[tuple[bytes, Entry]]()
        for key, checksum in checksum_of.items():
            if not slots:
                results[key] = Result.FULL
                continue
            entry = Entry(slots.pop(0), self._next_generation())
            header = SlotHeader(self.name, key, entry.generation, blocks.nbytes, checksum)
            results[key] = self._write(entry.slot, header, address_of[key])
            if results[key] is Result.OK:
                written.append((key, entry))
        if not self._commit(written):
            results |= dict.fromkeys((key for key, _ in written), Result.FULL)
        return [results[key] for key in blocks.keys]

    def _next_generation(self) -> int:
        with self.lock:
            self.generation += 1
            return self.generation

    def _write(self, slot: int, header: SlotHeader, address: int) -> Result:
        slab, at = self.slabs.place(slot)
        try:
            slab.write_slot(at, header, address, header.nbytes)
        except OSError as error:
            with self.lock:
                if error.errno in NO_WRITES:
                    self.note_error(error)
                    self.table.free_slot(slot)
                    return Result.FULL
                self._forget(header.key, slot, retire=True)
            log.warning("slot retired", slab=str(slab.path), slot=at, reason=str(error))
            return Result.ERROR
        return Result.OK

    def _commit(self, written: Sequence[tuple[bytes, Entry]]) -> bool:
        """Insert written slots into the index. False if that fails."""
        if not written:
            return True
        with self.lock:
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

    def _take_slots(self, count: int) -> list[int]:
        """Up to `count` slots to write: free ones, those of another slab, then victims."""
        with self.lock:
            slots = self.table.take_free(count)
        while len(slots) < count and time.monotonic() >= self._full_until:
            if not self._grow(self):
                self._full_until = time.monotonic() + RETRY_SLAB
            with self.lock:
                slots += self.table.take_free(count - len(slots))
        if len(slots) == count:
            return slots
        with self.lock:
            victims = self.table.take_victims(count - len(slots))
            try:
                self.index.remove((key, slot) for slot, key in victims)
            except lmdb.Error as error:
                self.note_error(error)
                for slot, key in victims:
                    self.table.occupy_slot(slot, key)
                return slots
            self.evictions += len(victims)
        return slots + [slot for slot, _ in victims]

    def note_error(self, error: Exception) -> None:
        """Nothing can be written now, or the index is damaged."""
        if isinstance(error, DAMAGE):
            self._note_damage(error)
        reason = str(error)
        if not self.read_only:
            log.warning("disk tier cannot be written", namespace=self.name, reason=reason)
        self.read_only = reason

    def _note_damage(self, error: Exception) -> None:
        """The tier rebuilds the index."""
        self.damage = self.damage or str(error)

    # Slabs

    def add_slab(self) -> bool:
        """Add a slab. False if that is not possible."""
        per_slab = self.meta.slots_per_slab
        number = self.slabs.first_missing()
        if (number + 1) * per_slab > self._max_slots:
            return False
        try:
            self.slabs.create(number)
        except OSError as error:
            self.note_error(error)
            return False
        with self.lock:
            try:
                self.index.resize(self.slabs.num_slots)
            except lmdb.Error as error:
                self._note_damage(error)
                return False
            self.table.add_slots(self.slabs.slots_of(number))
        return True

    def give_up_slab(self) -> bool:
        """Delete the coldest slab that is not in use. False if there is none."""
        with self.lock:
            if self._stopped or not self.loaded:
                return False
            idle = [n for n in self.slabs.numbers if not self.table.in_use(self.slabs.slots_of(n))]
            if not idle:
                return False
            coldest = min(idle, key=lambda n: self.table.heat(self.slabs.slots_of(n)))
            self._remove_slab(coldest)
        return True

    def remove_lost_slabs(self) -> None:
        """Delete slab files that are truncated and not in use."""
        with self.lock:
            if self._stopped or not self.loaded:
                return
            self.slabs.find_lost()
            for number in self.slabs.lost:
                if not self.table.in_use(self.slabs.slots_of(number)):
                    self._remove_slab(number)

    def _remove_slab(self, number: int) -> None:
        slots = self.slabs.slots_of(number)
        entries = self.table.keys_in(slots)
        self.evictions += len(entries)
        self.table.remove_slots(slots)
        self.slabs.delete(number)
        try:
            self.index.remove_slots(entries, slots)
        except lmdb.Error as error:
            self.note_error(error)
        try:
            self.index.resize(self.slabs.num_slots)
        except lmdb.Error as error:
            self._note_damage(error)

    # End

    @property
    def in_use(self) -> bool:
        """Whether a slot is being read or written, or a `put` is in progress."""
        with self.lock:
            return self._puts > 0 or self.table.in_use(range(self.table.capacity))

    def sync(self) -> None:
        """Write slots and then the index to the device. Raises OSError and lmdb.Error."""
        with self.lock:
            written = self.slabs.take_written()
        for descriptor in written:
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        self.index.sync()

    def stop(self) -> None:
        """Every key is a miss from now on."""
        with self.lock:
            self._stopped = True

    def close(self) -> None:
        """Nothing may be in progress."""
        self.index.close()
        self.slabs.close()
