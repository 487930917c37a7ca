"""Which slots of a namespace are free, and which were used least recently.

Arrays over all slots that the namespace may ever have; the kernel allocates their pages when they
are first written. The caller holds the lock of the store.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.daemon.core.layout import Bools, Int64s

# Slots sampled for each one that is evicted: on average the victim is among the coldest 6 %.
SAMPLED = 16

_ABSENT, _FREE, _BUSY, _USED, _RETIRED = range(5)


class SlotTable:
    """`max_slots` slots for keys of `key_bytes`. A slot is absent until its slab is added.

    absent -> free -> busy (being written) -> used -> free; retired if the device failed.
    """

    def __init__(self, max_slots: int, key_bytes: int) -> None:
        self._states = np.zeros(max_slots, np.uint8)
        self._readers = np.zeros(max_slots, np.uint16)
        self._stamps = np.zeros(max_slots, np.uint64)
        self._keys = np.zeros(max_slots, f"V{key_bytes}")
        self._free: list[int] = []
        # No slot from here on was ever added.
        self._end = 0
        self._clock = 0
        self._random = np.random.default_rng()
        self.used = self.retired = 0

    @property
    def capacity(self) -> int:
        return self._states.size

    def add_slots(self, slots: range) -> None:
        """Add the slots of a new slab."""
        self._states[slots.start : slots.stop] = _FREE
        self._readers[slots.start : slots.stop] = 0
        self._free += reversed(slots)
        self._end = max(self._end, slots.stop)

    def remove_slots(self, slots: range) -> None:
        """Remove the slots of a slab. None of them may be in use by a reader or writer."""
        states = self._states[slots.start : slots.stop]
        self.used -= int(np.count_nonzero(states == _USED))
        self.retired -= int(np.count_nonzero(states == _RETIRED))
        states[:] = _ABSENT
        self._drop_from_free()

    def take_free(self, count: int) -> list[int]:
        """Up to `count` free slots; they are busy from now on."""
        cut = max(0, len(self._free) - count)
        taken, self._free = self._free[cut:][::-1], self._free[:cut]
        self._states[taken] = _BUSY
        return taken

    def take_victims(self, count: int) -> list[tuple[int, bytes]]:
        """Up to `count` of the least recently used slots, with their keys; busy from now on."""
        taken: list[tuple[int, bytes]] = []
        for _ in range(4):
            if len(taken) == count or not self.used:
                break
            sample = np.unique(self._random.integers(0, self._end, SAMPLED * (count - len(taken))))
            sample = sample[(self._states[sample] == _USED) & (self._readers[sample] == 0)]
            coldest = sample[np.argsort(self._stamps[sample], kind="stable")]
            victims = coldest[: count - len(taken)]
            self._states[victims] = _BUSY
            self.used -= victims.size
            taken += [(int(slot), self._keys[slot].tobytes()) for slot in victims]
        return taken

    def occupy_slot(self, slot: int, key: bytes) -> None:
        """A busy slot was written."""
        self._states[slot] = _USED
        self._keys[slot] = np.void(key)
        self.used += 1
        self.touch_slot(slot)

    def restore_slots(self, keys: Sequence[bytes], slots: Int64s, stamps: Int64s) -> Bools:
        """Occupy free slots that were found written at start. Returns which of them were free.

        stamps: orders their uses. `end_restore` must follow.
        """
        good: Bools = (slots < self._end) & (
            self._states[np.minimum(slots, self._end - 1)] == _FREE
        )
        _, first = np.unique(slots, return_index=True)
        once = np.zeros(slots.size, np.bool_)
        once[first] = True
        good &= once
        self._keys[slots[good]] = np.frombuffer(b"".join(keys), self._keys.dtype)[good]
        self._stamps[slots[good]] = stamps[good]
        self._states[slots[good]] = _USED
        self.used += int(good.sum())
        self._clock = max(self._clock, int(stamps.max(initial=0)))
        return good

    def end_restore(self) -> None:
        self._drop_from_free()

    def free_slot(self, slot: int) -> None:
        """A busy or used slot is no longer needed."""
        self.used -= int(self._states[slot] == _USED)
        self._states[slot] = _FREE
        self._free.append(slot)

    def retire_slot(self, slot: int) -> None:
        """The device failed to read or write this busy or used slot."""
        self.used -= int(self._states[slot] == _USED)
        self.retired += int(self._states[slot] != _RETIRED)
        self._states[slot] = _RETIRED

    def restore_retired(self, slots: Sequence[int]) -> None:
        """Retire slots that were retired before the start."""
        for slot in slots:
            if slot < self._end and self._states[slot] == _FREE:
                self.retire_slot(slot)

    def keys_in(self, slots: range) -> list[tuple[bytes, int]]:
        """The keys of the used ones of these slots."""
        used = np.flatnonzero(self._states[slots.start : slots.stop] == _USED) + slots.start
        return [(self._keys[slot].tobytes(), slot) for slot in used.tolist()]

    def holds(self, slot: int, key: bytes) -> bool:
        return bool(self._states[slot] == _USED) and self._keys[slot].tobytes() == key

    def begin_read(self, slot: int) -> None:
        self._readers[slot] += 1

    def end_read(self, slot: int) -> None:
        self._readers[slot] -= 1

    def touch_slot(self, slot: int) -> None:
        self._clock += 1
        self._stamps[slot] = self._clock

    def in_use(self, slots: range) -> bool:
        """Whether one of these slots is being read or written."""
        part = slice(slots.start, slots.stop)
        return bool(self._readers[part].any() or (self._states[part] == _BUSY).any())

    def heat(self, slots: range) -> float:
        """The mean stamp of the used ones of these slots."""
        part = slice(slots.start, slots.stop)
        stamps = self._stamps[part][self._states[part] == _USED]
        return float(stamps.mean()) if stamps.size else 0.0

    def _drop_from_free(self) -> None:
        """Each slot once: one that was restored and then freed is in the list twice."""
        free = np.unique(np.array(self._free, np.int64))[::-1]
        self._free = free[self._states[free] == _FREE].tolist()
