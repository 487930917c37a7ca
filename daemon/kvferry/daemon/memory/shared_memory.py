"""Shared memory mapped from file descriptors: the host pool, tensors, timelines.

If another process shrinks a mapped memfd, an access ends this process with SIGBUS. So the memfds of
the host pool are sealed, and a timeline page is refused unless its client has sealed it. Any
thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from kvferry.daemon.memory.fd_closer import close_later
from kvferry.daemon.memory.foreign_memory import WORD, ForeignMemory
from kvferry.proto.errors import Code, Failed, Refused
from kvferry.proto.layout import Int64s
from kvferry.proto.sizes import format_size
from kvferry.shm.memfd import check_sealed, sealed_memfd
from kvferry.shm.timeline_page import TIMELINE_REVOKED_AT, TIMELINE_VALUE_AT

PAGE = mmap.PAGESIZE
# Maximum of rows in one `copy_vectors`.
IOV_MAX = 1024


def copy_vectors(src: Int64s, dst: Int64s) -> None:
    """Copy memory within this process.

    src, dst: (n, 2) int64, contiguous: address and size in bytes of each range. Raises OSError if
    an address has no memory, as beyond the end of a truncated file. A plain copy would end the
    process with SIGBUS.
    """
    nbytes = int(np.add.reduce(src[:, 1]))
    source, target = (rows.__array_interface__["data"][0] for rows in (src, dst))
    done = int(_libc.process_vm_writev(os.getpid(), source, len(src), target, len(dst), 0))
    if done == nbytes:
        return
    if done < 0 and ctypes.get_errno() in (
        errno.EPERM,
        errno.ENOSYS,
    ):  # seccomp, for example
        for (origin, size), (to, _) in zip(src.tolist(), dst.tolist(), strict=True):
            ctypes.memmove(to, origin, size)
        return
    raise OSError(errno.EFAULT, f"only {max(done, 0)} of {nbytes} bytes could be copied")


class MappedFile:
    """A mapped descriptor. Owns the mapping, not the descriptor.

    Raises Refused (BAD_LAYOUT) if the file is smaller than `nbytes`, Failed (MAP_FAILED) if it
    cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        if os.fstat(descriptor).st_size < nbytes:
            raise Refused(
                Code.BAD_LAYOUT,
                f"the shared memory has {os.fstat(descriptor).st_size} bytes, fewer than {nbytes}; "
                "give its real size",
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

    def close(self) -> None:
        """Unmap it on another thread, because that may free GiBs. Nothing may access it."""
        del self._anchor
        close_later(self._map.close)


class MappedFiles:
    """Shared memory of several files, mapped back to back. Owns the mapping and the descriptors.

    kept: descriptors of existing memory, one per file; None: create new memory. Raises OSError, and
    Refused (BAD_LAYOUT, NOT_SHAREABLE) if `kept` has other sizes or is not sealed. Then the caller
    still owns the descriptors.

    There are several files because the kernel allocates the pages of a file under one lock: 16
    threads touch 48 GiB in 2.6 s in several files, and in 7 s in one.
    """

    def __init__(
        self, name: str, nbytes: int, file_bytes: int, kept: Sequence[int] | None = None
    ) -> None:
        self.nbytes, self._file_bytes = nbytes, file_bytes
        sizes = [min(file_bytes, nbytes - start) for start in range(0, nbytes, file_bytes)]
        self.descriptors: list[int] = []
        if kept is not None:
            _check_kept(kept, sizes)
        self.address = _map(None, nbytes, _NO_ACCESS, _PRIVATE | _ANONYMOUS | _NORESERVE, -1)
        try:
            for number, size in enumerate(sizes):
                start = number * file_bytes
                descriptor = sealed_memfd(name, size) if kept is None else kept[number]
                self.descriptors.append(descriptor)
                access = mmap.PROT_READ | mmap.PROT_WRITE
                at, flags = self.address + start, mmap.MAP_SHARED | _FIXED
                _map(at, size, access, flags, self.descriptors[-1])
                _libc.madvise(
                    at, size, mmap.MADV_HUGEPAGE
                )  # if the kernel has any for shared memory
        except BaseException:
            self.close()
            raise

    def populate(self, start: int, nbytes: int) -> None:
        """Allocate the pages of a part, on the NUMA node of this thread. Raises OSError."""
        if _libc.madvise(self.address + start, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.EPERM, errno.ENOSYS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # A kernel before 5.14, or seccomp. fallocate keeps the bytes of a pool of an earlier
        # daemon, and reports ENOSPC or ENOMEM, where a write to the page would be a SIGBUS.
        at, end = start, start + nbytes
        while at < end:
            number, offset = divmod(at, self._file_bytes)
            size = min(self._file_bytes - offset, end - at)
            os.posix_fallocate(self.descriptors[number], offset, size)
            at += size

    def close(self) -> None:
        """Unmap the memory and close the descriptors. Nothing may access it."""
        _done(_libc.munmap(self.address, self.nbytes))
        for descriptor in self.descriptors:
            os.close(descriptor)


class ReadOnlyFiles:
    """Files mapped back to back, to be read only. Owns the mapping, not the descriptors.

    descriptors: of files of `file_bytes`; the last may be smaller. like: an address; the first file
    begins at an address that differs from it by a multiple of `file_bytes`. Raises OSError.
    """

    def __init__(self, descriptors: Sequence[int], file_bytes: int, like: int = 0) -> None:
        sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
        self.nbytes = sum(sizes)
        self._reserved = self.nbytes + file_bytes
        self._begin = _map(None, self._reserved, _NO_ACCESS, _PRIVATE | _ANONYMOUS | _NORESERVE, -1)
        self.address = at = self._begin + (like - self._begin) % file_bytes
        try:
            for descriptor, size in zip(descriptors, sizes, strict=True):
                _map(at, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, descriptor)
                at += size
        except BaseException:
            self.close()
            raise

    def copy_to(self, address: int, at: int, nbytes: int) -> None:
        """Copy a range of the files to memory of this process. Releases the GIL."""
        ctypes.memmove(address, self.address + at, nbytes)

    def close(self) -> None:
        """Unmap the memory. Nothing may access it."""
        _done(_libc.munmap(self._begin, self._reserved))


def free_file(descriptor: int) -> None:
    """Free the memory of a file, although other processes have its descriptor. Raises OSError."""
    size = os.fstat(descriptor).st_size
    _done(_libc.fallocate(descriptor, _PUNCH_HOLE, 0, size))


# FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE.
_PUNCH_HOLE = 0x1 | 0x2
_MADV_POPULATE_WRITE = 23
_NO_ACCESS = 0
_PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = mmap.MAP_PRIVATE, 0x10, mmap.MAP_ANONYMOUS, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.process_vm_writev.restype = ctypes.c_ssize_t
_libc.process_vm_writev.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]


def _map(at: int | None, nbytes: int, access: int, flags: int, descriptor: int) -> int:
    address = int(_libc.mmap(at, nbytes, access, flags, descriptor, 0))
    _done(-1 if address == ctypes.c_size_t(-1).value else 0)
    return address


def _done(result: int) -> None:
    """Raise OSError if a system call failed."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _check_kept(kept: Sequence[int], sizes: Sequence[int]) -> None:
    found = [os.fstat(descriptor).st_size for descriptor in kept]
    if found != list(sizes):
        raise Refused(
            Code.BAD_LAYOUT,
            f"the kept pool has {len(found)} chunks of up to {format_size(max(found, default=0))}, "
            f"but {len(sizes)} of {format_size(sizes[0])} are configured",
            f"{len(found)} of {max(found, default=0)}",
        )
    for descriptor in kept:
        check_sealed(descriptor, "kept pool memory")


class TimelineReader:
    """Reads the timeline page of an engine. Any thread.

    Raises Refused (NOT_SHAREABLE, BAD_LAYOUT) if the page is not sealed, or too small. The caller
    owns the descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        page = ForeignMemory(descriptor, "the timeline page", PAGE)
        self._value = page.column(WORD, TIMELINE_VALUE_AT, 1)
        self._revoked = page.column(WORD, TIMELINE_REVOKED_AT, 1)

    def reached(self, value: int) -> bool:
        """Whether the timeline has reached a value. It only grows."""
        return self._value.read() >= value

    def is_revoked(self) -> bool:
        """Whether the engine has abandoned all of its transfers."""
        return self._revoked.read() != 0

    def close(self) -> None:
        """Unmap the page. It must not be read again."""
        del self._value, self._revoked
