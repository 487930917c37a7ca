"""The slots of a namespace in memory: their states, which key is in which, and which was used last.

Arrays over all slots that the namespace may ever have; the kernel allocates their pages when they
are first written. A key takes 29 bytes at most: 8 of its hash, 8 of the stamp, 1 of the state, and
6 to 12 of the index. The caller holds the lock of the store.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.daemon.tiers.disk.hints import FREE, RETIRED, UNKNOWN, Hints
from kvferry.daemon.tiers.disk.slab import MAX_GENERATION
from kvferry.daemon.tiers.disk.slot_index import SlotIndex, hash_key, hash_keys

# Slots sampled for each one that is evicted: on average the victim is among the coldest 6 %.
SAMPLED = 16

_ABSENT, _UNKNOWN, _FREE, _BUSY, _USED, _RETIRED = range(6)


class Entry(NamedTuple):
    """A key in a slot. stamp: the later one was written or read more recently."""

    slot: int
    key: bytes
    stamp: int


class SlotTable:
    """`max_slots` slots, each absent until its slab is added.

    absent -> free -> busy (being written) -> used -> free; retired if the device failed; at start
    also unknown, until its header was read.
    """

    def __init__(self, max_slots: int) -> None:
        self._states = np.zeros(max_slots, np.uint8)
        self._stamps = np.zeros(max_slots, np.int64)
        self._hashes = np.zeros(max_slots, np.uint64)
        self._index = SlotIndex(self._hashes)
        # No slot from this one on was ever added.
        self._end = 0
        self._free = array("q")
        # Reads in progress, by slot.
        self._readers: dict[int, int] = {}
        self._random = np.random.default_rng()
        # The latest stamp.
        self.clock = 0
        self.retired = 0

    @property
    def used(self) -> int:
        return len(self._index)

    def find(self, keys: Sequence[bytes]) -> list[int | None]:
        """The slot of each key."""
        return [self._index.find(hash_key(key)) for key in keys]

    # Slabs

    def add_slots(self, slots: range) -> None:
        """Add the free slots of a new slab."""
        self._add(slots, _FREE)
        self._free.extend(reversed(slots))

    def restore_slots(self, slots: range, hints: Hints) -> None:
        """Add the slots of a slab, with their hints. Call `end_restore` after the last slab.

        The generation of a block is its first stamp.
        """
        self._add(slots, _USED)
        part, generations = slice(slots.start, slots.stop), hints.generations
        for generation, state in ((FREE, _FREE), (RETIRED, _RETIRED), (UNKNOWN, _UNKNOWN)):
            self._states[part][generations == generation] = state
        self._stamps[part] = generations
        self._hashes[part] = hash_keys(hints.keys, len(slots))
        free = np.flatnonzero(generations == FREE)[::-1] + slots.start
        self._free.frombytes(free.astype(np.int64).tobytes())
        self.retired += int(np.count_nonzero(generations == RETIRED))
        self.clock = max(self.clock, int(generations.max()))

    def end_restore(self) -> list[int]:
        """Free each slot whose key is in another one, too, with a later stamp. Returns these."""
        used = np.flatnonzero(self._states[: self._end] == _USED)
        used = used[np.argsort(self._stamps[used], kind="stable")]
        stale: list[int] = self._index.build(used).tolist()
        for slot in stale:
            self.free_slot(slot)
        return stale

    def remove_slots(self, slots: range) -> int:
        """Remove the slots of a slab, none of which is in use. Returns how many keys they had."""
        part = slice(slots.start, slots.stop)
        used = np.flatnonzero(self._states[part] == _USED) + slots.start
        for slot in used.tolist():
            self._index.remove(slot)
        self.retired -= int(np.count_nonzero(self._states[part] == _RETIRED))
        self._add(slots, _ABSENT)
        free = np.array(self._free, np.int64)
        self._free = array("q", free[(free < slots.start) | (free >= slots.stop)].tobytes())
        return used.size

    # Slots

    def take_free(self, count: int) -> list[int]:
        """Up to `count` free slots; they are busy from now on."""
        cut = max(0, len(self._free) - count)
        taken = self._free[cut:].tolist()[::-1]
        del self._free[cut:]
        self._states[taken] = _BUSY
        return taken

    def take_victims(self, count: int) -> list[int]:
        """Up to `count` of the least recently used slots, which are busy from now on."""
        taken: list[int] = []
        for _ in range(4):
            if len(taken) == count or not self.used:
                break
            wanted = count - len(taken)
            sample = np.unique(self._random.integers(0, self._end, SAMPLED * wanted))
            sample = sample[self._states[sample] == _USED]
            coldest = sample[np.argsort(self._stamps[sample], kind="stable")].tolist()
            for slot in [each for each in coldest if each not in self._readers][:wanted]:
                taken.append(slot)
                self._vacate(slot, _BUSY)
        return taken

    def keep_victim(self, slot: int) -> None:
        """A slot of `take_victims` was not written: it has its key as before."""
        self._states[slot] = _USED
        self._index.insert(slot)

    def occupy_slot(self, entry: Entry) -> int | None:
        """A slot has a block. Returns the slot that had the key before; it is still used."""
        slot, key, stamp = entry
        self._states[slot], self._stamps[slot] = _USED, stamp
        self._hashes[slot] = hash_key(key)
        self.clock = max(self.clock, stamp)
        return self._index.insert(slot)

    def is_latest(self, entry: Entry) -> bool:
        """Whether the table does not have this key with a later stamp."""
        slot = self._index.find(hash_key(entry.key))
        return slot is None or bool(self._stamps[slot] < entry.stamp)

    def free_slot(self, slot: int) -> None:
        self._vacate(slot, _FREE)
        self._free.append(slot)

    def retire_slot(self, slot: int) -> None:
        """The device failed to read or write this busy or used slot."""
        self.retired += int(self._states[slot] != _RETIRED)
        self._vacate(slot, _RETIRED)

    def unknown_slots(self, count: int) -> list[int]:
        """Up to `count` slots whose headers must be read."""
        states = self._states[: self._end]
        found: list[int] = np.flatnonzero(states == _UNKNOWN)[:count].tolist()
        return found

    # Use

    def begin_read(self, slot: int) -> None:
        self._readers[slot] = self._readers.get(slot, 0) + 1

    def end_read(self, slot: int) -> None:
        self._readers[slot] -= 1
        if not self._readers[slot]:
            del self._readers[slot]

    def next_stamp(self) -> int:
        # The last one only after damage; then the order of eviction is lost.
        self.clock = min(self.clock + 1, MAX_GENERATION)
        return self.clock

    def touch_slot(self, slot: int) -> None:
        self._stamps[slot] = self.next_stamp()

    def in_use(self, slots: range) -> bool:
        """Whether one of these slots is being read or written."""
        part = slice(slots.start, slots.stop)
        reading = any(slot in slots for slot in self._readers)
        return reading or bool((self._states[part] == _BUSY).any())

    def is_known(self, slots: range) -> bool:
        """Whether no header of these slots must be read."""
        return not (self._states[slots.start : slots.stop] == _UNKNOWN).any()

    def heat(self, slots: range) -> float:
        """The mean stamp of the used ones of these slots."""
        part = slice(slots.start, slots.stop)
        stamps = self._stamps[part][self._states[part] == _USED]
        return float(stamps.mean()) if stamps.size else 0.0

    def _add(self, slots: range, state: int) -> None:
        self._end = max(self._end, slots.stop)
        self._states[slots.start : slots.stop] = state

    def _vacate(self, slot: int, state: int) -> None:
        """The slot does not have its key from now on."""
        if self._states[slot] == _USED:
            self._index.remove(slot)
        self._states[slot] = state
