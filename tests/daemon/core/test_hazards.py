"""Hazards between transfers, against a naive definition.

A transfer waits for the newest transfer of the other direction that uses one of its blocks.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.daemon.core.hazards import HazardTracker
from kvferry.daemon.core.layout import ResolvedBlocks
from kvferry.proto.specs import Direction

PROFILE = settings(max_examples=100)
SLOTS, HOSTS = 6, 4


def blocks(gpu: list[int], hosts: list[int]) -> ResolvedBlocks:
    return ResolvedBlocks((), np.array(gpu, dtype=np.int64), np.array(hosts, dtype=np.int64))


def dependencies(history: list[tuple[Direction, list[int], list[int]]]) -> list[int]:
    tracker = HazardTracker(SLOTS, HOSTS)
    return [
        tracker.add_transfer(serial, direction, blocks(gpu, hosts))
        for serial, (direction, gpu, hosts) in enumerate(history, 1)
    ]


sides = st.tuples(
    st.sampled_from(Direction),
    st.lists(st.integers(0, SLOTS - 1), max_size=3),
    st.lists(st.integers(0, HOSTS - 1), max_size=3),
)


@settings(PROFILE)
@given(st.lists(sides, max_size=25))
def test_dependencies_equal_the_naive_definition(
    history: list[tuple[Direction, list[int], list[int]]],
) -> None:
    naive = [
        max(
            (
                serial
                for serial, (other, *other_ids) in enumerate(history[:number], 1)
                if other is not direction
                and any(set(a) & set(b) for a, b in zip(other_ids, ids, strict=True))
            ),
            default=0,
        )
        for number, (direction, *ids) in enumerate(history)
    ]
    assert dependencies(history) == naive


@settings(PROFILE)
@given(st.lists(sides | st.integers(0, 10), max_size=40))
def test_ended_transfers_are_not_waited_for(
    history: list[tuple[Direction, list[int], list[int]] | int],
) -> None:
    """If a transfer in flight has a common block, a new one waits for it or for a later one.

    A number in the history ends one of the transfers in flight.
    """
    tracker, in_flight = (
        HazardTracker(SLOTS, HOSTS),
        dict[int, tuple[Direction, set[int], set[int]]](),
    )
    for serial, event in enumerate(history, 1):
        if isinstance(event, int):
            if in_flight:
                ended = sorted(in_flight)[event % len(in_flight)]
                tracker.remove_transfer(in_flight.pop(ended)[0])
            continue
        direction, gpu, hosts = event
        common = {
            number: bool(other_gpu & set(gpu) or other_hosts & set(hosts))
            for number, (other, other_gpu, other_hosts) in in_flight.items()
            if other is not direction
        }
        dependency = tracker.add_transfer(serial, direction, blocks(gpu, hosts))
        assert dependency >= max((number for number, shares in common.items() if shares), default=0)
        assert dependency < serial
        assert common or not dependency
        in_flight[serial] = direction, set(gpu), set(hosts)
