"""Blocks that say of every eight bytes what they are.

A block is words of 64 bits. Each is the block's label, turned over with the word's own place, so
that whoever finds a word at a place reads off it whose it is, which block's, and which version's: a
wrong, a stale and a torn block are told apart by their bytes alone.

    word at place p = label ^ (p * ODD)      label = owner (16 bits), block (24), version (24)
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
    def of(cls, number: int) -> Label:
        return cls(number >> 2 * _BITS, number >> _BITS & _MASK, number & _MASK)


class Marker:
    """Makes and reads blocks of `words` words."""

    def __init__(self, words: int) -> None:
        with np.errstate(over="ignore"):
            self._places = np.arange(words, dtype=np.uint64) * _ODD

    def blocks(self, labels: Sequence[int]) -> Words:
        """The blocks of these labels: (blocks, words)."""
        return np.array(labels, dtype=np.uint64)[:, None] ^ self._places

    def wrong(self, blocks: Words, labels: Sequence[int]) -> list[str]:
        """What is wrong with blocks that should have these labels; nothing, as a rule."""
        found = blocks ^ self._places
        bad = np.flatnonzero((found != np.array(labels, dtype=np.uint64)[:, None]).any(axis=1))
        return [_told(labels[at], found[at]) for at in bad.tolist()]


def _told(label: int, found: Words) -> str:
    numbers, counts = np.unique(found, return_counts=True)
    order = np.argsort(counts)[::-1][:3]
    parts = [f"{counts[at]} words of {Label.of(int(numbers[at]))}" for at in order]
    return f"for {Label.of(label)} there are {', '.join(parts)}; {len(numbers)} labels in all"
