"""The daemon's place in the file system: a private folder, held by one daemon at a time.

    <runtime directory>/<device UUID or "cpu">/
        lock           held with flock for the daemon's life; holds its pid
        kvferry.sock   ZeroMQ ROUTER
        fds.sock       file descriptors, which ZeroMQ cannot carry
        events.sock    ZeroMQ PUB: what becomes resident, and what goes

A second bind on a live ipc path would succeed and leave the first server deaf, so the lock comes
first.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvferry.proto.errors import Code, Refused

MAX_SOCKET_PATH = 107


class Endpoint:
    """Holds the folder until `close`. Raises Refused (ENDPOINT_IN_USE, BAD_CONFIG)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.messages = directory / "kvferry.sock"
        self.descriptors = directory / "fds.sock"
        self.events = directory / "events.sock"
        if len(os.fsencode(self.messages)) > MAX_SOCKET_PATH:
            raise Refused(
                Code.BAD_CONFIG,
                f"a socket's path has at most {MAX_SOCKET_PATH} bytes: set a shorter runtime_dir",
                str(self.messages),
            )
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Refused(
                Code.BAD_CONFIG, f"runtime_dir cannot be used: {error.strerror}", str(directory)
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise Refused(
                Code.ENDPOINT_IN_USE,
                f"another daemon (pid {holder}) serves this device here: stop it first",
                str(directory),
            ) from error
        os.ftruncate(self._lock, 0)
        for path in (self.messages, self.descriptors, self.events):
            path.unlink(missing_ok=True)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        for path in (self.messages, self.descriptors, self.events):
            path.unlink(missing_ok=True)
        os.close(self._lock)
