"""What can be loaded of each block that has a key.

    state             sub-blocks                                          loadable   lookup
    ABSENT            no key                                              none       MISS
    PENDING           a store of it is on its way                         none       HIT_PENDING
    WHOLE             all are stored                                      all        HIT
    PART              some are stored                                     those      MISS
    UNVERIFIED        stored by an earlier daemon, checksum not compared  none       HIT_PENDING
    UNVERIFIED_PART   some are, by an earlier daemon                      none       MISS

A store that covers more replaces a key in part, and every store replaces an unverified key. Called
by cache.py, on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import Lookup
from kvferry.proto.layout import Bools, Int64s

# Some sub-blocks of a host block: (from, to).
Part: TypeAlias = tuple[int, int]
Parts: TypeAlias = Mapping[bytes, Part]
NO_PARTS: Parts = {}

ABSENT, PENDING, WHOLE, PART, UNVERIFIED, UNVERIFIED_PART = range(6)
_LOOKUPS = (
    Lookup.MISS,
    Lookup.HIT_PENDING,
    Lookup.HIT,
    Lookup.MISS,
    Lookup.HIT_PENDING,
    Lookup.MISS,
)


class BlockContents:
    def __init__(self, capacity: int) -> None:
        self._states = np.zeros(capacity, np.uint8)
        # Of blocks in part; takes memory only for those.
        self._parts = np.zeros((capacity, 2), np.int32)
        self._counts = [0] * len(_LOOKUPS)

    @property
    def pending(self) -> int:
        return self._counts[PENDING]

    @property
    def loadable(self) -> int:
        return self._counts[WHOLE] + self._counts[PART]

    @property
    def unverified(self) -> int:
        return self._counts[UNVERIFIED] + self._counts[UNVERIFIED_PART]

    @property
    def in_part(self) -> int:
        return self._counts[PART] + self._counts[UNVERIFIED_PART]

    def lookup(self, block: int) -> Lookup:
        return _LOOKUPS[self._states[block]]

    def part(self, block: int) -> Part | None:
        """The stored sub-blocks of a block in part; None for others."""
        if self._states[block] not in (PART, UNVERIFIED_PART):
            return None
        first, end = self._parts[block].tolist()
        return first, end

    def is_pending(self, blocks: Int64s) -> Bools:
        pending: Bools = self._states[blocks] == PENDING
        return pending

    def is_loadable(self, blocks: Int64s) -> Bools:
        """Whether blocks are loadable, in whole or in part."""
        states = self._states[blocks]
        loadable: Bools = (states == WHOLE) | (states == PART)
        return loadable

    def is_whole(self, blocks: Int64s) -> Bools:
        """Whether blocks are loadable as a whole."""
        whole: Bools = self._states[blocks] == WHOLE
        return whole

    def is_stored(self, blocks: Int64s) -> Bools:
        """Whether blocks are loadable or unverified."""
        stored: Bools = self._states[blocks] >= WHOLE
        return stored

    def stored_or_pending(self) -> Int64s:
        """All blocks that are not ABSENT."""
        return np.flatnonzero(self._states)

    def hits_among(self, blocks: Int64s) -> tuple[Int64s, Int64s]:
        """Those of these blocks that are a HIT, and those that are a HIT_PENDING."""
        states = self._states[blocks]
        return blocks[states == WHOLE], blocks[(states == PENDING) | (states == UNVERIFIED)]

    def hits_between(self, begin: int, end: int) -> tuple[Int64s, Int64s]:
        """The blocks of `begin` to `end` - 1 that are a HIT, and those that are a HIT_PENDING."""
        return self.hits_among(np.arange(begin, min(end, self._states.size)))

    def is_replaceable(self, block: int, part: Part | None) -> bool:
        """Whether a store replaces this block. part: the sub-blocks it stores; None for all."""
        state = self._states[block]
        if state in (UNVERIFIED, UNVERIFIED_PART):
            return True
        stored = self.part(block)
        if stored is None:
            return False
        return part is None or (part[0] <= stored[0] and stored[1] <= part[1] and part != stored)

    def replaceable_among(self, found: Sequence[int], parts: Sequence[Part | None]) -> list[int]:
        """The blocks of an offer that a store replaces. found: -1 for a key without a block."""
        if not (self.unverified or self.in_part):
            return []
        offered = zip(found, parts, strict=True)
        return [block for block, part in offered if block >= 0 and self.is_replaceable(block, part)]

    def set_pending(self, blocks: Int64s) -> None:
        self._set_states(blocks, PENDING)

    def set_stored(
        self, blocks: Int64s, parts: Sequence[Part | None], *, verified: bool = True
    ) -> None:
        """These blocks are stored. parts: what of each, if not all; empty if all are whole."""
        self._set_states(blocks, WHOLE if verified else UNVERIFIED)
        places = [place for place, part in enumerate(parts) if part is not None]
        if places:
            self._set_states(blocks[places], PART if verified else UNVERIFIED_PART)
            self._parts[blocks[places]] = [part for part in parts if part is not None]

    def mark_verified(self, blocks: Int64s) -> Int64s:
        """Mark blocks as verified, if they are unverified. Return those that are a HIT now."""
        whole: Int64s = blocks[self._states[blocks] == UNVERIFIED]
        self._set_states(whole, WHOLE)
        self._set_states(blocks[self._states[blocks] == UNVERIFIED_PART], PART)
        return whole

    def remove_blocks(self, blocks: Int64s) -> None:
        self._set_states(blocks, ABSENT)

    def check_integrity(self) -> None:
        counts = np.bincount(self._states, minlength=len(self._counts)).tolist()
        assert counts[1:] == self._counts[1:], "the states of blocks are counted wrong"

    def _set_states(self, blocks: Int64s, state: int) -> None:
        for before, count in enumerate(np.bincount(self._states[blocks]).tolist()):
            self._counts[before] -= count
        self._counts[state] += blocks.size
        self._states[blocks] = state


def not_loadable(contents: BlockContents, keys: Sequence[bytes], blocks: Sequence[int]) -> Refused:
    """The error for the first key that is not loadable. blocks: of each key, -1 if it has none."""
    for key, block in zip(keys, blocks, strict=True):
        one = np.array([block], np.int64)
        if block < 0:
            message = f"key {key.hex()} is not in the cache; treat it as a miss"
        elif contents.is_pending(one).all():
            message = f"key {key.hex()} is still being stored; load it when lookup says HIT"
        elif not contents.is_loadable(one).all():
            message = (
                f"key {key.hex()} is unverified since the daemon's restart; load it when "
                "lookup says HIT"
            )
        else:
            continue
        break
    return Refused(Code.KEY_ABSENT, message, key.hex())
