"""The files of a disk tier, from outside."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvferry.daemon.tiers.disk.recovery import BOOT_ID, STATE
from kvferry.daemon.tiers.disk.root_files import LOCK
from kvferry.daemon.tiers.pool_lock import wait_until_unlocked


def allocated_bytes(root: Path) -> int:
    """What the file system has allocated for a root and all below it."""
    total = 0
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with suppress(FileNotFoundError):
                total += os.lstat(path).st_blocks * 512
    return total


def pretend_reboot(root: Path, seconds: float = 30.0) -> None:
    """Have the next process of the tier believe that the system has booted since.

    Waits until the last one is dead. Where that closed the tier cleanly, or never had it,
    nothing changes.
    """
    with suppress(FileNotFoundError), (root / LOCK).open() as lock:
        if not wait_until_unlocked(lock.fileno(), seconds):
            raise TimeoutError(f"{root} is locked")
    state, boot_id = root / STATE, BOOT_ID.read_text().strip()
    with suppress(FileNotFoundError):
        state.write_text(state.read_text().replace(boot_id, "another"))
