"""When a load is expected to end, and how long a step waits for it."""

from __future__ import annotations

import pytest

from kvferry.client.vllm.load_eta import (
    DEFAULT_RATE,
    GRACE,
    MAX_WAIT,
    MIN_MEASURED_BYTES,
    SAMPLES,
    LoadEta,
)

GIB = 1 << 30
# Before the lead, and in it.
EARLY, LATE = -1.1 * MAX_WAIT, -0.9 * MAX_WAIT


@pytest.fixture
def arrivals() -> LoadEta:
    return LoadEta()


def loaded(arrivals: LoadEta, job_id: int, began: float, delay: float, seconds: float) -> None:
    """A load of a GiB, with none before it."""
    arrivals.load_submitted(job_id, GIB, began)
    arrivals.job_completed(job_id, GIB, seconds, began + delay + seconds)


def test_a_load_is_awaited_when_its_bytes_can_be_there(arrivals: LoadEta) -> None:
    assert arrivals.wait_seconds(0.0) == 0
    arrivals.load_submitted(1, GIB, 10.0)
    due = 10.0 + GIB / DEFAULT_RATE
    assert arrivals.wait_seconds(due + EARLY) == 0
    assert arrivals.wait_seconds(due + LATE) == pytest.approx(-LATE + GRACE)
    assert arrivals.wait_seconds(due) == pytest.approx(GRACE)
    assert arrivals.wait_seconds(due + 1) == GRACE  # it is late


def test_loads_come_one_behind_the_other(arrivals: LoadEta) -> None:
    arrivals.load_submitted(1, GIB, 10.0)
    arrivals.load_submitted(2, GIB, 10.0)
    arrivals.job_completed(1, GIB, GIB / DEFAULT_RATE, 10.0 + GIB / DEFAULT_RATE)
    assert arrivals.wait_seconds(10.0 + GIB / DEFAULT_RATE) == 0
    assert arrivals.wait_seconds(10.0 + 2 * GIB / DEFAULT_RATE) > 0
    arrivals.job_completed(2, 0, 0.0, 10.0)
    assert arrivals.wait_seconds(20.0) == 0


def test_a_later_load_may_end_first(arrivals: LoadEta) -> None:
    """It was refused, or failed."""
    arrivals.load_submitted(1, GIB, 10.0)
    arrivals.load_submitted(2, GIB, 10.0)
    arrivals.job_completed(2, 0, 0.0, 10.0)
    assert arrivals.wait_seconds(10.0 + GIB / DEFAULT_RATE) > 0
    arrivals.job_completed(1, GIB, 0.1, 10.1)
    assert arrivals.wait_seconds(20.0) == 0


def test_the_link_is_as_fast_as_it_was_at_its_best(arrivals: LoadEta) -> None:
    for number, seconds in enumerate((0.1, 0.09, 0.12)):
        loaded(arrivals, number, 10.0 * number, 0.0, seconds)
    arrivals.job_completed(70, GIB, 0.01, 30.1)  # a store
    for job_id, nbytes, seconds in (
        (71, MIN_MEASURED_BYTES - 1, 1e-5),
        (72, 0, 0.0),
    ):  # these tell of latency
        arrivals.load_submitted(job_id, nbytes, 40.0)
        arrivals.job_completed(job_id, nbytes, seconds, 40.0)
    arrivals.load_submitted(9, GIB, 50.0)
    assert arrivals.wait_seconds(50.09 + EARLY) == 0
    assert arrivals.wait_seconds(50.09 + LATE) > 0


def test_a_load_is_on_its_way_for_a_while_first(arrivals: LoadEta) -> None:
    """As the least of the last ones was, that waited for no other."""
    for number, delay in enumerate((0.004, 0.002, 0.003)):
        loaded(arrivals, number, 10.0 * number, delay, 0.1)
    arrivals.load_submitted(8, GIB, 50.0)
    arrivals.load_submitted(9, GIB, 50.0)
    assert arrivals.wait_seconds(50.102 + EARLY) == 0
    assert arrivals.wait_seconds(50.102 + LATE) > 0
    arrivals.job_completed(8, GIB, 0.1, 50.102)
    assert arrivals.wait_seconds(50.202 + EARLY) == 0
    arrivals.job_completed(
        9, GIB, 0.1, 50.202
    )  # it waited for the other: that is not a delay of its own
    arrivals.load_submitted(10, GIB, 60.0)
    assert arrivals.wait_seconds(60.102 + EARLY) == 0
    assert arrivals.wait_seconds(60.102 + LATE) > 0


def test_old_loads_are_forgotten(arrivals: LoadEta) -> None:
    loaded(arrivals, 1, 10.0, 0.0, 0.05)
    for number in range(SAMPLES):
        loaded(arrivals, 10 + number, 20.0 + 10 * number, 0.005, 0.1)
    arrivals.load_submitted(99, GIB, 500.0)
    assert arrivals.wait_seconds(500.105 + EARLY) == 0
    assert arrivals.wait_seconds(500.105 + LATE) > 0
