"""The lock on the root of a tier: its process holds it as long as it can touch the host pool.

Called at start, before the event loop runs.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

LOCK = "lock"
# Seconds between two attempts.
POLL_INTERVAL = 0.02


def wait_until_unlocked(root: Path, seconds: float) -> bool:
    """Whether no process holds the lock, or releases it within `seconds`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(root / LOCK, flags)
    except OSError:
        return True
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_INTERVAL)
            else:
                return True
    finally:
        os.close(descriptor)
