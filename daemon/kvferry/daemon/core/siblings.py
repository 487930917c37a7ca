"""What the core wants of siblings, the other daemons of the host: the port `Siblings`.

Their pools are mapped read-only (siblings/windows.py), so a search and a comparison are reads of
memory. Called by the core, on the event loop; nothing blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvferry.proto.keys import OffloadKey
from kvferry.proto.layout import Bools, Int64s


class NamespaceContents(NamedTuple):
    """What must agree for blocks of two namespaces to be exchangeable, and where the own ones are.

    namespace: its name. composition: of host blocks, not 0 (RegionRecord.composition). epoch: of
    the contents. block_bytes: of a host block. start: of the own region, in bytes in the own pool.
    """

    namespace: str
    composition: int
    epoch: int
    block_bytes: int
    start: int


class Siblings(Protocol):
    """rows: (4, n), of each block the number of its window, its offset from the start of the own
    pool, its number in the sibling's block table, and its version there."""

    @property
    def is_enabled(self) -> bool:
        """Whether blocks are exchanged at all."""

    @property
    def stores_once(self) -> bool:
        """Whether a store leaves out what a sibling has."""

    def have(self, contents: NamespaceContents) -> bool:
        """Whether any sibling has this namespace, with blocks that can be exchanged."""

    def find(self, contents: NamespaceContents, keys: Sequence[OffloadKey]) -> Int64s:
        """The rows of the keys' blocks. The window is -1 if no sibling has the key."""

    def unchanged(self, rows: Int64s) -> Bools:
        """Which blocks have not lost their contents since they had these versions; (n,)."""

    def hold(self, rows: Int64s) -> None:
        """A load reads these blocks: they stay mapped until `release`."""

    def release(self, rows: Int64s, block_bytes: int) -> None:
        """The load has ended. block_bytes: of each block; 0 if it has failed."""

    def note_uses(
        self, contents: NamespaceContents, rows: Int64s, keys: Sequence[OffloadKey]
    ) -> None:
        """These blocks were found or loaded. Their owners count that as a use, soon."""


class NoSiblings:
    """Satisfies Siblings: there are none."""

    is_enabled = stores_once = False

    def have(self, contents: NamespaceContents) -> bool:
        return False

    def find(self, contents: NamespaceContents, keys: Sequence[OffloadKey]) -> Int64s:
        return np.full((4, len(keys)), -1, np.int64)

    def unchanged(self, rows: Int64s) -> Bools:
        return np.zeros(rows.shape[1], np.bool_)

    def hold(self, rows: Int64s) -> None:
        """No row is found."""

    def release(self, rows: Int64s, block_bytes: int) -> None:
        """No row is found."""

    def note_uses(
        self, contents: NamespaceContents, rows: Int64s, keys: Sequence[OffloadKey]
    ) -> None:
        """No row is found."""


NO_SIBLINGS = NoSiblings()
