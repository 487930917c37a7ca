"""Starts the daemon's worker processes: Python modules that serve one socket of the daemon.

Such a process ends when its socket is closed. Event loop only.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence


def start_worker(
    module: str, arguments: Callable[[int], Sequence[str]], descriptors: Sequence[int]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module`. Returns the process and the daemon's end of its socket, which keeps
    the bounds of messages and does not block. Raises OSError.

    arguments: called with the number of the process's end of the socket. descriptors: further ones
    that the process inherits, under the same numbers.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *descriptors),
            )
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    return process, ours
