"""Finds daemons by their runtime directories, which are named by the GPU's UUID or "cpu"."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.fd_passing import MAX_SOCKET_PATH
from kvferry.proto.runtime_directory import is_device, search_directories, temporary_directory


def runtime_directories() -> list[Path]:
    """Directories below which daemons have their runtime directories, the system's first.

    In /tmp any user can create any directory, so one of another user is left out.
    """
    directories, temporary = search_directories(), temporary_directory()
    return [path for path in directories if path != temporary or _foreign_owner(temporary) is None]


def _foreign_owner(directory: Path) -> int | None:
    """The owner of a directory or link, if it is another user."""
    try:
        status = directory.lstat()
    except OSError:
        return None
    trusted = stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.getuid())
    return None if trusted else status.st_uid


def find_daemons(directories: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Runtime directories with a daemon's socket, and directories that this user cannot read.

    Each of `directories` may be a runtime directory itself, or contain some.
    """
    found: list[Path] = []
    inaccessible: list[Path] = []
    for path in (
        path for directory in directories for path in (directory, *_subdirectories(directory))
    ):
        try:
            if stat.S_ISSOCK((path / "kvferry.sock").stat().st_mode):
                found.append(path)
        except PermissionError:
            inaccessible.append(path)
        except OSError:
            pass
    return found, inaccessible


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir())
    except OSError:
        return []


def find_daemon(device: str | None = None) -> Path:
    """The runtime directory of the daemon of a device, or of the only daemon.

    device: "cpu", or as in CUDA_VISIBLE_DEVICES: "GPU-..." or "MIG-...", which may be shortened.

    Raises Refused: SEVERAL_DAEMONS, naming them; FORBIDDEN if it may be in a directory that this
    user cannot read, or if another user has taken this user's directory in /tmp. Raises Gone
    (DAEMON_GONE), naming the directories that were searched.
    """
    directories = runtime_directories()
    found, inaccessible = find_daemons(directories)
    if device is not None:
        found = [path for path in found if is_device(device, path.name)]
    if len({path.name for path in found}) == 1 and (device is not None or len(found) == 1):
        return found[0]
    if not found:
        for path in filter(os.path.exists, inaccessible):  # it may not exist
            if device is None or is_device(device, path.name) or path in directories:
                raise _access_error(path)
        if (user := _foreign_owner(temporary_directory())) is not None:
            message = (
                f"the runtime directory of your daemons belongs to user {user}; have it removed"
            )
            raise Refused(Code.FORBIDDEN, message, str(temporary_directory()))
    if found:
        raise _several_daemons(found)
    seen = ", ".join(map(str, directories))
    wanted = f" for device {device}" if device else ""
    message = f"no daemon runs{wanted}; start kvferryd (searched: {seen})"
    raise Gone(Code.DAEMON_GONE, message, device or "")


def _several_daemons(found: Sequence[Path]) -> Refused:
    seen = ", ".join(map(str, found))
    message = f"{len(found)} daemons run; name the directory of one: {seen}"
    return Refused(Code.SEVERAL_DAEMONS, message, seen)


def find_all_daemons(directory: Path | None) -> list[Path]:
    """The runtime directories of all daemons: in `directory`, or those that clients search.

    Raises as find_daemon, but not SEVERAL_DAEMONS.
    """
    found, inaccessible = find_daemons(runtime_directories() if directory is None else [directory])
    if found or (directory is not None and inaccessible):
        return found or inaccessible
    if directory is None:
        return [find_daemon()]  # its error names the searched directories
    message = f"no kvferry.sock in {directory} or a directory in it; start kvferryd, or name "
    message += "another directory"
    raise Gone(Code.DAEMON_GONE, message, str(directory))


def find_daemon_in(directory: Path) -> Path | None:
    """`directory` if it is a runtime directory with a daemon's socket, or the only one in it.

    None if there is no daemon. Raises Refused (SEVERAL_DAEMONS).
    """
    found, inaccessible = find_daemons([directory])
    candidates = found + inaccessible
    if len(candidates) > 1 and candidates[0] != directory:
        raise _several_daemons(candidates)
    return candidates[0] if candidates else None


# Seconds between two searches for a daemon that has not started yet.
FIND_INTERVAL = 0.02


def has_daemon(directory: Path | str | None) -> bool:
    """Whether there is a daemon in `directory`, or in the only runtime directory in it.

    Which of the two it will be is not known before the daemon starts, so a client that waits for it
    searches again before it connects. Raises as resolve_directory and check_access.
    """
    if directory is None:
        return True
    check_access(resolve_directory(Path(directory)))
    return find_daemon_in(Path(directory)) is not None


def resolve_directory(directory: Path) -> Path:
    """The runtime directory to connect to; `directory` itself if there is no daemon yet.

    Raises Refused (BAD_CONFIG) if no daemon can be there, and as find_daemon_in.
    """
    try:
        os.fsencode(directory).decode()
    except UnicodeError as error:
        message = "the directory's name is not UTF-8, so no daemon can be there; name another one"
        raise Refused(Code.BAD_CONFIG, message, ascii(str(directory))) from error
    found = find_daemon_in(directory)
    directory = found or directory
    if len(os.fsencode(directory / "kvferry.sock")) > MAX_SOCKET_PATH:
        message = (
            f"the socket's path is longer than {MAX_SOCKET_PATH} bytes; use a shorter directory"
        )
        raise Refused(Code.BAD_CONFIG, message, str(directory / "kvferry.sock"))
    if found is None and directory.exists() and not directory.is_dir():
        message = (
            "not a runtime directory of kvferryd; name the directory that has its kvferry.sock"
        )
        raise Refused(Code.BAD_CONFIG, message, str(directory))
    return directory


def locate_daemon(directory: Path | str | None) -> Path:
    """The runtime directory to connect to. Raises as find_daemon or resolve_directory, and as
    check_access."""
    path = resolve_directory(Path(directory)) if directory else find_daemon()
    check_access(path)
    return path


def no_reply_error(directory: Path) -> Gone:
    """Return the error for a reply that did not come in time. It names what the directory lacks."""
    why = ""
    if not directory.is_dir():
        why = ": the directory does not exist; start kvferryd, or name another directory"
    elif not os.path.lexists(directory / "kvferry.sock"):
        why = ": the directory has no kvferry.sock; start kvferryd, or name another directory"
    return Gone(Code.TIMEOUT, f"no reply from a daemon in time{why}", str(directory))


def check_access(directory: Path) -> None:
    """Raise Refused (FORBIDDEN) if file permissions deny this user access to the socket."""
    path = directory / "kvferry.sock"

    def denied() -> bool:
        return not os.access(path, os.W_OK, effective_ids=True)

    try:
        # Checked twice, because a full daemon removes its socket for a moment.
        inaccessible = denied() and path.exists() and denied()
    except PermissionError:
        inaccessible = True
    if inaccessible:
        raise _access_error(directory)


def _access_error(directory: Path) -> Refused:
    return Refused(
        Code.FORBIDDEN,
        "file permissions deny your user access to the daemon; add it to the group of its "
        "access.group, and log in again",
        str(directory),
    )


def daemon_pid(directory: Path) -> int | None:
    """The process in the lock file of a runtime directory; None if it is dead, or not known."""
    try:
        pid = int((directory / "lock").read_text())
    except (OSError, ValueError):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # it is of another user
        pass
    return pid
