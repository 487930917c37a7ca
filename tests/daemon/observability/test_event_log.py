"""RateLimiter: which events of each kind are logged."""

from __future__ import annotations

from kvferry.daemon.observability.event_log import MAX_KINDS, RateLimiter


def test_one_event_of_a_kind_passes_in_an_interval() -> None:
    limiter = RateLimiter(10.0)
    assert limiter.passes(("a",), 0.0) == 0
    assert [limiter.passes(("a",), 0.1 * n) for n in range(1, 6)] == [None] * 5
    assert limiter.passes(("b",), 1.0) == 0
    assert limiter.passes(("a",), 10.0) == 5
    assert limiter.passes(("a",), 20.0) == 0


def test_kinds_are_bounded() -> None:
    limiter = RateLimiter(10.0)
    for number in range(3 * MAX_KINDS):
        assert limiter.passes((str(number),), 0.0) == 0
    assert len(limiter._kinds) == MAX_KINDS
