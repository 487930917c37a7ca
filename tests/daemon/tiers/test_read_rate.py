"""How many bytes per second a tier reads, as far as its reads tell."""

from __future__ import annotations

import pytest

from kvferry.daemon.tiers.read_rate import ASSUMED, KNOWN_FOR, LATENCY, ReadRate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.rate = ReadRate(lambda: self.now)

    def read(self, seconds: float, nbytes: int, read_bytes: int) -> None:
        begun = self.rate.begin(nbytes)
        self.now += seconds
        self.rate.end(begun, nbytes, read_bytes)


def test_the_rate_follows_reads() -> None:
    clock = Clock()
    assert clock.rate.bytes_per_second == ASSUMED
    for _ in range(10):
        clock.read(1 + LATENCY, 10**8, 10**8)
    assert clock.rate.bytes_per_second == pytest.approx(1e8, rel=0.01)
    clock.read(2.0, 10**9, 0)  # late
    assert clock.rate.bytes_per_second < 5e7


def test_reads_share_the_rate_and_their_bytes_are_queued() -> None:
    clock = Clock()
    for _ in range(10):
        first, second = clock.rate.begin(10**8), clock.rate.begin(10**8)
        assert clock.rate.queue_seconds == 2e8 / clock.rate.bytes_per_second
        clock.now += 1.0
        clock.rate.end(first, 10**8, 10**8)
        clock.now += 1.0
        clock.rate.end(second, 10**8, 10**8)
    assert clock.rate.bytes_per_second == pytest.approx(1e8, rel=0.02)
    assert clock.rate.queued_bytes == 0


def test_short_reads_say_nothing_about_the_rate() -> None:
    clock = Clock()
    for _ in range(1000):
        clock.read(LATENCY / 2, 4096, 4096)
    assert clock.rate.bytes_per_second == ASSUMED
    clock.read(10 * LATENCY, 4096, 4096)  # one hiccup does not turn the tier off
    assert clock.rate.bytes_per_second > ASSUMED / 2


@pytest.mark.parametrize("rate", [5e7, 5e9])
def test_one_large_read_tells_the_rate_if_it_is_not_known(rate: float) -> None:
    clock, nbytes = Clock(), 64 << 20
    assert not clock.rate.is_known
    for _ in range(2):
        clock.read(nbytes / rate + LATENCY, nbytes, nbytes)
        assert 0.5 * rate < clock.rate.bytes_per_second < 1.5 * rate
        assert clock.rate.is_known
        clock.now += KNOWN_FOR + 1
        assert not clock.rate.is_known
        rate = 1e9


def test_a_read_that_was_not_answered_says_nothing_about_the_rate() -> None:
    clock = Clock()
    clock.rate.begin(10**8)
    clock.now += 2
    clock.rate.abandon(10**8)
    assert (clock.rate.bytes_per_second, clock.rate.queue_seconds) == (ASSUMED, 0.0)
