"""File descriptors of this process."""

from __future__ import annotations

import os
from contextlib import suppress


def is_open(descriptor: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def count_memfds(name: str) -> int:
    """Open descriptors of memfds with this name."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += f"memfd:{name} " in os.readlink(f"/proc/self/fd/{descriptor}")
    return count
