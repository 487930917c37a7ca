"""The references of KV cache groups as arrays, whole and by section.

A layout of n groups with s sections (KVLayout.sections) has n * (1 + s) *numbers*: those of the
groups, then those of the sections of the first group, of the second, and so on. An extent of a
section is like one of a group with fewer pages, which begin further behind in each block; so the
copy engines need not know sections. With one section only the groups have numbers.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvferry.proto.layout import Int64s, LayoutArrays
from kvferry.proto.specs import section_starts


class GroupRefs:
    """The references of a group or a section as arrays of shape (refs,), in bytes on the GPU.

    offsets: of each page from the first one, in host memory. start: of the first page within a GPU
    block in host memory. nbytes: of all pages there.
    """

    __slots__ = ("nbytes", "offsets", "pages", "smallest_page", "start", "strides", "tensors")

    def __init__(
        self, layout: LayoutArrays, group: int, first: int = 0, last: int | None = None
    ) -> None:
        begin, end = layout.starts[group : group + 2].tolist()
        own = slice(begin + first, end if last is None else begin + last)
        self.tensors, self.pages = layout.refs[:, own]
        self.strides: Int64s = layout.tensors[2][self.tensors]
        host_pages = layout.host_pages[own]
        self.offsets: Int64s = np.cumsum(host_pages) - host_pages
        self.start = int(layout.host_pages[begin : begin + first].sum())
        self.nbytes = int(host_pages.sum())
        self.smallest_page = int(np.minimum.reduce(self.pages))


def group_refs(layout: LayoutArrays) -> list[GroupRefs]:
    """The references of each group, and with several sections of each section."""
    refs = [GroupRefs(layout, group) for group in range(layout.num_groups)]
    if layout.sections > 1:
        for group in range(layout.num_groups):
            starts = section_starts(refs[group].pages.size, layout.sections)
            refs += [GroupRefs(layout, group, *each) for each in pairwise(starts)]
    return refs


def number_of_section(layout: LayoutArrays, group: int, section: int) -> int:
    """The number of a section of a group. With one section, that of the group."""
    if layout.sections == 1:
        return group
    return layout.num_groups + group * layout.sections + section
