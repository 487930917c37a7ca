"""The index of a namespace: an LMDB file that maps keys to slots.

It is not synced by transactions. After a power cut it may be damaged, and is rebuilt from the slot
headers then; a process that dies cannot damage it. The caller holds the store's lock.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import lmdb

# The name of the file.
INDEX = "index"

_ENTRY = struct.Struct("<QQ")
_SLOT = struct.Struct("<Q")
# No slot has this number.
_PROBE = _SLOT.pack((1 << 64) - 1)
# What fits into the arrays of the slot table.
_MAX_NUMBER = (1 << 63) - 1
# Bound on the bytes of the file: a base for small trees, and an entry in half-empty pages.
_BASE_BYTES = 512 << 10
_BYTES_PER_SLOT = 320
# What the bound leaves for the other small files of a namespace and of the root.
_SMALL_FILES = 64 << 10
# A transaction copies each page that it changes.
_ENTRIES_PER_TRANSACTION = 256


# Errors of writing that wrong contents cause, not a full or read-only file system.
DAMAGE = (
    lmdb.BadDbiError,
    lmdb.BadTxnError,
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.MapResizedError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)


class Entry(NamedTuple):
    slot: int
    generation: int


def index_bytes(slots: int) -> int:
    """The bound on the bytes of an index of so many slots."""
    return _BASE_BYTES + -(-slots * _BYTES_PER_SLOT // 4096) * 4096


class Index:
    """Raises lmdb.Error if the file is damaged. `slots`: how many there are now."""

    def __init__(self, path: Path, slots: int, **options: bool) -> None:
        self._env = lmdb.open(
            str(path),
            map_size=index_bytes(slots),
            subdir=False,
            mode=0o600,
            sync=False,
            max_dbs=2,
            readahead=False,
            **options,
        )
        self._path = path
        self._keys = self._env.open_db(b"keys")
        self._retired = self._env.open_db(b"retired")

    def reserve(self, slots: int) -> None:
        """Have the file system keep the bytes of an index of so many slots, so that a change does
        not fail when it is full. Raises OSError."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, index_bytes(slots) - _SMALL_FILES)
        finally:
            os.close(descriptor)

    def check_writable(self) -> None:
        """Change nothing, durably or not. Raises lmdb.Error if nothing can be changed."""
        with self._env.begin(self._retired, write=True) as txn:
            txn.put(_PROBE, b"")
        with self._env.begin(self._retired, write=True) as txn:
            txn.delete(_PROBE)

    def count(self) -> int:
        """How many keys there are."""
        with self._env.begin(self._keys) as txn:
            return int(txn.stat(self._keys)["entries"])

    def resize(self, slots: int) -> None:
        """Change the bound on the file, and free what was reserved beyond it. No transaction may be
        open."""
        self._env.set_mapsize(index_bytes(slots))
        used = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        end = max(used, index_bytes(slots))
        if self._path.stat().st_size > end:
            with suppress(OSError):
                os.truncate(self._path, end)

    def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        with self._env.begin(self._keys) as txn:
            values = [txn.get(key) for key in keys]
        return [None if value is None else _decode(value) for value in values]

    def insert(self, entries: Iterable[tuple[bytes, Entry]]) -> list[int]:
        """Insert entries. Returns the slots of entries that were replaced."""
        replaced = []
        with self._env.begin(self._keys, write=True) as txn:
            for key, entry in entries:
                before = txn.replace(key, _ENTRY.pack(*entry))
                if before is not None:
                    replaced.append(_decode(before).slot)
        return replaced

    def remove(self, entries: Iterable[tuple[bytes, int]]) -> None:
        """Remove keys, if they are in these slots."""
        with self._env.begin(self._keys, write=True) as txn:
            for key, slot in entries:
                value = txn.get(key)
                if value is not None and _decode(value).slot == slot:
                    txn.delete(key)

    def retire(self, slot: int) -> None:
        with self._env.begin(self._retired, write=True) as txn:
            txn.put(_SLOT.pack(slot), b"")

    def remove_slots(self, entries: Sequence[tuple[bytes, int]], slots: range) -> None:
        """Remove a slab's entries, and the record of its retired slots."""
        for at in range(0, len(entries), _ENTRIES_PER_TRANSACTION):
            self.remove(entries[at : at + _ENTRIES_PER_TRANSACTION])
        with self._env.begin(self._retired, write=True) as txn:
            for slot in self._retired_slots(txn):
                if slot in slots:
                    txn.delete(_SLOT.pack(slot))

    def retired(self) -> list[int]:
        with self._env.begin(self._retired) as txn:
            return self._retired_slots(txn)

    def read_from(self, after: bytes, count: int) -> list[tuple[bytes, Entry]]:
        """Up to `count` entries in key order, behind the key `after` (b"": from the first on)."""
        found: list[tuple[bytes, Entry]] = []
        with self._env.begin(self._keys) as txn:
            for key, value in _behind(txn.cursor(), after):
                found.append((key, _decode(value)))
                if len(found) == count:
                    break
        return found

    def sync(self) -> None:
        self._env.sync(True)

    def close(self) -> None:
        self._env.close()

    @staticmethod
    def _retired_slots(txn: lmdb.Transaction) -> list[int]:
        return [_SLOT.unpack(key)[0] for key, _ in txn.cursor() if key != _PROBE]


@contextmanager
def open_read_only(path: Path) -> Iterator[Index]:
    """Open an index to read it, also while another process writes into it. Creates no file."""
    locked = path.with_name(path.name + "-lock").exists()
    index = Index(path, -(-path.stat().st_size // 4096) * 16, readonly=True, lock=locked)
    try:
        yield index
    finally:
        index.close()


def _decode(value: bytes) -> Entry:
    if len(value) != _ENTRY.size:
        raise lmdb.CorruptedError(f"an entry has {len(value)} bytes instead of {_ENTRY.size}")
    entry = Entry(*_ENTRY.unpack(value))
    if max(entry) > _MAX_NUMBER:
        raise lmdb.CorruptedError(f"an entry has the slot {entry.slot}, or a large generation")
    return entry


def _behind(cursor: lmdb.Cursor, after: bytes) -> Iterator[tuple[bytes, bytes]]:
    if after:
        if not cursor.set_range(after):
            return
        if cursor.key() == after and not cursor.next():
            return
    for key, value in cursor:
        yield bytes(key), bytes(value)
