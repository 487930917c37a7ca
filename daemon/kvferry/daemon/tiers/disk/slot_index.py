"""The index of a namespace's keys on disk: which slot has the key with a hash of eight bytes.

    hashes    of all slots, by slot number; the slot table owns them
    part      one of 256 tables, by the first byte of the hash. A place has slot + 1, or 0 if it is
              empty. Linear probing from the place that the next bits of the hash give

Keys are not kept. A read compares its key with the header of the slot, so two keys with one hash
would be a miss. A part is at most two thirds full; then it is doubled, which takes milliseconds
with ten million keys. The caller holds the lock of the store.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvferry.daemon.core.layout import Int64s

Hashes = npt.NDArray[np.uint64]

PARTS = 256
# Bits of a hash after the first byte.
_BITS = 56
_AFTER_FIRST = (1 << _BITS) - 1
_LEAST_PLACES = 4
# A place has 32 bits.
MAX_SLOTS = (1 << 32) - 1


def hash_key(key: bytes) -> int:
    """The hash has a secret, so that no one can choose keys with one hash."""
    return hash(key) & 0xFFFF_FFFF_FFFF_FFFF


def hash_keys(keys: Iterable[bytes], count: int) -> Hashes:
    return np.fromiter(map(hash, keys), np.int64, count).view(np.uint64)


class SlotIndex:
    """The slot of each hash. The hash of a slot must not change while the index has the slot."""

    def __init__(self, hashes: Hashes) -> None:
        self._hashes, self._hash_of = hashes, hashes.data
        self._parts = [array("I", bytes(4 * _LEAST_PLACES)) for _ in range(PARTS)]
        self._counts = [0] * PARTS

    def __len__(self) -> int:
        return sum(self._counts)

    def find(self, key_hash: int) -> int | None:
        """The slot with a hash."""
        part = self._parts[key_hash >> _BITS]
        entry = part[self._locate(part, key_hash)]
        return entry - 1 if entry else None

    def insert(self, slot: int) -> int | None:
        """Insert a slot. Returns the one that had its hash; the index has that one no longer."""
        number = self._hash_of[slot] >> _BITS
        part = self._parts[number]
        at = self._locate(part, self._hash_of[slot])
        before, part[at] = part[at], slot + 1
        if before:
            return before - 1
        self._counts[number] += 1
        if 3 * self._counts[number] > 2 * len(part):
            entries = np.array(part, np.int64)
            self._parts[number] = self._filled(entries[entries > 0] - 1, 2 * len(part))
        return None

    def remove(self, slot: int) -> None:
        """Remove a slot, if the index has it."""
        number = self._hash_of[slot] >> _BITS
        part = self._parts[number]
        at = self._locate(part, self._hash_of[slot])
        if part[at] == slot + 1:
            self._counts[number] -= 1
            self._clear_place(part, at)

    def build(self, slots: Int64s) -> Int64s:
        """Index these slots alone. If some have the same hash, the last of them. Returns others."""
        order = np.argsort(self._hashes[slots], kind="stable")
        slots = slots[order]
        hashes = self._hashes[slots]
        is_last = np.ones(slots.size, np.bool_)
        is_last[:-1] = hashes[:-1] != hashes[1:]
        indexed = slots[is_last]
        numbers = (hashes[is_last] >> np.uint64(_BITS)).astype(np.int64)
        ends = np.searchsorted(numbers, np.arange(PARTS), side="right").tolist()
        start = 0
        for number, end in enumerate(ends):
            places = _LEAST_PLACES
            while 3 * (end - start) > 2 * places:
                places *= 2
            self._parts[number] = self._filled(indexed[start:end], places)
            self._counts[number] = end - start
            start = end
        return slots[~is_last]

    def _filled(self, slots: Int64s, places: int) -> array[int]:
        """A part with these slots. In the order of their places, each follows the one before it."""
        hashes = self._hashes[slots]
        order = np.argsort(hashes)
        bits = places.bit_length() - 1
        homes = ((hashes[order] << np.uint64(64 - _BITS)) >> np.uint64(64 - bits)).astype(np.int64)
        numbers = np.arange(slots.size)
        at = np.maximum.accumulate(homes - numbers) + numbers
        fits = at < places
        table = np.zeros(places, np.uint32)
        table[at[fits]] = slots[order][fits] + 1
        part = array("I", table.tobytes())
        for slot in slots[order][~fits].tolist():  # these continue at the start
            part[self._locate(part, self._hash_of[slot])] = slot + 1
        return part

    def _locate(self, part: array[int], key_hash: int) -> int:
        """The place of a hash, or the empty one where it would be."""
        at, last, hash_of = _home(part, key_hash), len(part) - 1, self._hash_of
        while (entry := part[at]) and hash_of[entry - 1] != key_hash:
            at = (at + 1) & last
        return at

    def _clear_place(self, part: array[int], gap: int) -> None:
        """Empty a place. Entries behind it that could not be found then move to it."""
        mask = len(part) - 1
        at = (gap + 1) & mask
        while entry := part[at]:
            if (at - _home(part, self._hash_of[entry - 1])) & mask >= (at - gap) & mask:
                part[gap], gap = entry, at
            at = (at + 1) & mask
        part[gap] = 0


def _home(part: array[int], key_hash: int) -> int:
    """The place from which a hash is searched."""
    return (key_hash & _AFTER_FIRST) >> (_BITS + 1 - len(part).bit_length())
