"""How host blocks are composed: of which pages, and of how many GPU blocks.

Host blocks of a namespace that are composed otherwise cannot be loaded, so each composition has
stores of its own in the tiers.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from kvferry.proto.layout import LayoutArrays


class Composition(NamedTuple):
    """pages: the bytes of each page of a GPU block in host memory, by KV cache group. factor: the
    number of GPU blocks in a host block."""

    pages: tuple[tuple[int, ...], ...]
    factor: int

    @classmethod
    def of_layout(cls, arrays: LayoutArrays) -> Composition:
        groups = np.split(arrays.host_pages, arrays.starts[1:-1])
        pages = tuple(tuple(group.tolist()) for group in groups)
        return cls(pages, arrays.block_size_factor)

    @property
    def digest(self) -> str:
        """For the names of stores (store_name.py): 16 hexadecimal digits."""
        parts = repr((self.pages, self.factor)).encode()
        return hashlib.blake2b(parts, digest_size=8).hexdigest()

    @property
    def number(self) -> int:
        """For block tables and siblings: 63 bits, not 0."""
        return int(self.digest, 16) >> 1 or 1

    def describe(self) -> str:
        """A short text, as a layout may have thousands of pages."""
        groups = [f"{list(group[:4])}{'...' if len(group) > 4 else ''}" for group in self.pages[:4]]
        more = ", ..." if len(self.pages) > 4 else ""
        return f"{self.factor} GPU blocks of pages {', '.join(groups)}{more}"
