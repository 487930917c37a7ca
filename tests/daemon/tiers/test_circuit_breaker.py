"""When the breaker of a tier opens, and for how long."""

from __future__ import annotations

import pytest

from kvferry.daemon.tiers.circuit_breaker import LONGEST_OFF, MAX_ERRORS, CircuitBreaker


class BreakerClock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> BreakerClock:
    return BreakerClock()


def test_errors_in_a_row_open_it(clock: BreakerClock) -> None:
    breaker = CircuitBreaker(clock)
    for _ in range(3):  # a success in between starts the count again
        for _ in range(MAX_ERRORS - 1):
            breaker.record_error()
        breaker.record_success()
    assert (breaker.state, breaker.admit()) == ("closed", True)
    for _ in range(MAX_ERRORS):
        breaker.record_error()
    assert (breaker.state, breaker.admit(), breaker.openings) == ("open", False, 1)


def test_it_stays_open_for_twice_as_long_each_time_and_admits_one_probe(
    clock: BreakerClock,
) -> None:
    breaker = CircuitBreaker(clock)
    breaker.trip()
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        clock.seconds += seconds - 0.01
        assert not breaker.admit()
        clock.seconds += 0.02
        assert breaker.state == "half_open"
        assert [breaker.admit() for _ in range(3)] == [True, False, False]
        breaker.record_error()
        assert breaker.state == "open"
    clock.seconds += LONGEST_OFF + 1
    assert breaker.admit()
    breaker.record_success()
    assert breaker.state == "closed"
    breaker.trip()
    clock.seconds += 1.01
    assert breaker.admit()


def test_a_probe_that_tells_nothing_is_followed_by_another(clock: BreakerClock) -> None:
    breaker = CircuitBreaker(clock)
    breaker.trip()
    clock.seconds += 1.01
    assert breaker.admit()
    breaker.end_probe()
    assert breaker.state == "half_open"
    assert breaker.admit()
