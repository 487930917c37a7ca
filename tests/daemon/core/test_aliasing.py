"""Sets of groups that share tensors, and the limits of their number.

test_layout.py tests how block numbers follow from shared memory.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from kvferry.daemon.core.aliasing import MAX_SETS_OF_A_GROUP, MAX_SHARING_SETS, sharers_of
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef


def layout_of_users(*users: tuple[int, ...]) -> LayoutArrays:
    """A layout with one tensor for each tuple: the groups that use it."""
    groups = range(1 + max(map(max, users)))
    refs = tuple(
        tuple(TensorRef(tensor, 8) for tensor, sharers in enumerate(users) if group in sharers)
        for group in groups
    )
    return LayoutArrays.from_layout(KVLayout((TensorLayout(4, 8, 8),) * len(users), refs))


@pytest.mark.parametrize(
    ("users", "sets"),
    [
        ([(0,)], [(0,)]),
        ([(0, 1, 2)], [(0, 1, 2)]),
        ([(0, 1, 2), (0, 1), (0,)], [(0, 1, 2)]),
        ([(0,), (1, 2), (3,)], [(0,), (1, 2), (3,)]),
        ([(0, 1), (1, 2), (1,)], [(0, 1), (1, 2)]),
        ([tuple(range(n)) for n in range(16, 0, -1)], [tuple(range(16))]),
        ([(2 * n, 2 * n + 1) for n in range(64)], [(2 * n, 2 * n + 1) for n in range(64)]),
    ],
    ids=["one group", "all groups", "uneven", "disjoint", "chain", "nested", "pairs"],
)
def test_sets_of_groups_that_write_to_one_tensor(
    users: list[tuple[int, ...]], sets: list[tuple[int, ...]]
) -> None:
    assert sorted(sharers_of(layout_of_users(*users))) == sets


@pytest.mark.parametrize(
    ("users", "value"),
    [
        (list(combinations(range(12), 2))[: MAX_SHARING_SETS + 1], MAX_SHARING_SETS + 1),
        ([(0, n + 1) for n in range(MAX_SETS_OF_A_GROUP + 1)], MAX_SETS_OF_A_GROUP + 1),
    ],
    ids=["sets", "sets of a group"],
)
def test_more_sets_than_models_have_are_refused(users: list[tuple[int, ...]], value: int) -> None:
    """A load is checked against each set. Thousands of sets block the event loop for seconds."""
    with pytest.raises(Refused) as refused:
        sharers_of(layout_of_users(*users))
    assert (refused.value.code, refused.value.value) == (Code.BAD_LAYOUT, str(value))
