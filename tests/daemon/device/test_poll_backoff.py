"""Poll back-off: sleeps grow with the time since the last event, within limits."""

from __future__ import annotations

import pytest

from kvferry.daemon.device.poll_backoff import MAX_FENCE_POLL, MAX_POLL, MIN_POLL, PollBackoff


@pytest.mark.parametrize("longest", [MAX_POLL, MAX_FENCE_POLL])
def test_a_sleep_is_an_eighth_of_the_time_since_the_last_event(longest: float) -> None:
    now = 5.0
    backoff = PollBackoff(lambda: now)
    backoff.reset()
    assert backoff.next(longest) == MIN_POLL
    now += 4 * longest
    assert backoff.next(longest) == pytest.approx(longest / 2)
    now += 1
    assert backoff.next(longest) == longest
    backoff.reset()
    assert backoff.next(longest) == MIN_POLL
