"""Which blocks are in a tier already, and how often each was used.

A mark and a count belong to the key of a block: both start again when the block gets another one.
Called by keyed_blocks.py and tier_access.py, on the event loop.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kvferry.proto.layout import Int64s

Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Uses: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

# Uses that are counted.
MAX_USES = 255


class WriteMarks:
    def __init__(self, capacity: int) -> None:
        self._uses: Uses = np.zeros(capacity, np.uint8)
        # In a tier, or on the way there.
        self._done: Mask = np.zeros(capacity, np.bool_)
        # Whether there may be more to write than at the last `set_unchanged`.
        self.changed = True

    def set_unchanged(self) -> None:
        """There is nothing to write, until something changes."""
        self.changed = False

    def start(self, blocks: Int64s) -> None:
        """Blocks get other keys."""
        self._uses[blocks] = 0
        self._done[blocks] = False
        self.changed = True

    def count_uses(self, blocks: Int64s) -> None:
        """Blocks are used, each at most once."""
        self._uses[blocks] = np.minimum(self._uses[blocks], MAX_USES - 1) + 1
        self.changed = True

    def set_done(self, blocks: Int64s) -> None:
        """Blocks are in a tier, or on the way there."""
        self._done[blocks] = True

    def set_open(self, blocks: Int64s) -> None:
        """Blocks are in no tier."""
        self._done[blocks] = False
        self.changed = True

    def are_open(self, blocks: Int64s, min_uses: int) -> Mask:
        """Which of these blocks are in no tier, and were used at least this often."""
        is_open: Mask = ~self._done[blocks] & (self._uses[blocks] >= min_uses)
        return is_open
