"""Where a daemon creates the directory of its sockets, and where clients search for it.

A runtime directory contains one directory per device, named by its UUID or "cpu". The daemon takes
the first that applies of its configuration, systemd's RUNTIME_DIRECTORY, the user's directory and
the temporary one. Clients do not know the daemon's environment, so they search all places.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# RuntimeDirectory=kvferry of the systemd unit.
SYSTEM_DIRECTORY = Path("/run/kvferry")
TEMPORARY = Path("/tmp")


def is_device(wanted: str, uuid: str) -> bool:
    """Whether `wanted` names the device with this UUID, as in CUDA_VISIBLE_DEVICES.

    A beginning is enough. The driver gives the UUID of a MIG instance as that of a GPU.
    """
    prefix = re.sub("^MIG-", "GPU-", wanted, flags=re.IGNORECASE)
    return uuid.lower().startswith(prefix.lower())


def default_directory() -> Path:
    """The runtime directory of a daemon whose configuration names none."""
    if systemd := os.environ.get("RUNTIME_DIRECTORY"):
        return Path(systemd.split(":")[0])
    return user_directory() or temporary_directory()


def search_directories() -> list[Path]:
    """Runtime directories that a daemon of this machine or user may have, the system's first."""
    return [path for path in (SYSTEM_DIRECTORY, user_directory(), temporary_directory()) if path]


def user_directory() -> Path | None:
    """$XDG_RUNTIME_DIR/kvferry, or None if the variable is not set."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvferry" if base else None


def temporary_directory() -> Path:
    """/tmp/kvferry-UID. Any user can create it: check its owner before use."""
    return TEMPORARY / f"kvferry-{os.getuid()}"
