"""Ranges of the host pool that no region has, and texts for users who get less than they wanted.

Called by regions.py, on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.daemon.core.region import Region
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.sizes import format_size

ALIGNMENT = 4096
# How many regions a text lists, and how many characters of a name.
MOST_LISTED, NAME_CHARACTERS = 4, 64


class PoolRanges:
    """The bytes from `begin` to `end` of the pool, in which regions lie."""

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = -(-begin // ALIGNMENT) * ALIGNMENT, end

    @property
    def nbytes(self) -> int:
        return max(0, self._end - self._begin)

    def free(self, held: Sequence[Region]) -> list[tuple[int, int]]:
        """(start, size) of the ranges between these regions; a size may be 0 or less."""
        ranges, at = [], self._begin
        for region in sorted(held, key=lambda region: region.start):
            ranges.append((at, region.start - at))
            at = -(-region.end // ALIGNMENT) * ALIGNMENT
        return [*ranges, (at, self._end - at)]

    def largest(self, held: Sequence[Region]) -> tuple[int, int]:
        """(start, size) of the largest range between these regions."""
        return max(self.free(held), key=lambda free: free[1])

    def refusal(self, present: Sequence[Region], nbytes: int, block: int) -> Refused:
        """The error if no range between present regions has `nbytes`. block: of a host block."""
        message = (
            f"the host pool of {format_size(self.nbytes)} has no {nbytes} contiguous bytes "
            f"({format_size(nbytes)}) that are not in use; the largest part has "
            f"{format_size(max(0, self.largest(present)[1]))}, one host block {format_size(block)}"
        )
        if (between := self._dividing_region(present, nbytes)) is not None:
            message += (
                f". {describe_region(between)} lies between two free parts: stop its engines, "
                "start this one, and then start them again; or"
            )
        elif present and nbytes <= self.nbytes:
            message += f". In use: {list_regions(present)}. Stop an engine,"
        else:
            message += ";"
        message += " request less host memory, or raise pool.size of the daemon"
        return Refused(Code.POOL_FULL, message, nbytes)

    def shortfall(self, region: Region, present: Sequence[Region]) -> str:
        """Why a region is not the whole pool; empty if it is. present: all others in use."""
        block, size = region.block_bytes, self.largest(present)[1]
        if region.num_blocks >= self.nbytes // block:
            return ""
        if region.num_blocks < size // block:
            return (
                f"it is the region that {describe_region(region)} had before, with its blocks; "
                f"{format_size(size)} are not in use: set cpu_bytes_to_use, or free the region "
                f"while no engine uses it (kvferry release {region.owner.name})"
            )
        return (
            f"it is the largest part of the host pool of {format_size(self.nbytes)} that is not "
            f"in use; in use: {list_regions(present)}"
        )

    def _dividing_region(self, present: Sequence[Region], nbytes: int) -> Region | None:
        """The smallest region without which `nbytes` are free in one piece, if as many bytes are
        free in several pieces."""
        if sum(size for _, size in self.free(present)) < nbytes:
            return None
        dividing = [
            region
            for region in present
            if self.largest([other for other in present if other is not region])[1] >= nbytes
        ]
        return min(dividing, key=lambda region: region.nbytes, default=None)


def describe_region(region: Region) -> str:
    """A region's owner and size, for users."""
    contents, name = region.contents, region.owner.name[:NAME_CHARACTERS]
    if isinstance(contents, LayoutArrays):
        return f"engine {name!r} ({format_size(region.nbytes)})"
    model = contents.model[:NAME_CHARACTERS]
    return f"namespace {name} of {model!r} ({format_size(region.nbytes)})"


def list_regions(regions: Sequence[Region]) -> str:
    """The largest of these regions, for users."""
    largest = sorted(regions, key=lambda region: -region.nbytes)
    more = len(regions) - MOST_LISTED
    listed = ", ".join(map(describe_region, largest[:MOST_LISTED]))
    return f"{listed}, and {more} more" if more > 0 else listed
