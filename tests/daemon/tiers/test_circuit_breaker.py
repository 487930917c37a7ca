"""When the breaker of a tier opens, and for how long."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvferry.daemon.tiers.circuit_breaker import MAX_ERRORS, CircuitBreaker


class ClockedBreaker(CircuitBreaker):
    """A CircuitBreaker with a clock that the test sets. opened_for: the seconds of each opening."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.opened_for: list[float] = []
        super().__init__(lambda: self.seconds, 1.0, 60.0, Counter())

    @property
    def openings(self) -> int:
        return self._counts["openings"]

    def trip(self) -> None:
        before = self.openings
        super().trip()
        if self.openings > before:
            assert self._until is not None
            self.opened_for.append(self._until - self.seconds)

    def become_half_open(self) -> None:
        self.seconds += self.opened_for[-1] + 0.01
        assert self.state == "half_open"

    def close_by_probe(self) -> None:
        self.become_half_open()
        assert self.begin_probe()
        self.end_probe(answered=True)
        assert self.state == "closed"


@pytest.fixture
def breaker() -> ClockedBreaker:
    return ClockedBreaker()


@pytest.mark.parametrize("late", [False, True])
def test_errors_or_late_lookups_in_a_row_open_it(breaker: ClockedBreaker, late: bool) -> None:
    def fail() -> None:
        if late:
            breaker.record_lookup(in_time=False)
        else:
            breaker.record_lookup(in_time=True)  # which says nothing about reads
            breaker.record_error()

    for _ in range(3):  # a success in between starts the count again
        for _ in range(MAX_ERRORS - 1):
            fail()
        breaker.record_lookup(in_time=True)
        breaker.record_success()
    assert breaker.state == "closed"
    for _ in range(MAX_ERRORS):
        fail()
    assert (breaker.state, breaker.openings) == ("open", 1)


def test_it_stays_open_for_twice_as_long_each_time_a_probe_fails(breaker: ClockedBreaker) -> None:
    breaker.trip()
    for _ in range(7):
        assert not breaker.begin_probe()
        breaker.become_half_open()
        assert [breaker.begin_probe() for _ in range(3)] == [True, False, False]
        assert breaker.state == "half_open"
        breaker.end_probe(answered=False)
        assert breaker.state == "open"
        breaker.trip()  # changes nothing
    assert breaker.opened_for == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("late", [True, False])
def test_after_a_probe_one_error_opens_it_until_a_block_was_moved(
    breaker: ClockedBreaker, late: bool
) -> None:
    def fail() -> None:
        if late:
            breaker.record_lookup(in_time=False)
        else:
            breaker.record_error()

    breaker.trip()
    for _ in range(2):
        breaker.close_by_probe()
        fail()
        assert breaker.state == "open"
    breaker.close_by_probe()
    breaker.record_success()
    fail()
    assert breaker.state == "closed"
    breaker.trip()
    assert breaker.opened_for == [1, 2, 4, 1]


def test_a_death_during_a_probe_opens_it(breaker: ClockedBreaker) -> None:
    breaker.trip()
    breaker.become_half_open()
    assert breaker.begin_probe()
    breaker.trip()
    breaker.end_probe(answered=True)  # too late
    assert (breaker.state, breaker.opened_for) == ("open", [1, 2])


@pytest.mark.virtual_time
async def test_until_half_open_returns_when_the_breaker_is_half_open() -> None:
    loop = asyncio.get_running_loop()
    breaker = CircuitBreaker(loop.time, 60.0, 60.0, Counter())
    for _ in range(2):
        waiting = asyncio.create_task(breaker.until_half_open())
        await asyncio.sleep(1000)
        assert not waiting.done()  # it is closed
        tripped = loop.time()
        breaker.trip()
        await waiting
        assert loop.time() == pytest.approx(tripped + 60)
        assert breaker.begin_probe()
        breaker.end_probe(answered=True)
