"""A stand-in for the port to siblings: what they have is written down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.daemon.core.layout import Bools, Int64s
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.proto.keys import OffloadKey

# The distance in bytes from the own pool to that of the sibling, whose window has number 1.
FAR = 1 << 40


class SiblingStandIn:
    """Satisfies Siblings. held: the block of each key that a sibling has. changed: numbers of
    blocks that have lost their contents."""

    is_enabled = stores_once = True

    def __init__(self, *keys: OffloadKey) -> None:
        self.held = {key: number for number, key in enumerate(keys)}
        self.changed = set[int]()
        self.holds = self.loaded = 0
        self.contents: NamespaceContents | None = None
        self.used: list[tuple[OffloadKey, ...]] = []

    def have(self, contents: NamespaceContents) -> bool:
        return bool(self.held)

    def find(self, contents: NamespaceContents, keys: Sequence[OffloadKey]) -> Int64s:
        self.contents = contents
        rows = np.full((4, len(keys)), -1, np.int64)
        for place, key in enumerate(keys):
            if (block := self.held.get(key, -1)) >= 0:
                rows[:, place] = 1, FAR + block * contents.block_bytes, block, 5
        return rows

    def unchanged(self, rows: Int64s) -> Bools:
        return ~np.isin(rows[2], list(self.changed))

    def hold(self, rows: Int64s) -> None:
        self.holds += rows.shape[1]

    def release(self, rows: Int64s, block_bytes: int) -> None:
        self.holds -= rows.shape[1]
        self.loaded += rows.shape[1] * block_bytes

    def note_uses(
        self, contents: NamespaceContents, rows: Int64s, keys: Sequence[OffloadKey]
    ) -> None:
        assert rows.shape == (4, len(keys))
        self.used.append(tuple(keys))
