"""The files of a disk tier, accessed without the tier."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvferry.daemon.tiers.disk.recovery import BOOT_ID, STATE
from kvferry.daemon.tiers.disk.root_files import LOCK
from kvferry.daemon.tiers.pool_lock import wait_until_unlocked


def allocated_bytes(root: Path) -> int:
    """Bytes that the file system has allocated for a root and everything below it."""
    total = 0
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with suppress(FileNotFoundError):
                total += os.lstat(path).st_blocks * 512
    return total


def pretend_reboot(root: Path, seconds: float = 30.0) -> None:
    """Make the next process of the tier detect another boot id.

    Waits until the last process has ended. Changes nothing if that process closed the tier
    cleanly, or if there has been none. Raises TimeoutError after `seconds`.
    """
    with suppress(FileNotFoundError), (root / LOCK).open() as lock:
        if not wait_until_unlocked(lock.fileno(), seconds):
            raise TimeoutError(f"{root} is locked")
    state, boot_id = root / STATE, BOOT_ID.read_text().strip()
    with suppress(FileNotFoundError):
        state.write_text(state.read_text().replace(boot_id, "another"))
