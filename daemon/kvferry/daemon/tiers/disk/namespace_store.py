"""The blocks of one namespace on disk: reads and writes their slots, adds and deletes slabs.

A block is written in three steps: a slot is taken, and its victim leaves the catalog; the slot is
written; its key enters the catalog. Only a power cut can let a hint lead to another block, and then
the slot's header differs. Any thread; `lock` is never held during I/O on slots.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from kvferry.daemon.tiers.base import Blocks, Fetched, Result
from kvferry.daemon.tiers.disk.catalog import Catalog
from kvferry.daemon.tiers.disk.meta import META, StoreMeta
from kvferry.daemon.tiers.disk.slab import SealBrokenError, SlabTruncatedError, SlotHeader
from kvferry.daemon.tiers.disk.slabs import Slabs
from kvferry.daemon.tiers.disk.slot_table import Entry

if TYPE_CHECKING:
    from kvferry.daemon.tiers.block_cipher import BlockCipher

# Bound on the bytes of a namespace beside its slabs and hints, with a part of the root's.
SMALL_FILES = 64 << 10
# Errors of a file system on which nothing can be written, while reads go on.
NO_WRITES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
# Seconds without another attempt to add a slab, after one that failed.
RETRY_SLAB = 1.0
# Seconds of use after which its time is noted again, for the next process.
NOTE_USE_EVERY = 600.0
# Headers that are read at a time, between other work.
HEADERS = 2048

log = structlog.get_logger()


class NamespaceStore:
    """One namespace's blocks on disk.

    directory: holds `meta`. max_slots: it has, at most. grow: called without the lock if there is
    no free slot; it may call `add_slab`, and returns whether it did. cipher: with the key id of
    `meta`. Raises OSError.
    """

    def __init__(
        self,
        directory: Path,
        meta: StoreMeta,
        max_slots: int,
        grow: Callable[[NamespaceStore], bool],
        cipher: BlockCipher | None = None,
    ) -> None:
        self.directory, self.meta = directory, meta
        self.name = directory.name
        self.lock = threading.Lock()
        # When it was searched, read or written last, on the monotonic clock: the other one may be
        # set. The time of `meta` keeps it for the next process; one in the future counts as now.
        idle = time.time() - (directory / META).stat().st_mtime
        self.last_used = time.monotonic() - max(0.0, idle)
        self._noted_use = self.last_used if idle >= 0 else -math.inf
        self.slabs = Slabs(directory, meta.slot_bytes, meta.slots_per_slab, cipher)
        try:
            self.catalog = Catalog(directory, self.slabs, max_slots, meta.key_bytes)
        except BaseException:
            self.slabs.close()
            raise
        self._grow = grow
        self._max_slots = max_slots
        self._stopped = False
        # Calls of `put` in progress.
        self._puts = 0
        self._full_until = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the file system that are reserved for this store."""
        return self.slabs.nbytes + self.catalog.hints.nbytes + SMALL_FILES

    @property
    def growth(self) -> int:
        """Bytes that another slab takes, at most."""
        return self.meta.slab_bytes + self.catalog.hints.bytes_of(self.meta.slots_per_slab)

    def matches(self, blocks: Blocks) -> bool:
        """Whether blocks have this namespace's size and length of keys."""
        meta = self.meta
        return blocks.nbytes == meta.block_bytes and all(
            len(key) == meta.key_bytes for key in blocks.keys
        )

    # Reading

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.last_used = time.monotonic()
        with self.lock:
            return [slot is not None for slot in self._find(keys)]

    def fetch(self, blocks: Blocks, deadline: float) -> list[Fetched]:
        self.last_used = time.monotonic()
        with self.lock:
            slots = self._find(blocks.keys)
            for slot in slots:
                if slot is not None:
                    self.catalog.table.begin_read(slot)
        return [
            Fetched(Result.MISS)
            if slot is None
            else self._fetch_one(key, slot, address, blocks.nbytes, deadline)
            for key, slot, address in zip(blocks.keys, slots, blocks.addresses, strict=True)
        ]

    def _find(self, keys: Sequence[bytes]) -> list[int | None]:
        return [None] * len(keys) if self._stopped else self.catalog.table.find(keys)

    def _fetch_one(
        self, key: bytes, slot: int, address: int, nbytes: int, deadline: float
    ) -> Fetched:
        slab, at = self.slabs.place(slot)
        header, result = None, Result.MISS
        if time.monotonic() >= deadline:
            result = Result.LATE
        else:
            try:
                header = slab.read_slot(at, address, nbytes)
            except SlabTruncatedError:
                pass  # a miss; the file is removed by `maintain`
            except SealBrokenError:
                result = Result.CORRUPT
            except OSError as error:
                log.warning("slot retired", slab=str(slab.path), slot=at, reason=str(error))
                result = Result.ERROR
        with self.lock:
            self.catalog.table.end_read(slot)
            if header is not None and self._is_ours(header) and header.key == key:
                self.catalog.table.touch_slot(slot)
                return Fetched(Result.OK, header.checksum)
            if result is Result.ERROR:
                self.catalog.retire(slot)
            elif result is Result.MISS:
                self.catalog.forget(key, slot)
        return Fetched(result)

    def _is_ours(self, header: SlotHeader) -> bool:
        meta, found = self.meta, (header.namespace, header.nbytes, len(header.key))
        seal_fits = bool(header.seal) == bool(meta.key_id)
        return seal_fits and found == (self.name, meta.block_bytes, meta.key_bytes)

    def forget_keys(self, keys: Sequence[bytes]) -> None:
        """Drop keys."""
        with self.lock:
            for key, slot in zip(keys, self._find(keys), strict=True):
                if slot is not None:
                    self.catalog.forget(key, slot)

    # Writing

    def put(self, blocks: Blocks, checksums: Sequence[int]) -> list[Result]:
        self.last_used = time.monotonic()
        with self.lock:
            if self._stopped:
                return [Result.FULL] * len(blocks.keys)
            self._puts += 1
        try:
            return self._put(blocks, checksums)
        finally:
            with self.lock:
                self._puts -= 1

    def _put(self, blocks: Blocks, checksums: Sequence[int]) -> list[Result]:
        results = dict.fromkeys(blocks.keys, Result.PRESENT)
        # By key: one that is given twice is written once.
        new = {
            key: (address, checksum)
            for key, address, checksum in zip(blocks.keys, blocks.addresses, checksums, strict=True)
        }
        with self.lock:
            for key, slot in zip(blocks.keys, self._find(blocks.keys), strict=True):
                if slot is not None:
                    self.catalog.table.touch_slot(slot)
                    new.pop(key, None)
        slots = self._take_slots(len(new))
        for key, (address, checksum) in new.items():
            if slots:
                results[key] = self._write(slots.pop(0), key, address, checksum)
            else:
                results[key] = Result.FULL
        return [results[key] for key in blocks.keys]

    def _write(self, slot: int, key: bytes, address: int, checksum: int) -> Result:
        """Write a block into a busy slot, and insert it."""
        slab, at = self.slabs.place(slot)
        with self.lock:
            entry = Entry(slot, key, self.catalog.table.next_stamp())
        header = SlotHeader(self.name, key, entry.stamp, self.meta.block_bytes, checksum)
        try:
            slab.write_slot(at, header, address, header.nbytes)
        except OSError as error:
            with self.lock:
                if error.errno in NO_WRITES:
                    self.catalog.note_error(error)
                    self.catalog.table.free_slot(slot)
                    return Result.FULL
                self.catalog.retire(slot)
            log.warning("slot retired", slab=str(slab.path), slot=at, reason=str(error))
            return Result.ERROR
        with self.lock:
            self.catalog.insert(entry)
        return Result.OK

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
        number = self.slabs.first_missing()
        slots = self.slabs.slots_of(number)
        if slots.stop > self._max_slots:
            return False
        try:
            self.catalog.hints.add_slots(slots)
            self.slabs.create(number)
        except OSError as error:
            self.catalog.note_error(error)
            return False
        with self.lock:
            self.catalog.table.add_slots(slots)
        return True

    def give_up_slab(self) -> bool:
        """Delete the coldest slab that is not in use. False if there is none."""
        with self.lock:
            table, slots_of = self.catalog.table, self.slabs.slots_of
            idle = [
                number
                for number in self.slabs.numbers
                if table.is_known(slots_of(number)) and not table.in_use(slots_of(number))
            ]
            if self._stopped or not idle:
                return False
            coldest = min(idle, key=lambda number: table.heat(slots_of(number)))
            self._remove_slab(coldest)
        return True

    def remove_truncated_slabs(self) -> None:
        """Delete slab files that are truncated and not in use."""
        with self.lock:
            for number in [] if self._stopped else self.slabs.truncated():
                if not self.catalog.table.in_use(self.slabs.slots_of(number)):
                    log.error("slab file truncated", namespace=self.name, slab=number)
                    self._remove_slab(number)

    def _remove_slab(self, number: int) -> None:
        self.slabs.delete(number)
        self.catalog.remove_slots(self.slabs.slots_of(number))

    # Unknown slots

    def read_headers(self, until: float) -> None:
        """Read the headers of slots without a good hint, until a time of time.monotonic().

        On the thread of `remove_truncated_slabs`, which deletes files.
        """
        while time.monotonic() < until:
            with self.lock:
                slots = [] if self._stopped else self.catalog.table.unknown_slots(HEADERS)
            if not slots:
                return
            entries = [(slot, self._read_header(slot)) for slot in slots]
            with self.lock:
                for slot, entry in entries:
                    self.catalog.insert_found(slot, entry)
                is_end = not self.catalog.table.unknown_slots(1)
                blocks = self.catalog.table.used
            if is_end:
                log.info("headers of slots read", namespace=self.name, blocks=blocks)

    def _read_header(self, slot: int) -> Entry | None:
        slab, at = self.slabs.place(slot)
        try:
            header = slab.read_header(at)
        except (OSError, SlabTruncatedError):
            return None
        if header is None or not self._is_ours(header):
            return None
        return Entry(slot, header.key, header.generation)

    # End

    @property
    def in_use(self) -> bool:
        """Whether a slot is being read or written, or a `put` is in progress."""
        with self.lock:
            return self._puts > 0 or self.catalog.table.in_use(range(self.slabs.end))

    def sync(self) -> None:
        """Write slots and then their hints to the device. Raises OSError."""
        with self.lock:
            written = self.slabs.take_written()
        for descriptor in written:
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        self.catalog.hints.sync()
        if self.last_used > self._noted_use + NOTE_USE_EVERY:
            self._noted_use = self.last_used
            used = time.time() - (time.monotonic() - self.last_used)
            with suppress(OSError):  # read-only, or dropped
                os.utime(self.directory / META, (used, used), follow_symlinks=False)

    def stop(self) -> None:
        """Every key is a miss from now on."""
        with self.lock:
            self._stopped = True

    def close(self) -> None:
        """Nothing may be in progress."""
        self.catalog.hints.close()
        self.slabs.close()
