"""The lock on the host pool: each tier process holds it as long as it can write into the pool.

It is a shared flock on the first chunk, so it needs no file, and it is found by whoever gets the
pool next, whatever tiers that daemon has. A lock belongs to an open file: one that was inherited or
sent is the same, so the chunk is opened again.
"""

from __future__ import annotations

import fcntl
import os
import time

# Seconds between two attempts.
POLL_INTERVAL = 0.02


def lock_pool(chunk: int) -> int:
    """Lock the pool whose first chunk has this descriptor, until the returned one is closed.

    Called at the start of a tier process.
    """
    descriptor = _open_again(chunk)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def wait_until_unlocked(chunk: int, seconds: float) -> bool:
    """Whether no process holds the lock, or all release it within `seconds`.

    Blocks; called at the start of the daemon, before the event loop runs.
    """
    descriptor = _open_again(chunk)
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_INTERVAL)
            else:
                return True
    finally:
        os.close(descriptor)


def _open_again(chunk: int) -> int:
    return os.open(f"/proc/self/fd/{chunk}", os.O_RDONLY | os.O_CLOEXEC)
