"""The device and the checksum process of a SiblingCore: they copy and read a pool in steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvferry.daemon.core.actions import BlocksCorrupted, BlocksVerified, CopyPlan
from kvferry.daemon.core.block_table import CHECKED, UNCHECKED, UNCOMMITTED
from kvferry.daemon.core.region import Region
from kvferry.proto.specs import Direction
from support.sibling_contents import Submission
from support.sibling_ports import PARTS


class Computed(NamedTuple):
    """Blocks that an engine has computed. number: of the namespace. numbers: what each has."""

    number: int
    composition: int
    epoch: int
    numbers: dict[bytes, int]


@dataclass(eq=False)
class Copy:
    """A transfer on the device. pieces: offset in the pool, key and part, in order of the copy.

    numbers: of a store, what each key gets; of a load, what each key and part has returned.
    """

    plan: CopyPlan
    session: str
    pieces: list[tuple[int, bytes, int]]
    computed: dict[bytes, int]
    submission: Submission | None = None
    loaded: dict[bytes, list[int]] = field(default_factory=dict)
    borrowed: int = 0
    copied: int = 0
    cancelled: bool = False


class SimulatedDevice:
    """Copies parts of blocks. pool: the address of the own pool."""

    def __init__(self, pool: int) -> None:
        self._pool = pool
        # Transfers in flight, by serial.
        self.copies: dict[int, Copy] = {}

    def may_copy(self, copy: Copy) -> bool:
        """Whether the device may copy for a transfer now."""
        plan = copy.plan
        return all(
            other.plan.serial > (plan.serial if is_same else plan.after)
            for other in self.copies.values()
            if other is not copy and other.plan.registration == plan.registration
            for is_same in [other.plan.direction is plan.direction]
        )

    def copy_piece(self, copy: Copy) -> None:
        """Copy one part of a block."""
        if copy.copied == len(copy.pieces) or copy.cancelled or not self.may_copy(copy):
            return
        offset, key, _ = copy.pieces[copy.copied]
        word = ctypes.c_uint64.from_address(self._pool + offset)
        copy.copied += 1
        if copy.plan.direction is Direction.STORE:
            word.value = copy.computed[key]
        else:
            copy.loaded.setdefault(key, []).append(int(word.value))

    def is_complete(self, copy: Copy) -> bool:
        """Whether a transfer has copied all of its parts, and is the next one to be reported."""
        return copy.copied == len(copy.pieces) and self.may_copy(copy)


class SimulatedChecksums:
    """Computes checksums of blocks. pool: the address of the pool. regions: returns those that are
    kept."""

    def __init__(self, pool: int, regions: Callable[[], Sequence[Region]]) -> None:
        self._pool, self._regions = pool, regions
        # Blocks whose checksums are being computed: region, blocks, versions, checksums.
        self._reading: list[tuple[Region, Any, Any, Any]] = []

    def begin_commit(self) -> None:
        """Compute the checksums of all blocks that have none."""
        for region in self._regions():
            blocks = region.table.find(*UNCOMMITTED)
            if blocks.size:
                versions = region.table.lines.versions(blocks)
                self._reading.append((region, blocks, versions, self._checksums(region, blocks)))

    def end_commit(self) -> None:
        for region, blocks, versions, checksums in self._reading:
            if not region.table.closed:
                region.table.commit(blocks, versions, checksums)
        self._reading = []

    def compare(self, most: int) -> Iterator[BlocksVerified | BlocksCorrupted]:
        """Compare blocks of an earlier daemon, or some others. most: of each region."""
        for region in self._regions():
            blocks = region.table.find(*UNCHECKED)[:most]
            if not blocks.size:
                blocks = region.table.find(*CHECKED)[:most]
            same = region.table.lines.checksums(blocks) == self._checksums(region, blocks)
            if same.any():
                yield BlocksVerified(region.owner, blocks[same])
            if not same.all():
                yield BlocksCorrupted(region.owner, blocks[~same])

    def _checksums(self, region: Region, blocks: Any) -> Any:
        sums = list[int]()
        for start in (self._pool + region.start + blocks * region.block_bytes).tolist():
            parts = range(start, start + region.block_bytes, region.block_bytes // PARTS)
            first, second = (ctypes.c_uint64.from_address(at).value for at in parts)
            sums.append(first + (second << 32))
        return np.array(sums, np.uint64)
