"""When a load is expected to end."""

from __future__ import annotations

import pytest

from kvferry.client.vllm.arrivals import LATELY, PATIENCE, RATE, TELLS, Arrivals

GIB = 1 << 30


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


def test_nothing_is_awaited_where_nothing_is_loaded(arrivals: Arrivals) -> None:
    assert not arrivals.soon(0.0)


def test_a_load_is_awaited_when_its_bytes_can_be_there(arrivals: Arrivals) -> None:
    arrivals.submitted(1, GIB, 10.0)
    due = 10.0 + GIB / RATE
    assert not arrivals.soon(due - 1.1 * PATIENCE)
    assert arrivals.soon(due - 0.9 * PATIENCE)
    assert arrivals.soon(due + 1)  # it is late


def test_loads_come_one_behind_the_other(arrivals: Arrivals) -> None:
    arrivals.submitted(1, GIB, 10.0)
    arrivals.submitted(2, GIB, 10.0)
    arrivals.ended(1, GIB, GIB / RATE, 10.0 + GIB / RATE)
    assert not arrivals.soon(10.0 + GIB / RATE)
    assert arrivals.soon(10.0 + 2 * GIB / RATE)
    arrivals.ended(2, 0, 0.0, 10.0)
    assert not arrivals.soon(20.0)


def test_a_later_load_may_end_first(arrivals: Arrivals) -> None:
    """It was refused, or failed."""
    arrivals.submitted(1, GIB, 10.0)
    arrivals.submitted(2, GIB, 10.0)
    arrivals.ended(2, 0, 0.0, 10.0)
    assert arrivals.soon(10.0 + GIB / RATE)
    arrivals.ended(1, GIB, 0.1, 10.1)
    assert not arrivals.soon(20.0)


def test_the_link_is_as_fast_as_it_was(arrivals: Arrivals) -> None:
    arrivals.ended(1, GIB, 0.1, 1.0)
    arrivals.ended(2, TELLS - 1, 1.0, 1.0)  # of latency
    arrivals.ended(3, 0, 0.0, 1.0)
    arrivals.submitted(4, GIB, 10.0)
    assert not arrivals.soon(10.0 + 0.1 - 1.1 * PATIENCE)
    assert arrivals.soon(10.0 + 0.1 - 0.9 * PATIENCE)


def test_a_load_is_on_its_way_for_a_while_first(arrivals: Arrivals) -> None:
    """As the least of the last ones was, that waited for no other."""
    for number, delay in enumerate((0.004, 0.002, 0.003)):
        arrivals.submitted(number, GIB, 10.0 * number)
        arrivals.ended(number, GIB, 0.1, 10.0 * number + 0.1 + delay)
    arrivals.submitted(8, GIB, 50.0)
    arrivals.submitted(9, GIB, 50.0)
    assert not arrivals.soon(50.0 + 0.102 - 1.1 * PATIENCE)
    assert arrivals.soon(50.0 + 0.102 - 0.9 * PATIENCE)
    arrivals.ended(8, GIB, 0.1, 50.102)
    assert not arrivals.soon(50.0 + 0.202 - 1.1 * PATIENCE)
    arrivals.ended(9, GIB, 0.1, 50.202)  # it waited for the other: that is no delay of its own
    arrivals.submitted(10, GIB, 60.0)
    assert not arrivals.soon(60.0 + 0.102 - 1.1 * PATIENCE)
    assert arrivals.soon(60.0 + 0.102 - 0.9 * PATIENCE)


def test_one_seen_in_time_tells_more_than_those_seen_late(arrivals: Arrivals) -> None:
    for number in range(LATELY):
        arrivals.submitted(number, GIB, 10.0 * number)
        arrivals.ended(number, GIB, 0.1, 10.0 * number + 0.1 + 0.005)
    arrivals.submitted(99, GIB, 500.0)
    assert not arrivals.soon(500.0 + 0.105 - 1.1 * PATIENCE)
    arrivals.ended(99, GIB, 0.1, 500.101)
    arrivals.submitted(100, GIB, 600.0)
    assert arrivals.soon(600.0 + 0.101 - 0.9 * PATIENCE)
