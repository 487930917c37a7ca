"""The measured rate of prefill: tokens of a prompt over the time to its first token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvferry.client.vllm.prefill_rate import PrefillRate


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int = 0


def computed(rate: PrefillRate, tokens: int, seconds: float, cached: int = 0) -> None:
    """A request is scheduled, and has its first token after so many seconds."""
    request = Request("request", cached + tokens)
    rate.begin(request, cached, 10.0)
    rate.observe(10.0 + seconds / 2)
    request.num_output_tokens = 1
    rate.observe(10.0 + seconds)


def test_the_rate_is_unknown_at_first() -> None:
    assert PrefillRate().seconds(1000) == 0.0


def test_it_is_that_of_the_tokens_that_no_cache_has() -> None:
    rate = PrefillRate()
    computed(rate, 8000, 0.5, cached=4000)
    assert rate.seconds(1000) == pytest.approx(1 / 16)


def test_short_prompts_count_until_there_is_a_long_one() -> None:
    """The fastest of them: they are computed at least as fast as they seem to be."""
    rate = PrefillRate()
    computed(rate, 10, 0.5, cached=9000)
    assert rate.seconds(1000) == 0.0
    for seconds in (0.5, 0.1, 0.5):
        computed(rate, 100, seconds, cached=9000)
        computed(rate, 10, 0.0001, cached=9000)
    assert rate.seconds(1000) == pytest.approx(1.0)
    computed(rate, 2000, 4.0)
    computed(rate, 100, 0.01)
    assert rate.seconds(1000) == pytest.approx(2.0)


def test_a_few_slow_prompts_do_not_change_it() -> None:
    rate = PrefillRate()
    for seconds in (1.0, 1.0, 1.0, 30.0, 30.0):
        computed(rate, 2000, seconds)
    assert rate.seconds(1000) == pytest.approx(0.5)


@pytest.mark.parametrize("tokens", [0, 1])
def test_the_last_step_of_a_request_counts_if_it_has_a_token(tokens: int) -> None:
    rate, request = PrefillRate(), Request("request", 2000)
    rate.begin(request, 0, 10.0)
    request.num_output_tokens = tokens
    rate.end("request", 12.0)
    assert rate.seconds(1000) == pytest.approx(tokens)
    rate.end("request", 20.0)
    assert rate.seconds(1000) == pytest.approx(tokens)


def test_a_preempted_prompt_says_nothing() -> None:
    rate, request = PrefillRate(), Request("request", 2000)
    rate.begin(request, 0, 10.0)
    rate.forget(["request", "other"])
    request.num_output_tokens = 1
    rate.observe(12.0)
    assert rate.seconds(1000) == 0.0
