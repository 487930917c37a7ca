"""The files of a disk tier, accessed without the tier."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvferry.daemon.tiers.disk.hints import HINTS, HintFile
from kvferry.daemon.tiers.disk.root_files import LOCK
from kvferry.daemon.tiers.pool_lock import wait_until_unlocked
from support.time_limits import TIMEOUT


def allocated_bytes(root: Path) -> int:
    """Bytes that the file system has allocated for a root and everything below it.

    Files that are deleted meanwhile do not count: another namespace may have their room already.
    """
    found = dict[str, os.stat_result]()
    for folder, _, files in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with suppress(FileNotFoundError):
                found[path] = os.lstat(path)
    total = 0
    for path, status in found.items():
        with suppress(FileNotFoundError):
            if os.lstat(path).st_ino == status.st_ino:
                total += status.st_blocks * 512
    return total


def keys_in_hints(directory: Path, key_bytes: int) -> set[bytes]:
    """The keys of a namespace, by its hint file. Raises FileNotFoundError if there is none."""
    file = HintFile(directory / HINTS, key_bytes, read_only=True)
    hints = file.read(range(file.nbytes // file.bytes_of(1)))
    file.close()
    return {hints.keys[slot] for slot in np.flatnonzero(hints.generations > 0).tolist()}


def lose_hints(root: Path, seconds: float = TIMEOUT) -> None:
    """Have the next process of the tier read the headers of all slots.

    Waits until the last process has ended. Raises TimeoutError after `seconds`.
    """
    with suppress(FileNotFoundError), (root / LOCK).open() as lock:
        if not wait_until_unlocked(lock.fileno(), seconds):
            raise TimeoutError(f"{root} is locked")
    for path in root.glob(f"*/{HINTS}"):
        path.unlink()
