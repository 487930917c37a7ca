"""The host pool of a daemon, accessed from another process."""

from __future__ import annotations

import os
from pathlib import Path


def pool_files(pid: int) -> list[Path]:
    """The chunks of a daemon's host pool, as files that can be opened, in order."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:kvferry-pool" in os.readlink(path):
                found.append(path)
        except FileNotFoundError:  # the daemon has just closed it
            continue
    return sorted(found, key=lambda path: int(path.name))
