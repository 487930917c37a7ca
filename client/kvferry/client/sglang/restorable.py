"""Which prefixes of a request can be restored, from the pages that are found of each source."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Window(NamedTuple):
    """Of a source of which only the last pages of a prefix are needed: which pages are found, and
    how many are needed. A Mamba state is a window of one page: that of the prefix's end."""

    found: Sequence[bool]
    pages: int


def restorable_lengths(pages: int, windows: Sequence[Window] = ()) -> list[int]:
    """The lengths, in pages, of all prefixes that can be restored whole.

    pages: how many are found of the full attention layers, from the first on.
    """
    lengths: Sequence[int] = range(1, pages + 1)
    for found, needed in windows:
        sums = [0, *accumulate(map(bool, found))]
        lengths = [n for n in lengths if sums[n] - sums[max(0, n - needed)] == min(n, needed)]
    return [*lengths]
