"""The keys of siblings, as 64-bit hashes in tables of fixed size in shared memory.

A sibling may have a million keys; as Python objects those of seven siblings take a gigabyte. A key
that is in a table by mistake costs one question to the sibling, or a store that is left out. If a
bucket is full, a key that is added replaces another, which is then not found there.

The process of the tier writes the tables (KeyTables), and the daemon reads them (HeldKeys): it does
not store what a sibling has, as long as the process runs. A read beside a write finds some keys and
others not, which is harmless.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import xxhash

from kvferry.daemon.core.layout import Bools, Int64s
from kvferry.daemon.memory.foreign_memory import WORD, ForeignMemory, SharedWords
from kvferry.daemon.memory.shared_memory import free_file

# With a million keys a bucket has eight on average, and one in a thousand is full. 16 MiB.
BUCKETS, WAYS = 1 << 17, 16
TABLE_BYTES = BUCKETS * WAYS * 8
# Siblings times namespaces in use. A sibling beyond that is not used, and gets no resets.
MAX_TABLES = 64
# A page with a number per table: not 0 if the sibling's blocks can be copied now. Then the time at
# which the process has last shown that it runs, in nanoseconds of the monotonic clock.
_HEAD_BYTES, _SHOWN_AT = mmap.PAGESIZE, MAX_TABLES * 8
# Seconds without such a sign after which the daemon finds no keys. It comes once per second.
RUNS_SECONDS = 3
# Memory that is neither written nor read takes none.
TABLES_BYTES = _HEAD_BYTES + MAX_TABLES * TABLE_BYTES
_BUCKET = np.dtype((np.uint64, (WAYS,)))
Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


def hash_keys(store: str, keys: Iterable[bytes]) -> Hashes:
    """The hashes of keys of a namespace's store; (n,). None is 0."""
    seed, digest = xxhash.xxh3_64_intdigest(store.encode()), xxhash.xxh3_64_intdigest
    hashes: Hashes = np.fromiter((digest(key, seed) for key in keys), np.uint64)
    hashes[hashes == 0] = 1
    return hashes


class KeyTable:
    """The hashes of the keys that one sibling has of one namespace.

    rows: (BUCKETS, WAYS), zeros; None: memory of its own. show: called when `is_active` is set.
    """

    def __init__(
        self, rows: Hashes | None = None, show: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._rows = np.zeros((BUCKETS, WAYS), np.uint64) if rows is None else rows
        self._is_active, self._show = False, show
        self.count = 0

    @property
    def is_active(self) -> bool:
        """Whether blocks with these keys can be copied now."""
        return self._is_active

    @is_active.setter
    def is_active(self, active: bool) -> None:
        self._is_active = active
        self._show(active)

    def contains(self, hashes: Hashes) -> Bools:
        """Which of these are in the table; (n,)."""
        return _have(self._rows[_buckets(hashes)], hashes)

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
    """The tables as the process of the tier writes them, in a memfd of TABLES_BYTES.

    Frees what an earlier process has written. The caller owns the descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        free_file(descriptor)
        memory = mmap.mmap(descriptor, TABLES_BYTES)
        flags = SharedWords(memory, 0, MAX_TABLES)
        self._shown = SharedWords(memory, _SHOWN_AT, 1)
        rows = np.frombuffer(memory, _BUCKET, offset=_HEAD_BYTES).reshape(-1, BUCKETS, WAYS)
        self.tables = [KeyTable(rows[at], partial(flags.write, at)) for at in range(MAX_TABLES)]

    def show_running(self) -> None:
        """Show the daemon that the process of the tier runs."""
        self._shown.write(0, time.monotonic_ns())


class HeldKeys:
    """The tables as the daemon reads them. The caller owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        memory = ForeignMemory(descriptor, "the memory for keys of siblings", TABLES_BYTES)
        self._flags = memory.column(WORD, 0, MAX_TABLES)
        self._shown = memory.column(WORD, _SHOWN_AT, 1)
        self._buckets = memory.column(_BUCKET, _HEAD_BYTES, MAX_TABLES * BUCKETS)

    def find(self, store: str, keys: Sequence[bytes]) -> set[bytes]:
        """Those of these keys of a namespace's store that a sibling has."""
        active = np.flatnonzero(self._flags.copy(_ALL_TABLES)).tolist()
        silent_ns = time.monotonic_ns() - self._shown.read()
        if not active or silent_ns > RUNS_SECONDS * 1_000_000_000:
            return set()
        hashes = hash_keys(store, keys)
        buckets, held = _buckets(hashes), np.zeros(hashes.size, np.bool_)
        for table in active:
            held |= _have(self._buckets.copy(buckets + table * BUCKETS), hashes)
        return {keys[place] for place in np.flatnonzero(held).tolist()}


_ALL_TABLES = np.arange(MAX_TABLES)


def _have(buckets: Hashes, hashes: Hashes) -> Bools:
    """Which of some hashes are in their buckets, (n, WAYS)."""
    found: Bools = (buckets == hashes[:, None]).any(axis=1)
    return found


def _buckets(hashes: Hashes) -> Int64s:
    return (hashes & np.uint64(BUCKETS - 1)).astype(np.int64)


def _ways(hashes: Hashes) -> Int64s:
    return (hashes >> np.uint64(60)).astype(np.int64)
