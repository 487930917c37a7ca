"""Aliasing: groups that share tensors or memory, and one number per distinct GPU block.

Groups of hybrid models are views of one tensor, and the tensors of an engine may overlap in memory.
The hazard tracker must see a block of shared memory as one block, whichever group names it. So the
GPU blocks of all groups are numbered (GPU slots), and groups that share memory share numbers.
Computed when KV caches are registered, on the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import Int64s, LayoutArrays
from kvferry.proto.memory import Location

MAX_GPU_BLOCKS = 1 << 28
# In hybrid models all groups share a tensor, or all but those with fewer layers. A load is checked
# once per set of sharing groups, so their number is limited.
MAX_SHARING_SETS = 64
MAX_SETS_OF_A_GROUP = 4


def slot_bases(
    layout: LayoutArrays, locations: Sequence[Location] | None = None
) -> tuple[list[int], int]:
    """Number the GPU blocks of all groups; groups that share memory have the same numbers.

    Return the first number of each group, and how many numbers there are. Raises Refused
    (BAD_LAYOUT) if these are more than MAX_GPU_BLOCKS.
    """
    root = _roots(layout, locations)
    widths: dict[int, int] = {}
    for group, blocks in enumerate(layout.blocks_of_groups(np.maximum).tolist()):
        widths[root[group]] = max(widths.get(root[group], 0), blocks)
    starts, total = {}, 0
    for group, width in widths.items():
        starts[group], total = total, total + width
    if total > MAX_GPU_BLOCKS:
        message = (
            f"the groups have {total} GPU blocks in total, more than {MAX_GPU_BLOCKS}; "
            "register fewer blocks"
        )
        raise Refused(Code.BAD_LAYOUT, message, total)
    return [starts[group] for group in root], total


def sharers_of(layout: LayoutArrays) -> list[tuple[int, ...]]:
    """The sets of groups that share a tensor; no set is a subset of another.

    Each group is in at least one set. Raises Refused (BAD_LAYOUT) if there are too many sets.
    """
    tensors, groups = layout.refs[0], layout.group_of_ref
    shared = np.bincount(tensors)[tensors] > 1
    uses = np.zeros((layout.num_tensors, layout.num_groups), dtype=np.bool_)
    uses[tensors[shared], groups[shared]] = True
    bits = np.packbits(uses, axis=1)
    sets = set(bits.view(f"V{bits.shape[1]}").ravel().tolist()) - {bytes(bits.shape[1])}
    _check_sharing(len(sets), MAX_SHARING_SETS)
    sharers = [
        frozenset(np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8))).tolist())
        for mask in sets
    ]
    largest = [groups for groups in sharers if not any(groups < other for other in sharers)]
    sets_of_group = Counter(group for groups in largest for group in groups)
    _check_sharing(max(sets_of_group.values(), default=0), MAX_SETS_OF_A_GROUP)
    alone = set(range(layout.num_groups)) - sets_of_group.keys()
    return [*(tuple(sorted(groups)) for groups in largest), *((group,) for group in sorted(alone))]


def _check_sharing(sets: int, most: int) -> None:
    if sets > most:
        raise Refused(
            Code.BAD_LAYOUT,
            f"one group shares tensors with {sets} different sets of groups, more than {most}; "
            "let the same groups share each tensor",
            sets,
        )


def _roots(layout: LayoutArrays, locations: Sequence[Location] | None) -> list[int]:
    """For each group the representative of all groups that it shares memory with (union-find)."""
    parent = list(range(layout.num_groups))

    def root(group: int) -> int:
        while parent[group] != group:
            group = parent[group]
        return group

    memory = _memories(layout, locations)[layout.refs[0]]
    owner = np.full(layout.num_tensors, -1)
    starts = layout.starts.tolist()
    for group, (start, end) in enumerate(pairwise(starts)):
        used = memory[start:end]
        for other in set(owner[used].tolist()) - {-1}:
            parent[root(group)] = root(other)
        owner[used] = group
    return [root(group) for group in parent]


def _memories(layout: LayoutArrays, locations: Sequence[Location] | None) -> Int64s:
    """(tensors,) a number per tensor; tensors whose memory overlaps have the same number."""
    if locations is None:
        return np.arange(layout.num_tensors)
    # An allocation has fewer than 2**48 bytes, and there are at most 2**12 of them.
    begin = np.array([(place.allocation << 49) + place.offset for place in locations])
    order = np.argsort(begin, kind="stable")
    end = np.maximum.accumulate((begin + np.array(layout.span_bytes))[order])
    memories = np.zeros(layout.num_tensors, dtype=np.int64)
    memories[order[1:]] = np.cumsum(begin[order[1:]] >= end[:-1])
    return memories
