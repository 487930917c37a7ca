"""Shared memory: a thread frees large memory, not the caller."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvferry.daemon.memory.fd_closer import SMALL_BYTES
from kvferry.daemon.memory.shared_memory import MappedFile, MappedFiles


def memfd(nbytes: int) -> int:
    """A memfd with allocated memory. The last close frees it."""
    descriptor = os.memfd_create("kvferry-test-closed")
    os.ftruncate(descriptor, nbytes)
    os.posix_fallocate(descriptor, 0, nbytes)
    return descriptor


def is_mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(name in line for line in maps)


def test_memory_of_a_client_is_unmapped_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping may be the last reference to the memory."""
    later: list[Callable[[], None]] = []
    monkeypatch.setattr("kvferry.daemon.memory.shared_memory.close_later", later.append)
    descriptor = memfd(SMALL_BYTES)
    memory = MappedFile(descriptor, SMALL_BYTES)
    os.close(descriptor)
    memory.close()
    assert is_mapped("kvferry-test-closed")
    (unmap,) = later
    unmap()
    assert not is_mapped("kvferry-test-closed")


def test_memory_is_allocated_on_a_kernel_without_populate_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel before 5.14 knows no MADV_POPULATE_WRITE. The bytes of a kept pool stay."""

    def madvise(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    files = MappedFiles("kvferry-test", 4 << 20, 1 << 20)
    ctypes.memset(files.address, 7, 1)
    with monkeypatch.context() as patched:
        stand_in = SimpleNamespace(madvise=madvise)
        patched.setattr("kvferry.daemon.memory.shared_memory._libc", stand_in)
        files.populate(0, 3 << 20)
    allocated = [os.fstat(descriptor).st_blocks * 512 for descriptor in files.descriptors]
    assert allocated == [1 << 20, 1 << 20, 1 << 20, 0]
    assert ctypes.string_at(files.address, 1) == b"\x07"
    files.close()
