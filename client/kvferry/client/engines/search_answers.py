"""Waiting for the answer to a search below the host pool: a scheduler must not wait long."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.client.tier_searches import Prefetch

# Seconds for which a request waits, at most. An answer takes 0.3 ms; a request that is looked up
# again waits for a step of the engine, 250 ms if others are prefilled.
ANSWER_SECONDS = 0.002
# Seconds between two polls.
POLL_SECONDS = 50e-6


def wait_answer(search: Prefetch, poll: Callable[[], None]) -> bool:
    """Wait for the answers of all daemons; returns whether they came. poll: receives messages."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not search.done and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        poll()
    return search.done
