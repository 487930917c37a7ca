"""The story of a block table: the last transitions of its blocks, and why.

It explains a corrupt block, and a transition that must not happen. Event loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvferry.proto.layout import Bools, Int64s

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

# Transitions of one block each that a table keeps: 11 bytes each.
KEPT = 4096
# Steps of a story that a text has.
TOLD = 12
# In place of a block: all blocks of the table.
_ALL = -1


class IllegalTransition(Exception):
    """A block would enter a state that does not follow from its state: a fault of the daemon."""


class BlockStory:
    """states: their names, by number."""

    def __init__(self, states: Sequence[str], kept: int = KEPT) -> None:
        self._states = states
        self._blocks = np.zeros(kept, np.int64)
        self._before, self._after = np.zeros(kept, np.uint8), np.zeros(kept, np.uint8)
        self._causes: Bytes = np.zeros(kept, np.uint8)
        self._names: list[str] = []
        # Transitions so far.
        self._count = 0

    def add(self, blocks: Int64s, before: Bytes, after: int, cause: str) -> None:
        """Blocks go from these states, (n,), to another one."""
        kept = self._blocks.size
        blocks, before = blocks[-kept:], before[-kept:]
        places = (self._count + np.arange(blocks.size)) % kept
        self._blocks[places], self._before[places] = blocks, before
        self._after[places], self._causes[places] = after, self._cause_of(cause)
        self._count += blocks.size

    def add_for_all(self, cause: str) -> None:
        """Something that concerns all blocks."""
        self.add(np.array([_ALL]), np.zeros(1, np.uint8), 0, cause)

    def of(self, block: int) -> str:
        """What became of a block, as far as it is kept: "free > pending (reserved) > ..."."""
        kept = min(self._count, self._blocks.size)
        places = np.arange(self._count - kept, self._count) % self._blocks.size
        places = places[np.isin(self._blocks[places], (block, _ALL))]
        steps = list[str]()
        for place in places[-TOLD:].tolist():
            cause = self._names[self._causes[place]]
            if self._blocks[place] == _ALL:
                steps.append(cause)
                continue
            if not steps:
                steps.append(self._states[self._before[place]])
            steps.append(f"{self._states[self._after[place]]} ({cause})")
        return " > ".join(steps) or "nothing is known"

    def check(self, blocks: Int64s, before: Bytes, after: int, allowed: Bools) -> None:
        """Raise IllegalTransition unless blocks may enter state `after` from each of these.

        allowed: for each state, whether they may enter it from there.
        """
        wrong = np.flatnonzero(~allowed[before])
        if wrong.size:
            block, state = int(blocks[wrong[0]]), self._states[before[wrong[0]]]
            raise IllegalTransition(
                f"host block {block} is {state}, and cannot become {self._states[after]}; its "
                f"story: {self.of(block)}"
            )

    def _cause_of(self, cause: str) -> int:
        if cause not in self._names:
            self._names.append(cause)
        return self._names.index(cause)
