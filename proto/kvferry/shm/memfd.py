"""Sealed memfds: shared memory whose size its owner cannot change.

If another process shrinks a mapped file, reading a page that is gone ends the reader with SIGBUS.
So memory that is read with plain loads (the host pool, block tables, timeline pages) is sealed when
it is created, and its seals are checked when it is received. Tensors that engines share on the CPU
are copied by a system call, which fails instead. Used by the client and the daemon. Any thread.
"""

from __future__ import annotations

import fcntl
import os

from kvferry.proto.errors import Code, Refused

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memfd(name: str, nbytes: int) -> int:
    """Create a memfd of `nbytes` zero bytes that can neither grow nor shrink. Raises OSError.

    name: shown in /proc/PID/maps.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_seals(descriptor: int) -> int | None:
    """The seals of a memfd or tmpfs file; None for any other kind of file, which has none."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return None


def check_sealed(descriptor: int, what: str) -> None:
    """Raise Refused (NOT_SHAREABLE) unless the file is sealed against shrinking.

    what: what the file holds, for the message.
    """
    seals = read_seals(descriptor)
    if seals is None:
        message = f"{what} is not a memfd; create it with memfd_create and MFD_ALLOW_SEALING"
        raise Refused(Code.NOT_SHAREABLE, message, f"descriptor {descriptor}")
    if not seals & fcntl.F_SEAL_SHRINK:
        message = (
            f"{what} can be shrunk by its owner (seals {seals:#x}); seal it with F_SEAL_SHRINK"
        )
        raise Refused(Code.NOT_SHAREABLE, message, f"{seals:#x}")
