"""Pages of shared memory that two processes map: of one size for good, so that neither can have the
other die of a missing one."""

from __future__ import annotations

import fcntl
import mmap
import os

from kvferry.proto.errors import Code, Refused

TIMELINE_VALUE_AT, TIMELINE_REVOKED_AT = 0, 8
"""Where an engine's timeline has its two numbers, of 64 bits each: the value that its stream has
reached, and whether it has given up all of its jobs."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memfd(name: str, nbytes: int) -> int:
    """A descriptor of new shared memory, zeroes, whose size can never change.

    name: for whoever looks at the process.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_page(what: str, descriptor: int, nbytes: int) -> mmap.mmap:
    """The first `nbytes` of a page that somebody made; the descriptor stays the caller's.

    Raises Refused (NOT_SHAREABLE) where it is smaller, or could become so, or is no memory.
    """
    try:
        seals, size = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_size
        if not seals & fcntl.F_SEAL_SHRINK or size < nbytes:
            raise ValueError(f"seals {seals}, {size} bytes")
        return mmap.mmap(descriptor, nbytes)
    except (OSError, ValueError) as error:
        message = f"{what} is a sealed memfd of {nbytes} bytes that may be mapped and written"
        raise Refused(Code.NOT_SHAREABLE, message, str(error)) from error
