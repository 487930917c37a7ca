"""The measured rate of prefill: from long steps that follow each other."""

from __future__ import annotations

import pytest

from kvferry.client.vllm.prefill_rate import PrefillRate


def test_the_rate_is_unknown_at_first() -> None:
    assert PrefillRate().seconds(1000) == 0.0


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        ([(8192, 10.0), (1, 10.5)], 1000 / 16384),  # the step with the prompt took half a second
        ([(8, 10.0), (8192, 10.1)], 0.0),  # a step of decoding says nothing
        ([(8192, 10.0), (8192, 20.0)], 0.0),  # idle in between
    ],
)
def test_a_long_step_ends_where_the_next_begins(
    steps: list[tuple[int, float]], seconds: float
) -> None:
    rate = PrefillRate()
    for tokens, now in steps:
        rate.step_scheduled(tokens, now)
    assert rate.seconds(1000) == pytest.approx(seconds)


def test_one_slow_step_changes_the_rate_a_little() -> None:
    rate = PrefillRate()
    for number in range(10):
        rate.step_scheduled(1000, float(number))
    rate.step_scheduled(1000, 13.0)
    assert 1.0 < rate.seconds(1000) < 1.3
