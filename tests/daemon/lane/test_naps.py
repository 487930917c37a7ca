"""How long the lane sleeps while something is in flight."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvferry.daemon.core.layout import Extent
from kvferry.daemon.lane.berth import SOONER, Crossing, Flight, Stream
from kvferry.daemon.lane.naps import (
    MAX_NAP_LONG,
    NAP,
    NAP_LATE,
    NAP_LONG,
    WATCH,
    until_due,
)
from kvferry.proto.specs import Direction

LONG, START = 600e-6, 100.0
REST = (Extent(0, np.arange(1), np.arange(1)),)


def stream(*takes: float, rest: tuple[Extent, ...] = REST) -> Stream:
    """Pieces of one plan, of which `rest` is still to be submitted; the first came at START."""
    crossing = Crossing(cast(Any, SimpleNamespace()), rest, len(takes))
    flights = [Flight(cast(Any, None), crossing, None, each) for each in takes]
    return Stream(Direction.LOAD, deque(flights), since=START)


@pytest.mark.parametrize(
    ("after", "nap"), [(0.0, 0.0), (WATCH, 0.0), (1.9 * WATCH, 0.0), (2.1 * WATCH, NAP)]
)
def test_a_short_piece_is_watched_until_it_is_late(after: float, nap: float) -> None:
    """And at once where the lane had something else to do, however late that is."""
    watched = stream(WATCH)
    watched.flights[0].looked = START + after - 1.1 * NAP_LONG
    assert until_due(watched, START + after) == 0.0
    watched.flights[0].looked = START + after - 0.9 * NAP_LONG
    assert until_due(watched, START + after) == nap


def test_a_long_one_is_left_alone_until_it_is_due() -> None:
    assert until_due(stream(5 * LONG), START) == MAX_NAP_LONG
    assert until_due(stream(2 * LONG), START) == pytest.approx(2 * LONG)
    assert until_due(stream(LONG), START + 300e-6) == pytest.approx(300e-6)
    assert until_due(stream(LONG), START + LONG - 1e-6) == NAP_LONG
    assert until_due(stream(LONG), START + LONG + 1e-6) == NAP_LONG
    assert until_due(stream(LONG), START + 10 * LONG) == NAP_LATE


def test_the_end_of_a_plan_is_noticed_sooner() -> None:
    """Of its last piece soonest."""
    for pieces in (stream(LONG, LONG, rest=()), stream(LONG, rest=())):
        assert until_due(pieces, START + 300e-6) == pytest.approx(300e-6)
        assert until_due(pieces, START + 10 * LONG) == NAP_LONG
    assert until_due(stream(LONG, LONG, rest=()), START + LONG) == NAP
    assert until_due(stream(LONG, rest=()), START + LONG) == 0.0
    assert until_due(stream(LONG, rest=()), START + LONG + 1.1 * WATCH) == NAP


@pytest.mark.parametrize(
    ("looked", "seen", "since"),
    [
        pytest.param(0.0, 2 * LONG, SOONER * LONG, id="noticed late"),
        pytest.param(1.5 * LONG, 2 * LONG, 1.5 * LONG, id="late itself"),
        pytest.param(0.0, 0.5 * LONG, 0.5 * LONG, id="sooner than is thought possible"),
    ],
)
def test_the_next_piece_came_first_when_the_last_was_done_and_not_when_that_was_seen(
    looked: float, seen: float, since: float
) -> None:
    pieces = stream(LONG, LONG)
    pieces.flights[0].looked = START + looked
    pieces.landed(START + seen)
    assert pieces.since == pytest.approx(START + since)
    assert len(pieces.flights) == 1


@pytest.mark.parametrize("slower", [1.0, 1.07, 1.2])
def test_large_pieces_are_left_alone_for_as_long_as_they_take_of_late(slower: float) -> None:
    """Nearly: the lane looks a little too soon, and then once or twice more."""
    pieces, ends = stream(*[LONG] * 400), [START + slower * LONG * (n + 1) for n in range(400)]
    pieces.begin(START)
    now, looks, late = START, list[int](), list[float]()
    for end in ends:
        looks.append(0)
        while True:
            now += until_due(pieces, now)
            looks[-1] += 1
            if now >= end:
                break
            pieces.flights[0].looked = now
        late.append(now - end)
        pieces.landed(now)
    assert sum(looks[100:]) <= 2.5 * 300
    assert max(late[100:]) <= NAP_LATE
    assert pieces.pace == pytest.approx(max(1.0, slower), rel=0.03)


def test_a_piece_that_waited_for_something_else_does_not_count() -> None:
    pieces = stream(LONG, LONG, LONG)
    pieces.begin(START)
    for number, took in ((1, 1.1), (2, 4.0)):
        pieces.flights[0].looked = START + number * took * LONG
        pieces.landed(START + number * took * LONG + NAP)
    assert pieces.pace == 1.0


def test_the_link_has_something_to_do_for_what_is_left_of_the_first_and_all_it_was_given() -> None:
    pieces = stream(LONG, LONG, 2 * LONG)
    assert pieces.left(0, START + 0.25 * LONG) == pytest.approx(3.75 * LONG)
    assert pieces.left(1, START + 0.25 * LONG) == pytest.approx(1.75 * LONG)
    assert pieces.left(1, START + 9 * LONG) == pytest.approx(LONG)
    assert pieces.left(3, START) == 0.0
    assert stream().left(0, START) == 0.0
