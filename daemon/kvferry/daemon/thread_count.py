"""The threads that a daemon needs with its processes, for a check at start. Used by app.py."""

from __future__ import annotations

from kvferry.daemon.config import Config
from kvferry.daemon.memory.pool import TOUCH_THREADS

# Those of the daemon itself: of ZeroMQ, the device, the metrics and the executor; and those of the
# KV event publisher.
OWN_THREADS = 32
# Those of a tier's process. A tier of a user may have more.
TIER_THREADS = 16


def needed_threads(config: Config) -> int:
    """More threads than a daemon and its processes have at a time, processes included."""
    checksums = 1 + config.integrity.threads
    tiers = len(config.tiers.used) + config.siblings.enabled
    return OWN_THREADS + TOUCH_THREADS + checksums + TIER_THREADS * tiers
