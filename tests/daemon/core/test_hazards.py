"""Ordering against its own sentence: wait for the newest of the other way that meets me."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.core.hazards import HazardTracker
from kvferry.daemon.core.layout import ResolvedBlocks
from kvferry.proto.specs import Direction

PROFILE = settings(max_examples=200)
STORE, LOAD = Direction.STORE, Direction.LOAD
SLOTS, HOSTS = 6, 4


def blocks(gpu: list[int], hosts: list[int]) -> ResolvedBlocks:
    return ResolvedBlocks((), np.array(gpu, dtype=np.int64), np.array(hosts, dtype=np.int64))


def after(history: list[tuple[Direction, list[int], list[int]]]) -> list[int]:
    ordering = HazardTracker(SLOTS, HOSTS)
    return [
        ordering.add_transfer(serial, direction, blocks(gpu, hosts))
        for serial, (direction, gpu, hosts) in enumerate(history, 1)
    ]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        pytest.param([(STORE, [0], [0]), (LOAD, [1], [0])], [0, 1], id="load-of-what-is-stored"),
        pytest.param([(LOAD, [0], [0]), (STORE, [1], [0])], [0, 1], id="store-over-what-is-loaded"),
        pytest.param([(LOAD, [0], [0]), (STORE, [0], [1])], [0, 1], id="store-of-what-is-loaded"),
        pytest.param([(STORE, [0], [0]), (LOAD, [0], [1])], [0, 1], id="load-over-what-is-stored"),
        pytest.param([(STORE, [0], [0]), (LOAD, [1], [1])], [0, 0], id="nothing-in-common"),
        pytest.param([(STORE, [0], [1]), (LOAD, [1], [0])], [0, 0], id="ids-of-different-sides"),
        pytest.param([(STORE, [0], [0]), (STORE, [0], [0])], [0, 0], id="one-way-is-a-queue"),
        pytest.param(
            [(STORE, [0], [0]), (STORE, [1], [0]), (STORE, [2], [2]), (LOAD, [3], [0])],
            [0, 0, 0, 2],
            id="the-newest-that-meets",
        ),
        pytest.param(
            [(STORE, [0], [0]), (LOAD, [1], [0]), (STORE, [2], [0]), (LOAD, [3], [0])],
            [0, 1, 2, 3],
            id="there-and-back",
        ),
        pytest.param(
            [(STORE, [0, 1], [0, 1]), (LOAD, [], [])], [0, 0], id="nothing-waits-for-none"
        ),
    ],
)
def test_a_transfer_waits_for(
    history: list[tuple[Direction, list[int], list[int]]], expected: list[int]
) -> None:
    assert after(history) == expected


sides = st.tuples(
    st.sampled_from(Direction),
    st.lists(st.integers(0, SLOTS - 1), max_size=3),
    st.lists(st.integers(0, HOSTS - 1), max_size=3),
)


@settings(PROFILE)
@given(st.lists(sides, max_size=25))
def test_ordering_is_the_naive_one(history: list[tuple[Direction, list[int], list[int]]]) -> None:
    naive = [
        max(
            (
                serial
                for serial, (other, *theirs) in enumerate(history[:number], 1)
                if other is not direction
                and any(set(a) & set(b) for a, b in zip(theirs, mine, strict=True))
            ),
            default=0,
        )
        for number, (direction, *mine) in enumerate(history)
    ]
    assert after(history) == naive


@settings(PROFILE)
@given(st.lists(sides | st.integers(0, 10), max_size=40))
def test_ended_transfers_are_not_waited_for(
    history: list[tuple[Direction, list[int], list[int]] | int],
) -> None:
    """A number: one of those under way ends. Who meets one that has not waits for it or a later."""
    ordering, under_way = (
        HazardTracker(SLOTS, HOSTS),
        dict[int, tuple[Direction, set[int], set[int]]](),
    )
    for serial, event in enumerate(history, 1):
        if isinstance(event, int):
            if under_way:
                one = sorted(under_way)[event % len(under_way)]
                ordering.remove_transfer(under_way.pop(one)[0])
            continue
        direction, gpu, hosts = event
        others = {
            number: bool(theirs & set(gpu) or places & set(hosts))
            for number, (way, theirs, places) in under_way.items()
            if way is not direction
        }
        found = ordering.add_transfer(serial, direction, blocks(gpu, hosts))
        assert found >= max((number for number, meets in others.items() if meets), default=0)
        assert found < serial
        assert others or not found
        under_way[serial] = direction, set(gpu), set(hosts)
