"""Arrays of block ids: the checks and small operations that every transfer needs.

They work in Python for a FEW ids and in numpy for more. Called by the core on the event loop, and
by the copy engines on the device worker's thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import Int64s
from kvferry.proto.specs import BlockIds

# Up to this many numbers, a Python loop is faster than numpy.
FEW = 64
# If the range of ids is this many times their number, sorting finds duplicates faster.
SPARSE_RATIO = 16

_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_NONE = np.empty(0, dtype=np.int64)


def largest(numbers: np.ndarray[Any, Any]) -> int:
    """numbers.max(), or 0 if there are none."""
    if numbers.size <= FEW:
        return max(numbers.tolist(), default=0)
    return int(np.maximum.reduce(numbers))


def first_duplicate(ids: Int64s, limit: int) -> int | None:
    """An id that occurs twice among ids of 0 to `limit` - 1; None if there is none."""
    if ids.size <= FEW and len(set(ids.tolist())) == ids.size:
        return None
    if limit > SPARSE_RATIO * ids.size:  # a table of this size takes longer to allocate than a sort
        ordered = np.sort(ids)
        same = ordered[1:][ordered[1:] == ordered[:-1]]
        return int(same[0]) if same.size else None
    last = np.empty(limit, dtype=np.int64)
    order = np.arange(ids.size)
    last[ids] = order
    duplicate = last[ids] != order
    return int(ids[duplicate][0]) if np.count_nonzero(duplicate) else None


def as_int64s(ids: BlockIds) -> Int64s:
    """The ids as int64, not copied if they are int64 already."""
    return ids if ids.dtype is _INT64 else ids.astype(_INT64)


def join_ids(parts: list[Int64s]) -> Int64s:
    """All ids in one array; a single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate([*parts, _NONE])


def in_range(ids: Int64s, limit: int) -> bool:
    """Whether all ids are 0 to `limit` - 1."""
    if ids.size <= FEW:
        numbers = ids.tolist()
        return not numbers or 0 <= min(numbers) <= max(numbers) < limit
    return largest(ids.view(_UINT64)) < limit  # a negative id becomes a large one


def check_range(ids: Int64s, limit: int, what: str, group: int | None = None) -> None:
    """Raise Refused (BLOCK_OUT_OF_RANGE) for an id that is not 0 to `limit` - 1."""
    if ids.size and not in_range(ids, limit):
        bad = ids[(ids < 0) | (ids >= limit)][0]
        owner = "" if group is None else f" of group {group}"
        message = f"{what} {bad}{owner} does not exist; use ids from 0 to {limit - 1}"
        raise Refused(Code.BLOCK_OUT_OF_RANGE, message, int(bad))


def check_unique(ids: Int64s, limit: int, what: str) -> None:
    """Raise Refused (DUPLICATE_BLOCK) if an id occurs twice: two writes have no order."""
    duplicate = first_duplicate(ids, limit)
    if duplicate is not None:
        message = f"{what} {duplicate} appears twice as a destination; write each block once"
        raise Refused(Code.DUPLICATE_BLOCK, message, duplicate)
