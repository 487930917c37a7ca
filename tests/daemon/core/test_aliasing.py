"""Sets of groups that share tensors: those of models, and no more. How block numbers follow from
shared memory is in test_layout.py."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvferry.daemon.core.aliasing import MAX_SETS_OF_A_GROUP, MAX_SHARING_SETS, sharers_of
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef


def shared(*users: tuple[int, ...]) -> LayoutArrays:
    """Tensors, each shared by some groups."""
    groups = range(1 + max(map(max, users)))
    refs = tuple(
        tuple(TensorRef(tensor, 8) for tensor, mine in enumerate(users) if group in mine)
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
    ids=["one", "all", "uneven", "apart", "chain", "ever fewer", "pairs"],
)
def test_sets_of_groups_that_write_to_one_tensor(
    users: list[tuple[int, ...]], sets: list[tuple[int, ...]]
) -> None:
    assert sorted(sharers_of(shared(*users))) == sets


@pytest.mark.parametrize(
    ("users", "value"),
    [
        (list(combinations(range(12), 2))[: MAX_SHARING_SETS + 1], MAX_SHARING_SETS + 1),
        ([(0, n + 1) for n in range(MAX_SETS_OF_A_GROUP + 1)], MAX_SETS_OF_A_GROUP + 1),
    ],
    ids=["sets", "sets of a group"],
)
def test_more_sets_than_models_have_are_refused(users: list[tuple[int, ...]], value: int) -> None:
    """A load is checked for each: with thousands of them a legal one took the loop for seconds."""
    with pytest.raises(Refused) as refused:
        sharers_of(shared(*users))
    assert (refused.value.code, refused.value.value) == (Code.BAD_LAYOUT, str(value))
