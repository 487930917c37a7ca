"""The blocks that a job holds in a cache, and the figures that a cache reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvferry.daemon.core.block_lines import Part
from kvferry.proto.layout import Int64s

Parts: TypeAlias = Mapping[bytes, Part]


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
