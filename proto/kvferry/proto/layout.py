"""A KV layout as numpy arrays: the form that the daemon checks and computes with.

A decoded KVLayout is a tree of small objects, about 130 bytes per reference. The daemon converts it
to arrays once, when an engine registers, and keeps only these: 16 bytes per reference. The
conversion checks the layout. The client makes the same check before it sends a layout. Any thread.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np

from kvferry.proto.errors import Code, Refused
from kvferry.proto.packing import TILE_BYTES, packed_bytes
from kvferry.proto.specs import MAX_GROUPS, MAX_REFS, MAX_SECTIONS, MAX_TENSORS, KVLayout

Int64s: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


class LayoutArrays:
    """A KVLayout as arrays.

    tensors: (3, tensors) int64: number of blocks, page size and row stride of each tensor.
    refs: (2, refs) int64: tensor and page size of each reference, group by group.
    starts: (groups + 1,) int64: index in `refs` of the first reference of each group.
    host_pages: (refs,) int64: the size of each reference's page in host memory.
    Sizes and strides are in bytes. Equal layouts are equal.
    """

    __slots__ = (
        "block_size_factor",
        "group_bytes",
        "group_of_ref",
        "host_block_bytes",
        "host_pages",
        "packed",
        "refs",
        "sections",
        "starts",
        "tensors",
    )

    def __init__(
        self,
        tensors: Int64s,
        refs: Int64s,
        starts: Int64s,
        factor: int,
        packed: bool = False,
        sections: int = 1,
    ) -> None:
        self.tensors, self.refs, self.starts = tensors, refs, starts
        self.block_size_factor, self.packed, self.sections = factor, packed, sections
        self.host_pages: Int64s = packed_bytes(refs[1]) if packed else refs[1]
        self.group_of_ref: Int64s = np.repeat(np.arange(starts.size - 1), np.diff(starts))
        # Bytes of one GPU block of each group in host memory.
        self.group_bytes: list[int] = np.add.reduceat(self.host_pages, starts[:-1]).tolist()
        # Bytes of one host block: of the largest group, because all groups share one id space.
        self.host_block_bytes: int = max(self.group_bytes) * factor

    @classmethod
    def from_layout(cls, layout: KVLayout) -> LayoutArrays:
        """Convert and check a layout. Raises Refused (BAD_LAYOUT, UNKNOWN_TENSOR).

        The numbers of tensors, groups and references are checked before anything is allocated.
        """
        starts = _starts(layout)
        tensors = (
            [tensor.num_blocks for tensor in layout.tensors],
            [tensor.page_size_bytes for tensor in layout.tensors],
            [tensor.row_stride_bytes for tensor in layout.tensors],
        )
        refs = list(chain.from_iterable(layout.groups))
        pairs = [ref.tensor for ref in refs], [ref.page_size_bytes for ref in refs]
        arrays = cls(
            np.array(tensors, dtype=np.int64),
            np.array(pairs, dtype=np.int64),
            np.array(starts, dtype=np.int64),
            layout.block_size_factor,
            layout.packed,
            layout.sections,
        )
        arrays._check()
        return arrays

    def to_lists(self) -> list[Any]:
        """The lists that a KVLayout is encoded as."""
        refs = self.refs.T.tolist()
        groups = [refs[start:end] for start, end in pairwise(self.starts.tolist())]
        tensors = self.tensors.T.tolist()
        return [tensors, groups, self.block_size_factor, self.packed, self.sections]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayoutArrays):
            return NotImplemented
        return (
            self.block_size_factor == other.block_size_factor
            and self.packed == other.packed
            and self.sections == other.sections
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.refs, other.refs)
            and np.array_equal(self.tensors, other.tensors)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_groups(self) -> int:
        return self.starts.size - 1

    @property
    def num_tensors(self) -> int:
        return int(self.tensors.shape[1])

    @property
    def span_bytes(self) -> list[int]:
        """For each tensor the bytes from the start of its first row to the end of its last page."""
        # Python integers: the sizes of an invalid layout may overflow an int64.
        return [
            (blocks - 1) * stride + page
            for blocks, page, stride in zip(*self.tensors.tolist(), strict=True)
        ]

    def blocks_of_groups(self, reduce: np.ufunc) -> Int64s:
        """(groups,) np.minimum or np.maximum of the block counts of each group's tensors."""
        blocks: Int64s = reduce.reduceat(self.tensors[0][self.refs[0]], self.starts[:-1])
        return blocks

    def _check(self) -> None:
        _, pages, strides = self.tensors
        for index in np.flatnonzero(strides < pages)[:1].tolist():
            raise Refused(
                Code.BAD_LAYOUT,
                f"tensor {index} has a row stride of {strides[index]} bytes, smaller than its "
                f"page of {pages[index]} bytes; correct row_stride_bytes",
                int(strides[index]),
            )
        named, sizes = self.refs
        for ref in np.flatnonzero(named >= self.num_tensors)[:1].tolist():
            raise Refused(
                Code.UNKNOWN_TENSOR,
                f"group {self.group_of_ref[ref]} refers to tensor {named[ref]}, but there are "
                f"{self.num_tensors} tensors; use indices from 0",
                int(named[ref]),
            )
        for ref in np.flatnonzero(sizes > pages[named])[:1].tolist():
            raise Refused(
                Code.BAD_LAYOUT,
                f"group {self.group_of_ref[ref]} copies {sizes[ref]} bytes per page of tensor "
                f"{named[ref]}, whose pages have {pages[named[ref]]}; correct page_size_bytes",
                int(sizes[ref]),
            )
        for ref in np.flatnonzero(sizes % TILE_BYTES)[: self.packed].tolist():
            raise Refused(
                Code.BAD_LAYOUT,
                f"group {self.group_of_ref[ref]} has a page of {sizes[ref]} bytes, not a multiple "
                f"of {TILE_BYTES}; register it without `packed`",
                int(sizes[ref]),
            )
        fewest = int(np.diff(self.starts).min())
        if self.sections > fewest or self.sections * self.num_groups > MAX_SECTIONS:
            message = (
                f"{self.sections} sections of {self.num_groups} groups, one of which has {fewest} "
                f"references; give at most one per reference, and {MAX_SECTIONS} in all"
            )
            raise Refused(Code.BAD_LAYOUT, message, self.sections)
        uses = np.sort(self.group_of_ref * self.num_tensors + named)
        for again in uses[1:][uses[1:] == uses[:-1]][:1].tolist():
            group, tensor = divmod(again, self.num_tensors)
            message = f"group {group} refers to tensor {tensor} twice; name each tensor once"
            raise Refused(Code.BAD_LAYOUT, message, tensor)


def _starts(layout: KVLayout) -> list[int]:
    """The index of each group's first reference. Checks the numbers of all parts."""
    for what, most, count in (
        ("tensors", MAX_TENSORS, len(layout.tensors)),
        ("groups", MAX_GROUPS, len(layout.groups)),
    ):
        if not 0 < count <= most:
            message = f"the layout has {count} {what}; give 1 to {most}"
            raise Refused(Code.BAD_LAYOUT, message, count)
    starts = [0]
    for group, refs in enumerate(layout.groups):
        if not refs:
            message = f"group {group} refers to no tensor; leave it out, or name its tensors"
            raise Refused(Code.BAD_LAYOUT, message, group)
        starts.append(starts[-1] + len(refs))
    if starts[-1] > MAX_REFS:
        raise Refused(
            Code.BAD_LAYOUT,
            f"the groups have {starts[-1]} references to tensors, more than {MAX_REFS}; merge "
            "tensors that one allocation holds",
            starts[-1],
        )
    return starts
