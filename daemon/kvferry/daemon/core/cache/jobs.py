"""What a job holds of a cache, and what a cache reports about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.daemon.core.cache.block_contents import Parts
from kvferry.proto.layout import Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """A store: its keys in the order offered, the block of each, and the keys evicted for it.

    parts: the sub-blocks of keys that are stored in part.
    """

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    evicted: tuple[bytes, ...]
    parts: Parts = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Pins:
    """A load: the blocks of its keys, in their order, which stay in place until complete_load.

    Thousands of loads may be in flight: their keys would take five times the memory of all else.
    """

    blocks: Int64s


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Blocks by state.

    capacity = free + pending + ready + unverified + orphaned. Keys stored in part count as ready.
    """

    capacity: int
    free: int
    pending: int
    ready: int
    unverified: int
    pinned: int
    orphaned: int

    @property
    def used(self) -> int:
        """Blocks that are not free."""
        return self.capacity - self.free


def check_entries(keys: Sequence[bytes], blocks: Int64s, capacity: int) -> None:
    """Check the keys and blocks of an earlier daemon. Raises ValueError."""
    if not (different := len(set(keys))) == np.unique(blocks).size == len(keys):
        raise ValueError(
            f"{len(keys)} entries have {different} different keys in "
            f"{np.unique(blocks).size} different blocks"
        )
    if blocks.size and not 0 <= blocks.min() <= blocks.max() < capacity:
        raise ValueError(
            f"blocks {blocks.min()} to {blocks.max()} exceed the capacity of {capacity}"
        )
