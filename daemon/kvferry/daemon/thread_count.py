"""The threads that a daemon needs with its processes, for a check at start. Used by app.py."""

from __future__ import annotations

from kvferry.daemon.config import Config
from kvferry.daemon.memory.pool import TOUCH_THREADS

# Those of the daemon itself: of ZeroMQ, the device, the metrics and the executor; and those of the
# KV event publisher.
OWN_THREADS = 32
# Those of the sessions at seven siblings.
SIBLING_THREADS = 14
# Those of a tier's process. A tier of a user may have more.
TIER_THREADS = 16


def needed_threads(config: Config) -> int:
    """More threads than a daemon and its processes have at a time, processes included."""
    checksums = 1 + config.integrity.threads
    siblings = SIBLING_THREADS * config.siblings.enabled
    tiers = TIER_THREADS * len(config.tiers.used)
    return OWN_THREADS + TOUCH_THREADS + checksums + siblings + tiers
