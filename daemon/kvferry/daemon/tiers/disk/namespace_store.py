"""The blocks of one namespace on disk: reads and writes their slots, adds and deletes slabs.

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
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from kvferry.daemon.tiers.base import Blocks, Fetched, Result
from kvferry.daemon.tiers.disk.catalog import Catalog
from kvferry.daemon.tiers.disk.index import Entry, index_bytes
from kvferry.daemon.tiers.disk.slab import SlabTruncatedError, SlotHeader, slot_bytes_of
from kvferry.daemon.tiers.disk.slabs import Slabs

META = "meta"
# Errors of a file system on which nothing can be written, while reads go on.
NO_WRITES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# Seconds without another attempt to add a slab, after one that failed.
RETRY_SLAB = 1.0
# Seconds of use after which its time is noted again, for the next process.
NOTE_USE_EVERY = 600.0

log = structlog.get_logger()


class StoreMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all slots of a namespace have in common. model: for people who list the tier."""

    block_bytes: int
    key_bytes: int
    slots_per_slab: int
    model: str = ""

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
        try:
            self.catalog = Catalog(directory, self.slabs, max_slots, meta.key_bytes)
        except BaseException:
            self.slabs.close()
            raise
        self.loaded = False
        # When it was searched, read or written last, in seconds since the epoch. The time of `meta`
        # keeps it for the next process.
        self.last_used = self._noted_use = (directory / META).stat().st_mtime
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
        self.last_used = time.time()
        with self.lock:
            return [entry is not None for entry in self._find(keys)]

    def fetch(self, blocks: Blocks, deadline: float) -> list[Fetched]:
        self.last_used = time.time()
        with self.lock:
            entries = self._find(blocks.keys)
            for entry in entries:
                if entry is not None:
                    self.catalog.table.begin_read(entry.slot)
        return [
            Fetched(Result.MISS)
            if entry is None
            else self._fetch_one(key, entry, address, blocks.nbytes, deadline)
            for key, entry, address in zip(blocks.keys, entries, blocks.addresses, strict=True)
        ]

    def _find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        return [None] * len(keys) if self._stopped else self.catalog.find(keys)

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
            self.catalog.table.end_read(entry.slot)
            if header is not None and header == SlotHeader(
                self.name, key, entry.generation, nbytes, header.checksum
            ):
                self.catalog.table.touch_slot(entry.slot)
                return Fetched(Result.OK, header.checksum)
            if result is not Result.LATE:
                self.catalog.forget(key, entry.slot, retire=result is Result.ERROR)
        return Fetched(result)

    def forget_keys(self, keys: Sequence[bytes]) -> None:
        """Drop keys."""
        with self.lock:
            for key, entry in zip(keys, self._find(keys), strict=True):
                if entry is not None:
                    self.catalog.forget(key, entry.slot, retire=False)

    # Writing

    def put(self, blocks: Blocks, checksums: Sequence[int]) -> list[Result]:
        self.last_used = time.time()
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
                    self.catalog.table.touch_slot(entry.slot)
                    checksum_of.pop(key, None)
                    results[key] = Result.PRESENT
        slots = self._take_slots(len(checksum_of))
        written = list[tuple[bytes, Entry]]()
        for key, checksum in checksum_of.items():
            if not slots:
                results[key] = Result.FULL
                continue
            with self.lock:
                entry = self.catalog.new_entry(slots.pop(0))
            header = SlotHeader(self.name, key, entry.generation, blocks.nbytes, checksum)
            results[key] = self._write(entry.slot, header, address_of[key])
            if results[key] is Result.OK:
                written.append((key, entry))
        if not self._commit(written):
            results |= dict.fromkeys((key for key, _ in written), Result.FULL)
        return [results[key] for key in blocks.keys]

    def _write(self, slot: int, header: SlotHeader, address: int) -> Result:
        slab, at = self.slabs.place(slot)
        try:
            slab.write_slot(at, header, address, header.nbytes)
        except OSError as error:
            with self.lock:
                if error.errno in NO_WRITES:
                    self.catalog.note_error(error)
                    self.catalog.table.free_slot(slot)
                    return Result.FULL
                self.catalog.forget(header.key, slot, retire=True)
            log.warning("slot retired", slab=str(slab.path), slot=at, reason=str(error))
            return Result.ERROR
        return Result.OK

    def _commit(self, written: Sequence[tuple[bytes, Entry]]) -> bool:
        """Insert written slots into the index. False if that fails."""
        if not written:
            return True
        with self.lock:
            return self.catalog.insert(written)

    def _take_slots(self, count: int) -> list[int]:
        """Up to `count` slots to write: free ones, those of another slab, then victims."""
        with self.lock:
            slots = self.catalog.table.take_free(count)
        while len(slots) < count and time.monotonic() >= self._full_until:
            if not self._grow(self):
                self._full_until = time.monotonic() + RETRY_SLAB
            with self.lock:
                slots += self.catalog.table.take_free(count - len(slots))
        if len(slots) == count:
            return slots
        with self.lock:
            return slots + self.catalog.evict(count - len(slots))

    # Slabs

    def add_slab(self) -> bool:
        """Add a slab. False if that is not possible."""
        if self._stopped:  # another store may have its directory
            return False
        per_slab = self.meta.slots_per_slab
        number = self.slabs.first_missing()
        if (number + 1) * per_slab > self._max_slots:
            return False
        try:
            self.catalog.index.reserve(self.slabs.num_slots + per_slab)
            self.slabs.create(number)
        except OSError as error:
            self.catalog.note_error(error)
            return False
        with self.lock:
            return self.catalog.add_slots(self.slabs.slots_of(number))

    def give_up_slab(self) -> bool:
        """Delete the coldest slab that is not in use. False if there is none."""
        with self.lock:
            if self._stopped or not self.loaded:
                return False
            table, slots_of = self.catalog.table, self.slabs.slots_of
            idle = [number for number in self.slabs.numbers if not table.in_use(slots_of(number))]
            if not idle:
                return False
            coldest = min(idle, key=lambda number: table.heat(slots_of(number)))
            self._remove_slab(coldest)
        return True

    def remove_lost_slabs(self) -> None:
        """Delete slab files that are truncated and not in use."""
        with self.lock:
            if self._stopped or not self.loaded:
                return
            self.slabs.find_lost()
            for number in self.slabs.lost:
                if not self.catalog.table.in_use(self.slabs.slots_of(number)):
                    self._remove_slab(number)

    def _remove_slab(self, number: int) -> None:
        self.slabs.delete(number)
        self.catalog.remove_slots(self.slabs.slots_of(number))

    # End

    @property
    def in_use(self) -> bool:
        """Whether a slot is being read or written, or a `put` is in progress."""
        with self.lock:
            return self._puts > 0 or self.catalog.table.in_use(range(self.catalog.table.capacity))

    def sync(self) -> None:
        """Write slots and then the index to the device. Raises OSError and lmdb.Error."""
        with self.lock:
            written = self.slabs.take_written()
        for descriptor in written:
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        self.catalog.index.sync()
        if self.last_used > self._noted_use + NOTE_USE_EVERY:
            self._noted_use = self.last_used
            with suppress(OSError):  # read-only, or dropped
                os.utime(self.directory / META, (self.last_used, self.last_used))

    def stop(self) -> None:
        """Every key is a miss from now on."""
        with self.lock:
            self._stopped = True

    def close(self) -> None:
        """Nothing may be in progress."""
        self.catalog.index.close()
        self.slabs.close()
