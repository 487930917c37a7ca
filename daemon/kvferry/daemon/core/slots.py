"""Which groups share memory, and numbers for the GPU blocks of all of them.

Hybrid models have groups that are views of one tensor, and an engine may place tensors of its own
one over the other. A block of such memory is one block, whatever group it is asked for by.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.proto.errors import Code, Refused
from kvferry.proto.memory import Location
from kvferry.proto.specs import KVLayout

MAX_GPU_BLOCKS = 1 << 28


def slot_bases(
    layout: KVLayout, locations: Sequence[Location] | None = None
) -> tuple[list[int], int]:
    """Number the GPU blocks of all groups; groups that share memory get the same numbers.

    Returns each group's first number, and how many there are. Raises Refused (BAD_LAYOUT) where
    they are more than any GPU has.
    """
    memory = _memories(layout, locations)
    parent = list(range(len(layout.groups)))

    def root(group: int) -> int:
        while parent[group] != group:
            group = parent[group]
        return group

    owner: dict[int, int] = {}
    for group, refs in enumerate(layout.groups):
        for ref in refs:
            parent[root(group)] = root(owner.setdefault(memory[ref.tensor], group))
    widths: dict[int, int] = {}
    for group, refs in enumerate(layout.groups):
        blocks = max(layout.tensors[ref.tensor].num_blocks for ref in refs)
        widths[root(group)] = max(widths.get(root(group), 0), blocks)
    starts, total = {}, 0
    for group, width in widths.items():
        starts[group], total = total, total + width
    if total > MAX_GPU_BLOCKS:
        raise Refused(Code.BAD_LAYOUT, f"at most {MAX_GPU_BLOCKS} GPU blocks altogether", total)
    return [starts[root(group)] for group in range(len(layout.groups))], total


def sharers_of(layout: KVLayout) -> list[tuple[int, ...]]:
    """The sets of groups that write to one tensor, none of them part of another."""
    users: dict[int, set[int]] = {}
    for group, refs in enumerate(layout.groups):
        for ref in refs:
            users.setdefault(ref.tensor, set()).add(group)
    sets = {frozenset(groups) for groups in users.values()}
    return [tuple(sorted(one)) for one in sets if not any(one < other for other in sets)]


def _memories(layout: KVLayout, locations: Sequence[Location] | None) -> list[int]:
    """For each tensor a number of the memory that it lies in: the same where spans overlap."""
    numbers = list(range(len(layout.tensors)))
    if locations is None:
        return numbers
    places = [(place.allocation, place.offset, i) for i, place in enumerate(locations)]
    within, end = -1, (-1, 0)
    for allocation, offset, index in sorted(places):
        if (allocation, offset) >= end:
            within, end = index, (allocation, offset)
        end = max(end, (allocation, offset + layout.tensors[index].span_bytes))
        numbers[index] = within
    return numbers
