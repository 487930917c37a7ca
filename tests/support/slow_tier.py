"""A disk tier that reads no faster than a given rate: a custom tier for measurements.

Options: those of the disk tier, and `rate`, in bytes per second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from kvferry.daemon.tiers.base import Blocks, Fetched, HostMemory, Tier
from kvferry.daemon.tiers.disk import open_tier as open_disk


class SlowTier:
    """A tier whose fetches share one rate, in all threads."""

    def __init__(self, tier: Tier, rate: float) -> None:
        self._tier, self._rate = tier, rate
        self._lock, self._free_at = threading.Lock(), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def fetch(self, blocks: Blocks, deadline: float) -> Sequence[Fetched]:
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + len(blocks.keys) * blocks.nbytes / self._rate
            wait = min(self._free_at, deadline) - time.monotonic()
        time.sleep(max(0.0, wait))
        return self._tier.fetch(blocks, deadline)


def open_tier(options: dict[str, Any], memory: HostMemory) -> SlowTier:
    rate = float(options.pop("rate"))
    return SlowTier(open_disk(options, memory), rate)
