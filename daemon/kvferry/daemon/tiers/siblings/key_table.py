"""The keys of siblings, as 64-bit hashes in tables of fixed size in shared memory.

A sibling may have a million keys; as Python objects those of seven siblings take a gigabyte. A key
that is in a table by mistake costs one question to the sibling, or a store that is left out. If a
bucket is full, a key that is added replaces another, which is then not found there.

The process of the tier writes the tables, and the daemon reads them: it does not store what a
sibling has, as long as the process runs. A read beside a write finds some keys and others not,
which is harmless.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import xxhash

from kvferry.daemon.core.layout import Bools, Int64s
from kvferry.daemon.memory.shared_memory import free_file

# With a million keys a bucket has eight on average, and one in a thousand is full. 16 MiB.
BUCKETS, WAYS = 1 << 17, 16
TABLE_BYTES = BUCKETS * WAYS * 8
# Siblings times namespaces in use. A sibling beyond that is not used, and gets no resets.
MAX_TABLES = 64
# A page with a number per table: not 0 if the sibling's blocks can be copied now. Then the time at
# which the process has last shown that it runs, in seconds of the monotonic clock.
_HEAD_BYTES = mmap.PAGESIZE
# Seconds without such a sign after which the daemon finds no keys. It comes once per second.
RUNS_SECONDS = 3
# Memory that is neither written nor read takes none.
TABLES_BYTES = _HEAD_BYTES + MAX_TABLES * TABLE_BYTES
Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


def hash_keys(store: str, keys: Iterable[bytes]) -> Hashes:
    """The hashes of keys of a namespace's store; (n,). None is 0."""
    seed, digest = xxhash.xxh3_64_intdigest(store.encode()), xxhash.xxh3_64_intdigest
    hashes: Hashes = np.fromiter((digest(key, seed) for key in keys), np.uint64)
    hashes[hashes == 0] = 1
    return hashes


class KeyTable:
    """The hashes of the keys that one sibling has of one namespace.

    rows: (BUCKETS, WAYS), zeros; None: memory of its own. flag: (1,), see `is_active`.
    """

    def __init__(self, rows: Hashes | None = None, flag: Hashes | None = None) -> None:
        self._rows = np.zeros((BUCKETS, WAYS), np.uint64) if rows is None else rows
        self._flag = np.zeros(1, np.uint64) if flag is None else flag
        self.count = 0

    @property
    def is_active(self) -> bool:
        """Whether blocks with these keys can be copied now."""
        return bool(self._flag[0])

    @is_active.setter
    def is_active(self, active: bool) -> None:
        self._flag[0] = active

    def contains(self, hashes: Hashes) -> Bools:
        """Which of these are in the table; (n,)."""
        found: Bools = (self._rows[_buckets(hashes)] == hashes[:, None]).any(axis=1)
        return found

    def add(self, hashes: Hashes) -> None:
        left = np.unique(hashes)
        left = left[~self.contains(left)]
        # One key per bucket at a time: those of one bucket must not take the same place. Further
        # keys than a bucket has places are left out; a hostile sibling may send thousands.
        for _ in range(WAYS):
            if not left.size:
                break
            buckets, first = np.unique(_buckets(left), return_index=True)
            now, rows = left[first], self._rows[buckets]
            free = (rows == 0).any(axis=1)
            ways = np.where(free, (rows == 0).argmax(axis=1), _ways(now))
            self._rows[buckets, ways] = now
            self.count += int(np.count_nonzero(free))
            left = np.delete(left, first)

    def remove(self, hashes: Hashes) -> None:
        buckets = _buckets(hashes)
        places, ways = np.nonzero(self._rows[buckets] == hashes[:, None])
        self._rows[buckets[places], ways] = 0
        self.count -= len(set(zip(buckets[places].tolist(), ways.tolist(), strict=True)))

    def clear(self) -> None:
        if self.count:
            self._rows[:], self.count = 0, 0

    def replace_by(self, other: KeyTable) -> None:
        """Have the keys of another table, and no others."""
        self._rows[:], self.count = other._rows, other.count


class KeyTables:
    """All tables, in a memfd of TABLES_BYTES. The caller owns the descriptor.

    writable: for the process of the tier, which frees what an earlier one has written.
    """

    def __init__(self, descriptor: int, *, writable: bool = False) -> None:
        if writable:
            free_file(descriptor)
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        memory = mmap.mmap(descriptor, TABLES_BYTES, prot=access)
        self._flags = flags = np.frombuffer(memory, np.uint64, MAX_TABLES)
        self._shown = np.frombuffer(memory, np.float64, 1, offset=flags.nbytes)
        shape = MAX_TABLES, BUCKETS, WAYS
        rows = np.frombuffer(memory, np.uint64, offset=_HEAD_BYTES).reshape(shape)
        self.tables = [KeyTable(rows[at], flags[at : at + 1]) for at in range(MAX_TABLES)]

    def show_running(self) -> None:
        """Show the daemon that the process of the tier runs. The process's end."""
        self._shown[0] = time.monotonic()

    def find_held(self, store: str, keys: Sequence[bytes]) -> set[bytes]:
        """Those of these keys of a namespace's store that a sibling has. The daemon's end."""
        active = [self.tables[at] for at in np.flatnonzero(self._flags).tolist()]
        if not active or time.monotonic() - self._shown[0] > RUNS_SECONDS:
            return set()
        hashes = hash_keys(store, keys)
        held: Bools = np.logical_or.reduce([table.contains(hashes) for table in active])
        return {keys[place] for place in np.flatnonzero(held).tolist()}


def _buckets(hashes: Hashes) -> Int64s:
    return (hashes & np.uint64(BUCKETS - 1)).astype(np.int64)


def _ways(hashes: Hashes) -> Int64s:
    return (hashes >> np.uint64(60)).astype(np.int64)
