"""Where a daemon is found: a folder with its two sockets, named by the device's UUID or "cpu"."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.fd_passing import MAX_SOCKET_PATH
from kvferry.proto.runtime_directory import search_directories, temporary_directory


def runtime_directories() -> list[Path]:
    """Where daemons put their folders, the system's first.

    Below /tmp anybody makes any folder: one of another user is no place of ours.
    """
    places, ours = search_directories(), temporary_directory()
    return [path for path in places if path != ours or _taken_by(ours) is None]


def _taken_by(place: Path) -> int | None:
    """Who else has it, or made a link of it."""
    try:
        about = place.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(about.st_mode) and about.st_uid in (0, os.getuid())
    return None if ours else about.st_uid


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

    Raises Refused (FORBIDDEN) where it may be in a folder that is closed to this user, or where
    another one has this user's, else Gone (DAEMON_GONE), naming what was found instead.
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
        if (user := _taken_by(temporary_directory())) is not None:
            message = f"the folder of your daemons is taken by user {user}: have it removed"
            raise Refused(Code.FORBIDDEN, message, str(temporary_directory()))
    wanted = f"for device {device}" if device else "whose folder was not named"
    seen = ", ".join(str(path) for path in found or places)
    message = "several daemons run: name one's folder" if found else "no daemon runs"
    raise Gone(Code.DAEMON_GONE, f"{message} ({wanted}; looked at: {seen})", device or "")


def folder_in(directory: Path) -> Path | None:
    """`directory` where a daemon has its sockets there, or the one folder in it where one has.

    Raises Gone (DAEMON_GONE) where several have.
    """
    found, closed = look_for([directory])
    folders = found + closed
    if len(folders) > 1 and folders[0] != directory:
        seen = ", ".join(map(str, folders))
        raise Gone(Code.DAEMON_GONE, "several daemons run here: name one's folder", seen)
    return folders[0] if folders else None


# Seconds between two looks for a daemon that has not started yet.
LOOK_EVERY = 0.02


def has_daemon(directory: Path | str | None) -> bool:
    """Whether a daemon has its sockets in a named folder, or in the one folder below it.

    Which of the two it will be is not known before a daemon starts, so a client that is to wait for
    one looks again before it connects. Raises as `named` and `check_open`.
    """
    if directory is None:
        return True
    check_open(named(Path(directory)))
    return folder_in(Path(directory)) is not None


def named(directory: Path) -> Path:
    """The folder that a client means: where no daemon has its sockets yet, one may still come.

    Raises Refused (BAD_CONFIG) where none can, and as `folder_in`.
    """
    folder = folder_in(directory) or directory
    if len(os.fsencode(folder / "kvferry.sock")) > MAX_SOCKET_PATH:
        message = f"a socket's path has at most {MAX_SOCKET_PATH} bytes: name a shorter folder"
        raise Refused(Code.BAD_CONFIG, message, str(folder / "kvferry.sock"))
    if folder.exists() and not folder.is_dir():
        message = "a daemon is named by the folder of its sockets, and this is none"
        raise Refused(Code.BAD_CONFIG, message, str(folder))
    return folder


def unanswered(directory: Path) -> Gone:
    """No daemon answered in time, and what is to be seen of it."""
    why = ""
    if not directory.is_dir():
        why = ": there is no such folder"
    elif not os.path.lexists(directory / "kvferry.sock"):
        why = ": there is no kvferry.sock in this folder"
    return Gone(Code.TIMEOUT, f"no daemon answered in time{why}", str(directory))


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
        "the daemon's files do not let your user in: add it to the group of its access.group, "
        "and log in again",
        str(directory),
    )
