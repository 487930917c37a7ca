"""Descriptors that came from clients: of what they are, and closed where nobody waits for it.

To close the last one of a file may take as long as its owner likes: a TCP socket lingers, a file of
FUSE asks its server, a Unix socket closes what is on its way through it. So none is closed by the
loop but memory, and nothing is asked of one that its file system would have to answer.
"""

from __future__ import annotations

import ctypes
import enum
import fcntl
import os
import stat
import threading
from collections import deque
from contextlib import suppress

MAX_AT_ONCE = 253
"""Descriptors in one packet: the kernel's SCM_MAX_FD."""
MOST_THREADS = 16
"""That close at a time: one that hangs holds up no other."""
PATIENCE = 2.0
"""Seconds that a thread with nothing to close waits for more before it ends."""
THREAD_NAME = "kvferry-closer"
_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC, _STATX_TYPE = 0x1000, 0x4000, 0x1
_STATX_BYTES, _MODE_AT = 256, 28
_libc = ctypes.CDLL(None)


class Kind(enum.Enum):
    MEMORY = "memory"
    """A memfd, or a file of tmpfs."""
    DEVICE = "device"
    """A device's file, or one of no type: what a driver exports."""


def kind_of(descriptor: int) -> Kind | None:
    """None where it is nothing that a daemon has any use for."""
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        return Kind.MEMORY
    kind = _type_of(descriptor)
    return Kind.DEVICE if kind in (0, stat.S_IFCHR) else None


def _type_of(descriptor: int) -> int | None:
    """As in st_mode, as far as the kernel itself knows: fstat would ask a file system."""
    about = ctypes.create_string_buffer(_STATX_BYTES)
    flags = _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
    if _libc.statx(descriptor, b"", flags, _STATX_TYPE, about):
        return None
    mode = int.from_bytes(about.raw[_MODE_AT : _MODE_AT + 2], "little")
    return stat.S_IFMT(mode)


class Closer:
    """Threads that are there when needed, and that no end of the process waits for."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        self._due: deque[int] = deque()
        self._threads = self._idle = 0

    def put(self, descriptor: int) -> None:
        with self._changed:
            self._due.append(descriptor)
            if len(self._due) <= self._idle or self._threads == MOST_THREADS:
                self._changed.notify()
                return
            with suppress(RuntimeError):  # no thread can be had: one that is there closes it later
                threading.Thread(target=self._run, name=THREAD_NAME, daemon=True).start()
                self._threads += 1

    def _run(self) -> None:
        while (descriptor := self._take()) is not None:
            with suppress(OSError):
                os.close(descriptor)

    def _take(self) -> int | None:
        """The next one; None, when there was none for a while, to the thread that shall end."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._due, self._patience)
            self._idle -= 1
            if self._due:
                return self._due.popleft()
            self._threads -= 1
            return None


_closer = Closer()


def close_aside(descriptor: int) -> None:
    """Have it closed in another thread. Called by the loop."""
    _closer.put(descriptor)


def close(descriptor: int) -> None:
    """Close memory here, and anything else aside."""
    if kind_of(descriptor) is Kind.MEMORY:
        os.close(descriptor)
    else:
        close_aside(descriptor)
