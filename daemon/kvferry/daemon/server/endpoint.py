"""The daemon's place in the file system: a private folder, held by one daemon at a time.

    <runtime directory>/<device UUID or "cpu">/
        lock           held with flock for the daemon's life; holds its pid
        kvferry.sock   ZeroMQ ROUTER
        fds.sock       file descriptors, which ZeroMQ cannot carry
        events.sock    ZeroMQ PUB: what becomes resident, and what goes

A second bind on a live ipc path would succeed and leave the first server deaf, so the lock comes
first. The folder is the daemon's own, and the one above it is so, too, or root's. Only those who
are admitted can enter the folder, and none but them the sockets in it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from kvferry.daemon.server.admission import Admission
from kvferry.daemon.server.door import shut, take_away
from kvferry.daemon.server.fence import fence
from kvferry.proto.desk import MAX_SOCKET_PATH
from kvferry.proto.errors import Code, Refused


class Endpoint:
    """Holds the folder until `close`. Raises Refused (ENDPOINT_IN_USE, BAD_CONFIG)."""

    def __init__(self, directory: Path, admission: Admission) -> None:
        self.directory, self.admission = directory, admission
        self.messages = directory / "kvferry.sock"
        self.descriptors = directory / "fds.sock"
        self.events = directory / "events.sock"
        if len(os.fsencode(self.messages)) > MAX_SOCKET_PATH:
            raise Refused(
                Code.BAD_CONFIG,
                f"a socket's path has at most {MAX_SOCKET_PATH} bytes: set a shorter runtime_dir",
                str(self.messages),
            )
        self._lock = _locked(directory)
        for path in self._sockets:
            path.unlink(missing_ok=True)
        try:
            self.open()
        except BaseException:
            os.close(self._lock)
            raise
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def open(self) -> None:
        """Let the admitted through to the sockets that are there. Raises Refused (BAD_CONFIG)."""
        for path in self._sockets:
            for place in (path, shut(path)):
                if place.exists():
                    fence(place, 0o6, 0o6, self.admission)
        fence(self.directory, 0o7, 0o5, self.admission)

    def admit(self, uids: Iterable[int], groups: Iterable[str | int]) -> None:
        """Admit these from now on, or leave all as it was. Raises Refused (BAD_CONFIG), OSError."""
        before = self.admission.uids, self.admission.groups
        self.admission.change(uids, groups)
        try:
            self.open()
        except BaseException:
            self.admission.change(*before)
            self.open()
            raise

    def close(self) -> None:
        for path in self._sockets:
            take_away(path)
        os.close(self._lock)

    @property
    def _sockets(self) -> tuple[Path, ...]:
        return self.messages, self.descriptors, self.events


def _locked(directory: Path) -> int:
    """Make the folder where it is not there, and hold it: the descriptor of its lock."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        _check_owner(directory.parent, 0, os.geteuid())
        directory.mkdir(exist_ok=True, mode=0o700)
        _check_owner(directory, os.geteuid())
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(directory / "lock", flags, 0o600)
    except OSError as error:
        raise Refused(
            Code.BAD_CONFIG, f"runtime_dir cannot be used: {error.strerror}", str(directory)
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise Refused(
            Code.ENDPOINT_IN_USE,
            f"another daemon (pid {holder}) serves this device here: stop it first",
            str(directory),
        ) from error
    os.ftruncate(lock, 0)
    return lock


def _check_owner(place: Path, *owners: int) -> None:
    """Who else has it could have it lead anywhere: what lies there is opened, and removed."""
    about = place.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise Refused(
            Code.BAD_CONFIG,
            f"the folder is a link, or none, made by user {about.st_uid}: remove it, or set "
            "another runtime_dir",
            str(place),
        )
    if about.st_uid not in owners:
        raise Refused(
            Code.BAD_CONFIG,
            f"the folder is another user's, {about.st_uid}: remove it, or set another runtime_dir",
            str(place),
        )
