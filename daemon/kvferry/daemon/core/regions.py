"""Regions: the owners of the bytes of the host pool.

A region belongs to the name of an engine or to a namespace, not to a process. When all of its
sessions have ended it is deserted and keeps its bytes; an owner with the same name, contents
(layout or fingerprint) and user gets it back. A deserted region takes no space from others:

    a new region of a given size      frees the longest deserted regions, as few as possible, and
                                      lies in the smallest free range that is large enough
    one that wants all that is free   is the largest range between present regions, and frees the
                                      deserted ones in it

A region is contiguous. The daemon's own blocks at the front of the pool are in no region. Called by
the core, on the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from kvferry.daemon.core.actions import RegionChange, RegionCreated, RegionFreed, RegionUpdated
from kvferry.daemon.core.block_lines import UseClock
from kvferry.daemon.core.block_states import BlockStates
from kvferry.daemon.core.pool_ranges import ALIGNMENT, PoolRanges
from kvferry.daemon.core.records import Contents, RecoveredRegion, RegionOwner, RegionRecord
from kvferry.daemon.core.region import Region
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.opening import MAX_HOST_BLOCKS, check_host_bytes

# Each region's block table takes descriptors: a daemon with few of them allows fewer regions.
MAX_REGIONS = 1024


class Regions:
    """The regions of the host pool; deserted ones in the order in which they became deserted, those
    of an earlier daemon in the order of their last use.

    own_bytes: at the front of the pool, for the daemon's own blocks. most: number of regions.
    """

    def __init__(self, pool_bytes: int, own_bytes: int = 0, most: int = MAX_REGIONS) -> None:
        self.pool_bytes = pool_bytes
        self.own_bytes = own_bytes
        self._max_regions = most
        self._regions: dict[RegionOwner, Region] = {}
        # Called with each region that was freed.
        self.on_freed: Callable[[Region], None] = _ignore
        self._changes: list[RegionChange] = []
        self._clock = UseClock()
        self._ranges = PoolRanges(own_bytes, pool_bytes)

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(region.nbytes for region in self._regions.values())

    def get(self, owner: RegionOwner) -> Region | None:
        return self._regions.get(owner)

    def is_owned(self, region: Region) -> bool:
        """Whether a region still belongs to its owner."""
        return self._regions.get(region.owner) is region

    def shortfall(self, region: Region) -> str:
        """Why an owner that wanted all that is free has less than the pool; empty if it has all."""
        others = [other for other in self if other.present and other is not region]
        return self._ranges.shortfall(region, others)

    def assign_region(
        self, owner: RegionOwner, contents: Contents, nbytes: int | None, uid: int | None = None
    ) -> tuple[Region, bool]:
        """Give `owner` a region; return it, and whether it is the one that the owner had before.

        nbytes: its size; None for all that no present region has, in one piece, or the region that
        the owner had before. A region that another user left under the same name is not given back.
        Raises Refused (POOL_FULL, BAD_LAYOUT); then nothing has changed.
        """
        block = contents.host_block_bytes
        if nbytes is not None:
            check_host_bytes(nbytes, block)
        old = self._regions.get(owner)
        same = old is not None and old.contents == contents and old.uid == uid
        if old is not None and same and nbytes in (None, old.nbytes):
            old.present = True
            return old, True
        start, size = self._find_range(owner, block, nbytes)
        check_host_bytes(size, block)
        region = Region(owner, contents, start, size, uid=uid)
        region.table.lines.use_clock(self._clock)
        if isinstance(contents, LayoutArrays):
            region.states = BlockStates.for_layout(contents, region.table)
        if owner not in self._regions:
            self._check_count()
        for other in self._overlapping(owner, start, start + size):
            self.free_region(other.owner)
        self._regions[owner] = region
        return region, False

    def mark_present(self, owner: RegionOwner) -> None:
        """Do not free a region, until `mark_deserted`."""
        self._regions[owner].present = True

    def mark_deserted(self, owner: RegionOwner) -> None:
        """Mark a region as deserted. It keeps its bytes until another owner needs the memory."""
        region = self._regions.pop(owner)
        region.present = False
        self._regions[owner] = region

    def free_region(self, owner: RegionOwner) -> None:
        """Free an owner's region with its contents."""
        region = self._regions.pop(owner)
        region.table.closed = True
        self._changes.append(RegionFreed(owner))
        self.on_freed(region)

    def record_created(self, record: RegionRecord) -> None:
        """Record a new region for persistence."""
        self._changes.append(RegionCreated(record, self._regions[record.owner]))

    def record_updated(self, record: RegionRecord) -> None:
        """Record a changed region for persistence."""
        self._changes.append(RegionUpdated(record))

    def take_changes(self) -> list[RegionChange]:
        """The changes for persistence since the last call, in order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def restore_region(self, found: RecoveredRegion) -> Region:
        """Restore a region of an earlier daemon. Raises Refused if it does not fit.

        Blocks of an engine's region become unverified; those of a namespace are up to it.
        """
        record = found.record
        start, end = record.start, record.start + record.nbytes
        if not self.own_bytes <= start < end <= self.pool_bytes or start % ALIGNMENT:
            where = f"{start} to {end}"
            message = (
                f"the kept region at bytes {where} is misaligned or outside of bytes "
                f"{self.own_bytes} to {self.pool_bytes} of the pool"
            )
            raise Refused(Code.POOL_FULL, message, where)
        if not 0 < (blocks := record.num_blocks) <= MAX_HOST_BLOCKS:
            message = f"the kept region has {blocks} host blocks, not 1 to {MAX_HOST_BLOCKS}"
            raise Refused(Code.BAD_LAYOUT, message, blocks)
        if self._overlapping(record.owner, start, end):
            message = f"the kept region at byte {start} overlaps another region or its owner's"
            raise Refused(Code.POOL_FULL, message, start)
        owned = record.owner, record.contents, start, record.nbytes
        region = Region(*owned, present=False, uid=record.uid, memory=found.lines)
        region.last_use = region.table.lines.use_clock(self._clock)
        if record.layout is not None:
            region.states = BlockStates.for_layout(record.layout, region.table)
            try:
                region.states.restore_blocks()
            except ValueError as error:
                message = f"the block table of the kept region is wrong: {error}"
                raise Refused(Code.BAD_LAYOUT, message, blocks) from error
        self._regions[region.owner] = region
        # All are deserted: the order of their last use replaces that in which they were.
        in_order = sorted(self._regions.values(), key=lambda each: each.last_use)
        self._regions = {each.owner: each for each in in_order}
        return region

    def _check_count(self) -> None:
        """Free the longest deserted region if there are too many. Raises Refused (POOL_FULL)."""
        if len(self._regions) < self._max_regions:
            return
        deserted = next((region for region in self._regions.values() if not region.present), None)
        if deserted is None:
            message = (
                f"all {self._max_regions} regions of the host pool are in use; stop an engine, or "
                "raise LimitNOFILE of the daemon"
            )
            raise Refused(Code.POOL_FULL, message, self._max_regions)
        self.free_region(deserted.owner)

    def _overlapping(self, owner: RegionOwner, start: int, end: int) -> list[Region]:
        return [
            region
            for region in self._regions.values()
            if region.owner == owner or (region.start < end and start < region.end)
        ]

    def _find_range(self, owner: RegionOwner, block: int, nbytes: int | None) -> tuple[int, int]:
        """(start, size) of a new region. Raises Refused (POOL_FULL)."""
        kept = [region for region in self._regions.values() if region.owner != owner]
        present = [region for region in kept if region.present]
        if nbytes is None:
            start, size = self._ranges.largest(present)
            if size < block:
                raise self._ranges.refusal(present, block, block)
            return start, size
        deserted = [region.owner for region in kept if not region.present]

        def fitting_ranges(freed: int) -> list[tuple[int, int]]:
            freed_owners = set(deserted[:freed])
            left = [region for region in kept if region.owner not in freed_owners]
            return [free for free in self._ranges.free(left) if free[1] >= nbytes]

        # Binary search: freeing more regions never leaves less free memory.
        ranges = fitting_ranges(
            bisect_left(range(len(deserted)), True, key=lambda count: bool(fitting_ranges(count)))
        )
        if not ranges:
            raise self._ranges.refusal(present, nbytes, block)
        return min(ranges, key=lambda free: free[1])[0], nbytes


def _ignore(_: Region) -> None:
    """Do nothing."""
