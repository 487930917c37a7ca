"""File descriptors of this process."""

from __future__ import annotations

import os


def is_open(descriptor: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")
