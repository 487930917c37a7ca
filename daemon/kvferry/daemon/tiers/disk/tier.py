"""The disk tier: stores of all namespaces below one root, with one bound on their bytes.

A namespace has a share of the bound, and may use more while others do not need theirs: see
shares.py. Any thread; `maintain` on one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

from kvferry.daemon.directories import sync_directory
from kvferry.daemon.tiers.base import Blocks, Fetched, HostMemory, Result, TierUsage
from kvferry.daemon.tiers.disk.meta import META, OtherKeyError, StoreMeta, read_meta
from kvferry.daemon.tiers.disk.namespace_store import SMALL_FILES, NamespaceStore
from kvferry.daemon.tiers.disk.root_files import (
    drop_marked,
    foreign_entries,
    is_namespace_name,
    lock_root,
    move_to_trash,
    namespace_directories,
    note_format,
    prepare_root,
    remove_trash,
)
from kvferry.daemon.tiers.disk.shares import Shares
from kvferry.daemon.tiers.disk.slab import slot_bytes_of
from kvferry.daemon.tiers.disk.slot_index import MAX_SLOTS
from kvferry.daemon.tiers.durable_files import write_file
from kvferry.daemon.tiers.encryption import cipher_of, key_id_of
from kvferry.daemon.tiers.own_files import NotAFileError
from kvferry.proto.errors import Code, Refused
from kvferry.proto.sizes import format_size

# A slab has this part of the tier's size or of the free space, but at most MAX_SLAB_BYTES, and at
# least one slot. Each takes a descriptor, so there are at most MAX_SLABS of this kind.
SLABS, MAX_SLABS = 32, 4096
MAX_SLAB_BYTES = 1 << 30
# No slab is added if the file system would have less free space: 1/FLOOR of its size, or this.
FLOOR = 50
MAX_FLOOR_BYTES = 4 << 30
# Errors of a store that no later start could open.
DAMAGE = FileNotFoundError, NotAFileError, PermissionError, msgspec.MsgspecError, OtherKeyError
# Seconds between two syncs.
SYNC_EVERY = 3.0
# Seconds without another attempt to create a namespace, after one that failed.
RETRY_NAMESPACE = 1.0
# Seconds for which the usage says why.
REFUSAL_SHOWN = 60.0

log = structlog.get_logger()


def open_tier(options: Mapping[str, Any], _memory: HostMemory) -> DiskTier:
    """Raises Refused (BAD_CONFIG) or OSError."""
    return DiskTier(**options)


class DiskTier:
    """path: the root. size: bound in bytes on everything below it. io_threads: reads and writes in
    flight. key_file: empty if blocks are not encrypted."""

    # A thread moves one large block at a time, or several small ones.
    call_bytes = 1 << 20

    def __init__(self, path: str, size: int, io_threads: int = 8, key_file: str = "") -> None:
        self._root, self._size, self.io_threads = Path(path), size, io_threads
        self._cipher_of = cipher_of(key_file, "tiers.disk.key_file")
        self._lock, self._shares = threading.Lock(), Shares(size)
        self._stores: dict[str, NamespaceStore] = {}
        # Dropped stores, whose files `maintain` deletes.
        self._trash: list[NamespaceStore] = []
        self._evicted_before = 0
        # Why a namespace could not be created, its name, and until when it is not tried again.
        self._refusal, self._refused, self._refused_until = "", "", 0.0
        self._synced = time.monotonic()
        prepare_root(self._root)
        try:
            self._root_lock = lock_root(self._root)
        except BlockingIOError as error:
            message = (
                f"tiers.disk.path {self._root} is in use by another process; give each daemon a "
                "path of its own"
            )
            raise Refused(Code.BAD_CONFIG, message, path) from error
        try:
            note_format(self._root)
            drop_marked(self._root)
            remove_trash(self._root)
            if foreign := foreign_entries(self._root):
                log.warning("not part of the disk tier, left alone", names=foreign[:10])
            for directory in namespace_directories(self._root):
                self._open_store(directory)
            _release_freed_memory()
            _check_size(self._size, self._used_bytes() + _room_in(self._root))
        except BaseException:
            os.close(self._root_lock)
            raise

    # The interface

    def contains(self, store: str, keys: Sequence[bytes]) -> Sequence[bool]:
        found = self._stores.get(store)
        return [False] * len(keys) if found is None else found.contains(keys)

    def fetch(self, blocks: Blocks, deadline: float) -> Sequence[Fetched]:
        store = self._stores.get(blocks.store)
        if store is None or not store.matches(blocks):
            return [Fetched(Result.MISS)] * len(blocks.keys)
        return store.fetch(blocks, deadline)

    def put(self, blocks: Blocks, checksums: Sequence[int]) -> Sequence[Result]:
        store = self._stores.get(blocks.store) or self._create_store(blocks)
        if store is None or not store.matches(blocks):
            return [Result.FULL] * len(blocks.keys)
        return store.put(blocks, checksums)

    def drop(self, store: str, keys: Sequence[bytes] | None = None) -> None:
        if keys is not None:
            if (found := self._stores.get(store)) is not None:
                found.forget_keys(keys)
            return
        with self._lock:
            if (found := self._stores.get(store)) is not None:
                self._discard(found)

    def stores(self) -> Sequence[str]:
        return tuple(self._stores)

    def note_used(self, stores: Collection[str]) -> None:
        self._shares.used = stores

    def usage(self) -> TierUsage:
        refused = time.monotonic() < self._refused_until + REFUSAL_SHOWN
        with self._lock:
            stores = list(self._stores.values())
            reasons = [store.catalog.read_only for store in stores if store.catalog.read_only]
            return TierUsage(
                self._size,
                self._used_bytes(),
                sum(store.catalog.table.used for store in stores),
                self._evicted_before + sum(store.catalog.evictions for store in stores),
                sum(store.catalog.table.retired for store in stores),
                next(iter(reasons), self._refusal if refused else ""),
            )

    def maintain(self) -> None:
        with self._lock:
            stores, trash = list(self._stores.values()), list(self._trash)
        sync_at = time.monotonic() + SYNC_EVERY
        for store in trash:
            if store.in_use:
                continue
            store.close()
            remove_trash(self._root)
            with self._lock:
                self._trash.remove(store)
                self._evicted_before += store.catalog.evictions
        for store in stores:
            store.read_headers(sync_at)
            store.remove_truncated_slabs()
        self._shrink()
        now = time.monotonic()
        if now >= self._synced + SYNC_EVERY:
            self._synced = now
            for store in stores:
                try:
                    store.sync()
                except OSError as error:
                    store.catalog.note_error(error)

    def close(self) -> None:
        for store in self._stores.values():
            store.stop()
            try:
                store.sync()
            except OSError as error:
                log.warning("disk tier not synced", namespace=store.name, reason=str(error))
            store.close()
        os.close(self._root_lock)

    # Stores

    def _open_store(self, directory: Path) -> None:
        """Open a namespace's store. One that is damaged or has another encryption key is deleted,
        and one that cannot be opened now is left alone: other namespaces do not depend on it."""
        try:
            meta = read_meta(directory)
            if (needed := meta.slab_bytes + SMALL_FILES) > self._size:
                # It could never be written, and would take the room of all others in vain.
                text = f"its slabs of {format_size(needed)} exceed tiers.disk.size"
                raise msgspec.ValidationError(text)
            store = self._make_store(directory, meta)
        except DAMAGE as error:
            log.warning("namespace dropped from disk", namespace=directory.name, reason=str(error))
            shutil.rmtree(directory, ignore_errors=True)
            return
        except (OSError, MemoryError) as error:
            log.warning("namespace not opened", namespace=directory.name, reason=str(error))
            return
        self._stores[directory.name] = store
        log.info(
            "disk tier loaded",
            namespace=store.name,
            blocks=store.catalog.table.used,
            slots=store.slabs.end,
        )

    def _make_store(self, directory: Path, meta: StoreMeta) -> NamespaceStore:
        max_slots = self._size // meta.slot_bytes + meta.slots_per_slab
        cipher = self._cipher_of(directory.name)
        if meta.key_id != key_id_of(cipher):
            raise OtherKeyError
        return NamespaceStore(directory, meta, min(max_slots, MAX_SLOTS), self._grow, cipher)

    def _create_store(self, blocks: Blocks) -> NamespaceStore | None:
        """A store for a namespace that has none. None if that is not possible."""
        slot_bytes = slot_bytes_of(blocks.nbytes)
        # A part of the free space, if that is smaller: else not even one slab may fit.
        part = max(min(self._size, _room_in(self._root)) // SLABS, self._size // MAX_SLABS)
        slab_bytes = min(part, MAX_SLAB_BYTES)
        slots = max(1, slab_bytes // slot_bytes)
        key_id = key_id_of(self._cipher_of(blocks.store))
        meta = StoreMeta(blocks.nbytes, len(blocks.keys[0]), slots, blocks.model, key_id)
        least = meta.slab_bytes + SMALL_FILES
        if not is_namespace_name(blocks.store):
            return None
        directory = self._root / blocks.store
        with self._lock:
            if blocks.store in self._stores:
                return self._stores[blocks.store]
            if blocks.store == self._refused and time.monotonic() < self._refused_until:
                return None
            if least > self._size:
                size, needed = format_size(self._size), format_size(least)
                reason = f"tiers.disk.size {size} is below the {needed} for one block"
                self._refuse(reason, blocks.store, RETRY_NAMESPACE)
                return None
            if not self._make_room(SMALL_FILES, blocks.store):
                reason = self._shortage(SMALL_FILES) or "no room for another namespace"
                self._refuse(reason, blocks.store, 0.0)
                return None
            try:
                with suppress(FileNotFoundError):
                    directory.rmdir()  # one without a file, from a process that was killed
                directory.mkdir(mode=0o700)
            except OSError as error:
                reason = f"{directory} cannot be created ({error.strerror})"
                if directory.exists():
                    reason += "; move it away: it has files that no tier made or that do not open"
                self._refuse(reason, blocks.store, RETRY_NAMESPACE)
                return None
            try:
                write_file(directory / META, msgspec.json.encode(meta))
                store = self._make_store(directory, meta)
            except OSError as error:
                self._refuse(str(error), blocks.store, RETRY_NAMESPACE)
                shutil.rmtree(directory, ignore_errors=True)
                return None
            sync_directory(self._root)
            self._refusal = ""
            self._stores[blocks.store] = store
        return store

    def _discard(self, store: NamespaceStore) -> None:
        """Have `maintain` delete a store. Raises OSError."""
        store.stop()
        move_to_trash(store.directory)
        del self._stores[store.name]
        self._trash.append(store)

    def _refuse(self, reason: str, namespace: str, seconds: float) -> None:
        if reason != self._refusal:
            log.warning("namespace not stored on disk", namespace=namespace, reason=reason)
        self._refusal, self._refused = reason, namespace
        self._refused_until = time.monotonic() + seconds

    # The bound

    def _used_bytes(self) -> int:
        return sum(store.nbytes for store in (*self._stores.values(), *self._trash))

    def _grow(self, store: NamespaceStore) -> bool:
        """Add a slab to a store if the bound and the file system have room, or another gives."""
        with self._lock:
            if self._make_room(store.growth, store.name) and store.add_slab():
                return True
            if not store.slabs.end and (reason := self._shortage(store.growth)):
                self._refuse(reason, store.name, 0.0)
            return False

    def _make_room(self, nbytes: int, name: str) -> bool:
        """Whether `nbytes` more fit, for a namespace. Others may give slabs up for it."""
        if nbytes > _room_in(self._root):
            return False
        while self._used_bytes() + nbytes > self._size:
            if self._trash and not self._shares.is_used(name):
                return False  # there is more room soon
            giver = self._shares.choose_giver(list(self._stores.values()), name, nbytes)
            if giver is None:
                return False
            if not giver.slabs.end:
                if not self._trash:  # else there is more room soon
                    log.info("namespace without blocks dropped from disk", namespace=giver.name)
                    with suppress(OSError):
                        self._discard(giver)
                return False
            if not giver.give_up_slab():
                return False
        return True

    def _shortage(self, nbytes: int) -> str:
        """Why the file system has no room for `nbytes` more; empty if it has."""
        if nbytes <= (room := _room_in(self._root)):
            return ""
        return (
            f"the file system of {self._root} has room for {format_size(room)} more, but "
            f"{format_size(nbytes)} are needed; free disk space"
        )

    def _shrink(self) -> None:
        """Give slabs up until the bound is kept, if it was reduced since the last run."""
        with self._lock:
            while self._used_bytes() > self._size and self._stores:
                largest = max(self._stores.values(), key=lambda store: store.nbytes)
                if not largest.slabs.end or not largest.give_up_slab():
                    return


def _release_freed_memory() -> None:
    """Return freed memory to the kernel: sorting the keys takes more than their index."""
    with suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def _room_in(root: Path) -> int:
    """Bytes of the file system that the tier may still take."""
    system = os.statvfs(root)
    floor = min(MAX_FLOOR_BYTES, system.f_blocks * system.f_frsize // FLOOR)
    return max(0, system.f_bavail * system.f_frsize - floor)


def _check_size(size: int, available: int) -> None:
    """Log a warning if the file system bounds the tier more than its size does. In bytes."""
    if size > available:
        log.warning(
            "less free disk space than tiers.disk.size",
            size=size,
            available=available,
            change="reduce tiers.disk.size, free disk space, or set another tiers.disk.path",
        )
