"""The runtime directory of one device: its files, its permissions, and the lock on it.

    <runtime directory>/<device UUID or "cpu">/
        lock           held with flock for the daemon's life; holds its pid
        kvferry.sock   ZeroMQ ROUTER
        fds.sock       file descriptors, which ZeroMQ cannot carry
        events.sock    ZeroMQ PUB: KV events

The lock is taken first: a second bind to the path of a live ipc socket would succeed, and the first
server would get no new connections. The directory belongs to the daemon's user, its parent to the
same user or root. With an access group, the directory has mode 0750 and the sockets have 0660, with
that group; without one, 0700 and 0600. Called at start and on the event loop.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from kvferry.daemon.access.admission import Admission
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fd_passing import MAX_SOCKET_PATH


def closed_path(path: Path) -> Path:
    """The path of the socket while new clients are not accepted."""
    return path.with_suffix(".full")


def file_of(path: Path) -> tuple[int, int]:
    """Device and inode of a path. Raises OSError."""
    status = path.lstat()
    return status.st_dev, status.st_ino


def remove_own(path: Path, file: tuple[int, int]) -> None:
    """Remove a socket if it is still this file: another daemon may have bound one there."""
    for place in (path, closed_path(path)):
        with suppress(OSError):
            if file_of(place) == file:
                place.unlink()


class Endpoint:
    """The runtime directory, locked until `close`. Raises Refused (ENDPOINT_IN_USE, BAD_CONFIG)."""

    def __init__(self, directory: Path, admission: Admission) -> None:
        self.directory, self.admission = directory, admission
        self.messages = directory / "kvferry.sock"
        self.descriptors = directory / "fds.sock"
        self.events = directory / "events.sock"
        if len(os.fsencode(self.messages)) > MAX_SOCKET_PATH:
            raise Refused(
                Code.BAD_CONFIG,
                f"socket path {self.messages} has {len(os.fsencode(self.messages))} bytes, more "
                f"than {MAX_SOCKET_PATH}; set a shorter runtime_dir",
                str(self.messages),
            )
        self._lock = _locked(directory)
        self._bound: dict[Path, tuple[int, int]] = {}
        for path in self._sockets:
            for place in (path, closed_path(path)):
                place.unlink(missing_ok=True)
        try:
            self.apply_access()
        except BaseException:
            os.close(self._lock)
            raise
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def apply_access(self) -> None:
        """Set group and mode of the directory and its sockets. Raises Refused (BAD_CONFIG).

        Must be called again after a socket is bound, so that `close` removes it.
        """
        for path in self._sockets:
            for place in (path, closed_path(path)):
                if place.exists():
                    _set_access(place, 0o600, 0o060, self.admission.gid)
                    self._bound[path] = file_of(place)
        _set_access(self.directory, 0o700, 0o050, self.admission.gid)

    def change_group(self, group: str) -> None:
        """Admit this group from now on. Changes nothing if it raises Refused or OSError."""
        before = self.admission.group
        self.admission.change_group(group)
        try:
            self.apply_access()
        except BaseException:
            self.admission.change_group(before)
            self.apply_access()
            raise

    def find_problem(self) -> str | None:
        """Why clients cannot connect: a file of the directory is missing or replaced; else None.

        Called once a second; it makes a few system calls on a tmpfs.
        """
        if not self.directory.exists():
            return f"runtime directory {self.directory} was removed; restart the daemon"
        if not self._lock_is_here():
            return f"runtime directory {self.directory} was replaced; restart the daemon"
        for path, file in self._bound.items():
            if not self._is_ours(path, file):
                return f"socket {path} was removed or replaced; restart the daemon"
        return None

    def close(self) -> None:
        """Remove the sockets that this daemon has bound, and release the lock.

        Only the daemon that holds the lock has sockets here. The inode number of the open lock file
        is not reused, but that of a socket may be.
        """
        if self._lock_is_here():
            for path in self._sockets:
                for place in (path, closed_path(path)):
                    with suppress(OSError):
                        # A socket unknown to `apply_access` was bound by a start that failed.
                        if self._bound.get(path) in (None, file_of(place)):
                            place.unlink()
        os.close(self._lock)

    def _lock_is_here(self) -> bool:
        ours = os.fstat(self._lock)
        with suppress(OSError):
            return file_of(self.directory / "lock") == (ours.st_dev, ours.st_ino)
        return False

    def _is_ours(self, path: Path, file: tuple[int, int]) -> bool:
        for place in (path, closed_path(path)):
            with suppress(OSError):
                if file_of(place) == file:
                    return True
        return False

    @property
    def _sockets(self) -> tuple[Path, ...]:
        return self.messages, self.descriptors, self.events


def _set_access(path: Path, owner: int, members: int, gid: int | None) -> None:
    """Set mode and group. While the group changes, only the owner has access.

    members: mode bits of the group. gid: None: no group.
    """
    path.chmod(owner)
    if gid is None:
        return
    try:
        os.chown(path, -1, gid)
    except OSError as error:
        raise Refused(
            Code.BAD_CONFIG,
            f"cannot give {path} to group {gid} of access.group ({error.strerror}); add the "
            "daemon's user to it",
            gid,
        ) from error
    path.chmod(owner | members)


def _locked(directory: Path) -> int:
    """Create the directory if needed and lock it. Return the lock's descriptor."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        _check_owner(directory.parent, 0, os.geteuid())
        directory.mkdir(exist_ok=True, mode=0o700)
        _check_owner(directory, os.geteuid())
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(directory / "lock", flags, 0o600)
    except OSError as error:
        message = f"cannot create {directory} ({error.strerror}); set another runtime_dir"
        raise Refused(Code.BAD_CONFIG, message, str(directory)) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise Refused(
            Code.ENDPOINT_IN_USE,
            f"another daemon (pid {holder}) serves this device in {directory}; stop it first",
            str(directory),
        ) from error
    os.ftruncate(lock, 0)
    return lock


def _check_owner(place: Path, *owners: int) -> None:
    """Raise Refused unless one of these users owns the directory: another could redirect it."""
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise Refused(
            Code.BAD_CONFIG,
            f"{place} is a link or a file (created by user {status.st_uid}); remove it, or set "
            "another runtime_dir",
            str(place),
        )
    if status.st_uid not in owners:
        raise Refused(
            Code.BAD_CONFIG,
            f"{place} belongs to user {status.st_uid}; remove it, or set another runtime_dir",
            str(place),
        )
