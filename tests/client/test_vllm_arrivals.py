"""When a load is expected to end."""

from __future__ import annotations

import pytest

from kvferry.client.vllm.arrivals import PATIENCE, RATE, TELLS, Arrivals

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
    arrivals.ended(1, GIB, GIB / RATE)
    assert not arrivals.soon(10.0 + GIB / RATE)
    assert arrivals.soon(10.0 + 2 * GIB / RATE)
    arrivals.ended(2, 0, 0.0)
    assert not arrivals.soon(20.0)


def test_a_later_load_may_end_first(arrivals: Arrivals) -> None:
    """It was refused, or failed."""
    arrivals.submitted(1, GIB, 10.0)
    arrivals.submitted(2, GIB, 10.0)
    arrivals.ended(2, 0, 0.0)
    assert arrivals.soon(10.0 + GIB / RATE)
    arrivals.ended(1, GIB, 0.1)
    assert not arrivals.soon(20.0)


def test_the_link_is_as_fast_as_it_was(arrivals: Arrivals) -> None:
    arrivals.ended(1, GIB, 0.1)
    arrivals.ended(2, TELLS - 1, 1.0)  # of latency
    arrivals.ended(3, 0, 0.0)
    arrivals.submitted(4, GIB, 10.0)
    assert not arrivals.soon(10.0 + 0.1 - 1.1 * PATIENCE)
    assert arrivals.soon(10.0 + 0.1 - 0.9 * PATIENCE)
