"""Where a daemon is found: a folder with its two sockets, named by the device's UUID or "cpu"."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.proto.errors import Code, Gone

SYSTEM_DIRECTORY = Path("/run/kvferry")


def runtime_directories() -> list[Path]:
    """Where daemons put their folders, the system's first."""
    places = [SYSTEM_DIRECTORY]
    if user := os.environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(user) / "kvferry")
    return [*places, Path(f"/tmp/kvferry-{os.getuid()}")]


def find_daemon(device: str | None = None) -> Path:
    """The folder of the daemon of a device ("cpu" or "GPU-..."), or of the only one there is.

    Raises Gone (DAEMON_GONE), naming what was found instead.
    """
    found: list[Path] = []
    for place in runtime_directories():
        for path in [place, *sorted(place.glob("*"))] if place.is_dir() else []:
            if (path / "kvferry.sock").exists() and device in (None, path.name):
                found.append(path)
    if len(found) == 1 or (found and device is not None):
        return found[0]
    wanted = f"for device {device}" if device else "whose folder was not named"
    seen = ", ".join(str(path) for path in found or runtime_directories())
    message = "several daemons run: name one's folder" if found else "no daemon runs"
    raise Gone(Code.DAEMON_GONE, f"{message} ({wanted}; looked at: {seen})", device or "")
