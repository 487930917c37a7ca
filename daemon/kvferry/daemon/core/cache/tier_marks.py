"""Which blocks are in which tiers already, and how often each was used.

All of it belongs to the key of a block, and starts again when the block gets another one.
Tiers are numbered from 0, the fastest first. Called by keyed_blocks.py and tier_access.py, on the
event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvferry.proto.layout import Bools, Int64s

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

# Uses that are counted.
MAX_USES = 255
# A bit for each tier.
ALL_TIERS = 0xFF


class TierMarks:
    """Columns of a block table that only tiers need.

    min_uses: for each tier the use from which on a block is written; 0: nothing is written.
    """

    def __init__(self, capacity: int, min_uses: Sequence[int]) -> None:
        self._min_uses = tuple(min_uses)
        self._uses: Bytes = np.zeros(capacity, np.uint8)
        # The tiers that have each block, or to which it is on the way.
        self._written: Bytes = np.zeros(capacity, np.uint8)
        # The tiers into which each block was written before its last use. Says nothing about tiers
        # that `_written` does not have.
        self._used: Bytes = np.zeros(capacity, np.uint8)
        # Grows whenever there may be more to write.
        self.changes = 0

    def start(self, blocks: Int64s) -> None:
        """Blocks get other keys."""
        self._uses[blocks] = self._written[blocks] = 0

    def count_uses(self, blocks: Int64s) -> None:
        """Blocks are used, each at most once."""
        self._uses[blocks] = np.minimum(self._uses[blocks], MAX_USES - 1) + 1
        self._used[blocks] |= self._written[blocks]
        self.changes += 1

    def set_written(self, blocks: Int64s, tiers: Iterable[int]) -> None:
        """Blocks are in these tiers, or on the way there."""
        bits = sum(1 << tier for tier in tiers)
        self._written[blocks] |= bits
        self._used[blocks] &= ALL_TIERS ^ bits

    def set_unwritten(self, blocks: Int64s, tier: int) -> None:
        """Blocks are not in this tier."""
        self._written[blocks] &= ALL_TIERS ^ 1 << tier
        self.changes += 1

    def are_missing(self, blocks: Int64s, tier: int) -> Bools:
        """Which of these blocks should be in this tier, and are not."""
        min_uses = self._min_uses[tier]
        missing: Bools = self._written[blocks] & 1 << tier == 0
        return missing & (self._uses[blocks] >= min_uses) & (min_uses > 0)

    def are_used(self, blocks: Int64s, tier: int) -> Bools:
        """Which of these blocks are in this tier, or on the way there, and were used since."""
        used: Bools = self._written[blocks] & self._used[blocks] & 1 << tier != 0
        return used

    def count_missing(self, blocks: Int64s) -> list[int]:
        """How many of these blocks should be in each tier, and are not."""
        tiers = range(len(self._min_uses))
        return [int(np.count_nonzero(self.are_missing(blocks, tier))) for tier in tiers]
