"""Starts the daemon's worker processes: Python modules that serve one socket of the daemon.

Such a process ends when its socket is closed. The kernel kills it when the daemon dies, even if it
is stopped or still starts: its stdin is a pipe of which the daemon has the other end, and the
kernel signals SIGKILL when that is closed. A process cannot ask for that before it runs, and code
cannot run in it before exec, because the daemon has threads. Event loop only, but for
`lower_priority`, which the processes call.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress


def start_worker(
    module: str, arguments: Callable[[int], Sequence[str]], descriptors: Sequence[int]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module`. Returns the process and the daemon's end of its socket, which keeps
    the bounds of messages and does not block. Raises OSError.

    The process is killed when nothing refers to it any longer. arguments: called with the number of
    the process's end of the socket. descriptors: further ones that the process inherits, under the
    same numbers.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read_end, write_end = os.pipe()
    with theirs, os.fdopen(read_end, "rb", 0):
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments(theirs.fileno())],
                stdin=read_end,
                pass_fds=(theirs.fileno(), *descriptors),
            )
        except OSError:
            os.close(write_end)
            ours.close()
            raise
        weakref.finalize(process, os.close, write_end)
        fcntl.fcntl(read_end, fcntl.F_SETOWN, process.pid)
        fcntl.fcntl(read_end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_ASYNC)
    ours.setblocking(False)
    return process, ours


def lower_priority(increment: int) -> None:
    """Add to the nice value of this process, if it may change that (`can_lower_priority`)."""
    with suppress(OSError):
        os.nice(increment)


def can_lower_priority() -> bool:
    """Whether processes may set their priority. A seccomp profile may deny it."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))
    except OSError:
        return False
    return True
