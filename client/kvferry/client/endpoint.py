"""Where a daemon is found: a folder with its two sockets, named by the device's UUID or "cpu"."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from kvferry.proto.errors import Code, Gone, Refused

SYSTEM_DIRECTORY = Path("/run/kvferry")


def runtime_directories() -> list[Path]:
    """Where daemons put their folders, the system's first."""
    places = [SYSTEM_DIRECTORY]
    if user := os.environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(user) / "kvferry")
    return [*places, Path(f"/tmp/kvferry-{os.getuid()}")]


def look_for(places: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Folders with a daemon's socket, and folders that this user may not look into.

    Each place may be such a folder itself, or hold some.
    """
    found: list[Path] = []
    closed: list[Path] = []
    for path in (path for place in places for path in (place, *_folders_in(place))):
        try:
            if stat.S_ISSOCK((path / "kvferry.sock").stat().st_mode):
                found.append(path)
        except PermissionError:
            closed.append(path)
        except OSError:
            pass
    return found, closed


def _folders_in(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir())
    except OSError:
        return []


def find_daemon(device: str | None = None) -> Path:
    """The folder of the daemon of a device ("cpu" or "GPU-..."), or of the only one there is.

    Raises Refused (FORBIDDEN) where it may be in a folder that is closed to this user, else Gone
    (DAEMON_GONE), naming what was found instead.
    """
    places = runtime_directories()
    found, closed = look_for(places)
    found = [path for path in found if device in (None, path.name)]
    if len(found) == 1 or (found and device is not None):
        return found[0]
    if not found:
        for path in filter(os.path.exists, closed):  # what cannot even be seen says nothing
            if device in (None, path.name) or path in places:
                raise _forbidden(path)
    wanted = f"for device {device}" if device else "whose folder was not named"
    seen = ", ".join(str(path) for path in found or places)
    message = "several daemons run: name one's folder" if found else "no daemon runs"
    raise Gone(Code.DAEMON_GONE, f"{message} ({wanted}; looked at: {seen})", device or "")


def check_open(directory: Path) -> None:
    """Raise Refused (FORBIDDEN) where a daemon's files do not let this process's user in."""
    path = directory / "kvferry.sock"

    def in_vain() -> bool:
        return not os.access(path, os.W_OK, effective_ids=True)

    try:
        closed = in_vain() and path.exists() and in_vain()  # it comes and goes (a daemon's Door)
    except PermissionError:
        closed = True
    if closed:
        raise _forbidden(directory)


def _forbidden(directory: Path) -> Refused:
    return Refused(
        Code.FORBIDDEN,
        "the daemon's files do not let your user in: have it put into a group of its "
        "limits.allow_groups, or into limits.allow_uids, and log in anew",
        str(directory),
    )
