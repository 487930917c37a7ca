"""How long the device worker sleeps between two looks."""

from __future__ import annotations

import pytest

from kvferry.daemon.device.poll_backoff import MAX_FENCE_POLL, MAX_POLL, MIN_POLL, PollBackoff


@pytest.mark.parametrize("longest", [MAX_POLL, MAX_FENCE_POLL])
def test_sleeps_double_up_to_a_bound_and_start_again(longest: float) -> None:
    backoff = PollBackoff()
    sleeps = [backoff.next(longest) for _ in range(12)]
    assert sleeps[:3] == pytest.approx([MIN_POLL, 2 * MIN_POLL, 4 * MIN_POLL])
    assert sleeps[-2:] == [longest, longest]
    backoff.reset()
    assert backoff.next(longest) == MIN_POLL


def test_a_chunk_in_flight_shortens_the_sleep_of_a_fence() -> None:
    backoff = PollBackoff()
    for _ in range(12):
        backoff.next(MAX_FENCE_POLL)
    assert backoff.next(MAX_POLL) == MAX_POLL
