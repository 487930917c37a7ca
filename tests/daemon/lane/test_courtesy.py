"""What stores wait for, as long as the link has enough of them to do, and for how long."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.daemon.lane import courtesy
from kvferry.daemon.lane.berth import LARGE, Flight, Stream
from kvferry.daemon.lane.courtesy import BREATH, ENOUGH, LONG, MOMENT, Courtesy
from kvferry.proto.specs import Direction

NOW = 1000.0


def flight(takes: float) -> Flight:
    return Flight(cast(Any, None), cast(Any, None), None, takes)


class Lane:
    """Two streams, of which the link is given all but some pieces of stores; and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.said, self.unsent = NOW, 0, 0
        monkeypatch.setattr(courtesy, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.loads, self.stores = (
            Stream(direction) for direction in (Direction.LOAD, Direction.STORE)
        )
        self.courtesy = Courtesy(self.loads, self.stores, lambda: self.unsent, lambda: self.said)
        self.stores.begin(NOW)
        self.stores.flights.append(flight(2 * ENOUGH))

    def load(self, takes: float = LARGE / 2) -> Flight:
        """One comes on the link, where the one before it has ended."""
        self.loads.begin(self.now)
        self.loads.flights = deque([flight(takes)])
        return self.loads.flights[0]

    def load_ends(self, load: Flight) -> None:
        self.loads.flights.clear()
        self.courtesy.load_ended(load, self.now)

    def goes(self, *, orders: bool = False) -> bool:
        """Whether the next step goes, in this round of the lane; if so, it does."""
        waits = self.courtesy.waits(orders=orders)
        if not waits:
            self.courtesy.stepped()
        return not waits

    def goes_in_new_round(self, *, orders: bool = False) -> bool:
        self.courtesy.look()
        return self.goes(orders=orders)

    def short_of_work(self) -> None:
        self.now = NOW + 2 * ENOUGH


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lane:
    return Lane(monkeypatch)


def test_with_nobody_else_about_every_step_goes(lane: Lane) -> None:
    assert [lane.goes() for _ in range(5)] == [True] * 5
    lane.load(2 * LARGE)  # a large one takes long anyway
    assert [lane.goes() for _ in range(5)] == [True] * 5


def test_beside_a_short_load_goes_one_step(lane: Lane) -> None:
    lane.load()
    assert [lane.goes(), lane.goes(), lane.goes_in_new_round()] == [True, False, False]
    assert lane.courtesy.pause == 0  # the lane looks when the load is done
    lane.load()
    assert [lane.goes_in_new_round(), lane.goes()] == [True, False]


def test_none_goes_beside_a_load_that_is_due(lane: Lane) -> None:
    lane.load(LARGE / 2)
    lane.now += 0.51 * LARGE
    assert not lane.goes()
    lane.now -= 0.02 * LARGE
    assert lane.goes()


def test_when_the_link_runs_out_of_work_one_goes_each_time_round(lane: Lane) -> None:
    lane.load()
    assert lane.goes()
    lane.short_of_work()
    for _ in range(3):
        assert [lane.goes_in_new_round(), lane.goes()] == [True, False]


def test_what_the_link_was_not_given_is_no_work_for_it(lane: Lane) -> None:
    lane.stores.flights.append(flight(1.0))
    lane.short_of_work()
    assert not lane.goes(orders=True)
    lane.unsent = 1
    assert lane.goes_in_new_round(orders=True)


def test_orders_come_first_as_long_as_the_link_has_anything_to_do(lane: Lane) -> None:
    """Also before the step beside a load."""
    lane.load()
    assert not lane.goes(orders=True)
    assert lane.courtesy.pause == 0
    lane.now += 2.01 * ENOUGH
    assert [lane.goes(orders=True), lane.goes(orders=True)] == [True, False]
    assert lane.goes_in_new_round()


def test_asked_twice_before_a_step_it_says_the_same(lane: Lane) -> None:
    lane.load()
    assert [lane.courtesy.waits(orders=False) for _ in range(3)] == [False] * 3


def test_for_what_was_said_they_wait_a_moment(lane: Lane) -> None:
    lane.stores.flights.append(flight(1.0))
    lane.said = 8192
    assert not lane.goes()
    assert lane.courtesy.pause == pytest.approx(MOMENT)
    lane.now += MOMENT / 3
    assert not lane.goes_in_new_round()
    assert lane.courtesy.pause == pytest.approx(2 * MOMENT / 3)
    lane.said = 0  # heard, and what it leads to has yet to come
    assert not lane.goes_in_new_round()
    lane.now += MOMENT
    assert lane.goes_in_new_round()


def test_what_is_never_heard_holds_nobody_up_for_ever(lane: Lane) -> None:
    lane.stores.flights.append(flight(1.0))
    lane.said = 8192
    assert not lane.goes()
    lane.now += 1.01 * MOMENT
    assert lane.goes_in_new_round()
    lane.said += 8192
    assert not lane.goes_in_new_round()


def test_behind_a_load_they_wait_a_moment_for_the_next(lane: Lane) -> None:
    lane.stores.flights.append(flight(1.0))
    lane.load_ends(lane.load())
    assert not lane.goes()
    assert lane.courtesy.pause == pytest.approx(MOMENT)
    lane.now += 1.01 * MOMENT
    assert lane.goes_in_new_round()


def test_in_such_a_moment_steps_that_cannot_wait_leave_time_to_others(lane: Lane) -> None:
    lane.short_of_work()
    lane.load_ends(lane.load())
    for _ in range(3):
        assert [lane.goes_in_new_round(), lane.goes()] == [True, False]
        assert lane.courtesy.pause == BREATH


def test_one_step_goes_behind_a_load_that_had_none_beside_it(lane: Lane) -> None:
    """Where the link has not enough for as long as some loads take."""
    lane.stores.flights.append(flight(0.99 * LONG - 2 * ENOUGH))
    lane.load_ends(lane.load())
    assert [lane.goes(), lane.goes(), lane.goes_in_new_round()] == [True, False, False]
    load = lane.load()
    assert lane.goes_in_new_round()  # beside it
    lane.load_ends(load)
    assert not lane.goes()
    lane.load_ends(lane.load())
    assert not lane.goes_in_new_round()  # its moment was over when the lane looked again
    lane.load_ends(lane.load())
    assert not lane.goes(orders=True)
    lane.stores.flights.append(flight(ENOUGH))
    assert not lane.goes()


def test_they_leave_the_lane_to_others_until_the_link_needs_more(lane: Lane) -> None:
    lane.load_ends(lane.load())
    lane.stores.flights.append(flight(LONG))
    assert not lane.goes()
    assert lane.courtesy.pause == pytest.approx(MOMENT)
    lane.stores.flights.pop()
    lane.now += ENOUGH / 2
    assert not lane.goes_in_new_round()
    assert lane.courtesy.pause == pytest.approx(ENOUGH / 2)
