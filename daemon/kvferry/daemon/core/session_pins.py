"""The keys that one session has pinned, and how often each.

Keys that were pinned together share one Pins object of the cache, and are usually unpinned
together. If only some of them are unpinned, the object is split once. Called by namespaces.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from kvferry.daemon.core.cache.cache import Cache, Pins
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import MAX_KEYS

PINS_OF_A_BLOCK = 4
# A session may pin PINS_OF_A_BLOCK keys per block of its namespace, or this many.
LEAST_PINS = 4 * MAX_KEYS


class PinGroup:
    """The keys that one message pinned, until all of them are released."""

    def __init__(self, cache: Cache, keys: Sequence[OffloadKey]) -> None:
        """Pin the keys. Raises Refused (KEY_ABSENT) if a key is absent."""
        self._cache = cache
        self._shared_pins: Pins | None = cache.prepare_load(keys)
        self._single_pins: defaultdict[OffloadKey, list[Pins]] = defaultdict(list)

    def release_keys(self, keys: Sequence[OffloadKey]) -> None:
        """Release some of the remaining keys, each as often as it occurs in `keys`."""
        if self._shared_pins is not None:
            whole, self._shared_pins = self._shared_pins, None
            if len(keys) == len(whole.keys):
                self._cache.complete_load(whole)
                return
            for pins in self._cache.split_pins(whole):
                self._single_pins[pins.keys[0]].append(pins)
        for key in keys:
            self._cache.complete_load(self._single_pins[key].pop())


class SessionPins:
    """The pins of one session. The oldest pin of a key is released first."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._max_pins = max(LEAST_PINS, PINS_OF_A_BLOCK * cache.usage.capacity)
        # Number of pins, including those of keys that were absent.
        self._count = 0
        # The oldest pin of each key; None if the key was absent.
        self._oldest: dict[OffloadKey, PinGroup | None] = {}
        # Further pins of a key, in order.
        self._newer: defaultdict[OffloadKey, deque[PinGroup | None]] = defaultdict(deque)

    def pin_keys(self, keys: Sequence[OffloadKey]) -> None:
        """Pin the loadable keys. An absent key is counted, and its load will fail.

        Raises Refused (BUSY) and pins none if the session would have too many pins.
        """
        if not keys:
            return
        if self._count + len(keys) > self._max_pins:
            raise Refused(
                Code.BUSY,
                f"pinning {len(keys)} more keys exceeds the {self._max_pins} of a session, which "
                f"has pinned {self._count}; unpin some first",
                len(keys),
            )
        groups = self._create_groups(keys)
        self._count += len(keys)
        if len(groups) == len(keys) and self._oldest.keys().isdisjoint(groups):
            self._oldest |= groups
        else:
            for key in keys:
                self._add_pin(key, groups[key])

    def unpin_keys(self, keys: Sequence[OffloadKey]) -> None:
        """Unpin each key as often as it occurs.

        Raises Refused (NOT_PINNED) and unpins none if a key has fewer pins than that.
        """
        for key, times in Counter(keys).items():
            pinned = (key in self._oldest) + len(self._newer.get(key, ()))
            if pinned < times:
                message = (
                    f"key {key.hex()} is unpinned {times} times, but this session has pinned it "
                    f"{pinned} times; unpin a key as often as it was pinned"
                )
                raise Refused(Code.NOT_PINNED, message, key.hex())
        self._release_keys(keys)

    def unpin_all(self) -> None:
        """Release all pins."""
        newer = (key for key, pins in self._newer.items() for _ in pins)
        self._release_keys((*self._oldest, *newer))

    def _create_groups(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, PinGroup | None]:
        try:
            return dict.fromkeys(keys, PinGroup(self._cache, keys))
        except Refused:
            groups: dict[OffloadKey, PinGroup | None] = dict.fromkeys(keys)
            if ready := self._cache.ready_among(keys):
                groups |= dict.fromkeys(ready, PinGroup(self._cache, ready))
            return groups

    def _add_pin(self, key: OffloadKey, group: PinGroup | None) -> None:
        if key in self._oldest:
            self._newer[key].append(group)
        else:
            self._oldest[key] = group

    def _release_keys(self, keys: Sequence[OffloadKey]) -> None:
        self._count -= len(keys)
        released: defaultdict[PinGroup, list[OffloadKey]] = defaultdict(list)
        for key in keys:
            group = self._oldest.pop(key)
            if key in self._newer:
                newer = self._newer[key]
                self._oldest[key] = newer.popleft()
                if not newer:
                    del self._newer[key]
            if group is not None:
                released[group].append(key)
        for group, group_keys in released.items():
            group.release_keys(group_keys)
