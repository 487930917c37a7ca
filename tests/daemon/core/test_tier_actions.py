"""The limits of the core and of the tiers agree. Neither imports the other."""

from __future__ import annotations

from kvferry.daemon.core.tier_actions import MAX_TIER_KEYS
from kvferry.daemon.tiers.messages import MAX_KEYS


def test_a_tier_accepts_as_many_keys_as_the_core_asks_for() -> None:
    assert MAX_TIER_KEYS == MAX_KEYS
