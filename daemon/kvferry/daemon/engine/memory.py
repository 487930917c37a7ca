"""Memory shared between processes by file descriptor, mapped here: pool, tensors, timelines.

A memfd that another process can shrink is a memfd that can kill us with SIGBUS, so the host pool
is sealed when it is made, and a timeline page is refused unless its client sealed it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

from kvferry.proto.errors import Code, Failed, Refused

PAGE = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memfd(name: str, nbytes: int) -> int:
    """A descriptor of new shared memory whose size can never change."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Mapped:
    """A mapped descriptor. Owns the mapping, not the descriptor."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        if os.fstat(descriptor).st_size < nbytes:
            raise Refused(
                Code.BAD_LAYOUT,
                f"the shared memory holds {os.fstat(descriptor).st_size} bytes, fewer than said",
                nbytes,
            )
        try:
            self._map = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError) as error:
            raise Failed(Code.MAP_FAILED, f"shared memory cannot be mapped: {error}") from error
        with contextlib.suppress(OSError):  # the kernel may have no huge pages for shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.nbytes = nbytes

    def populate(self, start: int, nbytes: int) -> None:
        """Touch a part for the first time, on the memory of this thread's node."""
        self._map.madvise(_MADV_POPULATE_WRITE, start, nbytes)

    def close(self) -> None:
        del self._anchor
        self._map.close()


_MADV_POPULATE_WRITE = 23


class Timeline:
    """The reading end of an engine's timeline: one uint64 in a shared page, only ever growing."""

    def __init__(self, descriptor: int) -> None:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise Refused(Code.NOT_SHAREABLE, "a timeline page is sealed against shrinking", seals)
        self._page = Mapped(descriptor, PAGE)
        self._value = ctypes.c_uint64.from_address(self._page.address)

    def reached(self, value: int) -> bool:
        return self._value.value >= value

    def close(self) -> None:
        self._page.close()
