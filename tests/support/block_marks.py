"""Blocks in which every eight bytes state what they belong to.

A block is an array of 64-bit words. Each word is the block's label, combined with the word's
position. So each word shows which owner, block and version it was written for, and a wrong, a stale
and a torn block can be told apart by their bytes.

    word at position p = label ^ (p * ODD)      label = owner (16 bits), block (24), version (24)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
WORD = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)
_BITS = 24
_MASK = (1 << _BITS) - 1


@dataclass(frozen=True, slots=True)
class Label:
    owner: int
    block: int
    version: int

    @property
    def number(self) -> int:
        return self.owner << 2 * _BITS | (self.block & _MASK) << _BITS | (self.version & _MASK)

    @classmethod
    def from_number(cls, number: int) -> Label:
        return cls(number >> 2 * _BITS, number >> _BITS & _MASK, number & _MASK)


class Marker:
    """Makes and compares blocks of `words` words."""

    def __init__(self, words: int) -> None:
        with np.errstate(over="ignore"):
            self._positions = np.arange(words, dtype=np.uint64) * _ODD

    def make_blocks(self, labels: Sequence[int]) -> Words:
        """The blocks of these labels: (blocks, words)."""
        return np.array(labels, dtype=np.uint64)[:, None] ^ self._positions

    def find_errors(self, blocks: Words, labels: Sequence[int]) -> list[str]:
        """Describe each block that differs from what its label requires."""
        found = blocks ^ self._positions
        bad = np.flatnonzero((found != np.array(labels, dtype=np.uint64)[:, None]).any(axis=1))
        return [_describe(labels[at], found[at]) for at in bad.tolist()]


def _describe(label: int, found: Words) -> str:
    numbers, counts = np.unique(found, return_counts=True)
    order = np.argsort(counts)[::-1][:3]
    parts = [f"{counts[at]} words of {Label.from_number(int(numbers[at]))}" for at in order]
    return f"expected {Label.from_number(label)}, found {', '.join(parts)}; {len(numbers)} labels"
