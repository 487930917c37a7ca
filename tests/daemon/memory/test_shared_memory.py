"""Shared memory: a thread frees large memory, not the caller."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvferry.daemon.memory.fd_closer import SMALL_BYTES, THREAD_NAME, close_memory
from kvferry.daemon.memory.shared_memory import MappedFile, MappedFiles
from kvferry.testing.engine import until
from support.descriptors import is_open


def memfd(nbytes: int) -> int:
    """A memfd with allocated memory. The last close frees it."""
    descriptor = os.memfd_create("kvferry-test-closed")
    os.ftruncate(descriptor, nbytes)
    os.posix_fallocate(descriptor, 0, nbytes)
    return descriptor


@pytest.fixture
def closed_by(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The name of the thread that closed each descriptor."""
    threads: dict[int, str] = {}
    close = os.close

    def record_close(descriptor: int) -> None:
        threads[descriptor] = threading.current_thread().name
        close(descriptor)

    monkeypatch.setattr("kvferry.daemon.memory.fd_closer.os.close", record_close)
    return threads


def test_large_memory_is_closed_by_a_thread(closed_by: dict[int, str]) -> None:
    """Allocated bytes count, not the size. Pages that were never touched are not allocated."""
    large, small = memfd(SMALL_BYTES), memfd(SMALL_BYTES // 2)
    sparse = os.memfd_create("kvferry-test-closed")
    os.ftruncate(sparse, 1 << 30)
    for descriptor in (large, small, sparse):
        close_memory(descriptor)
    here = threading.current_thread().name
    assert (closed_by[small], closed_by[sparse]) == (here, here)
    until(lambda: large in closed_by)
    assert closed_by[large] == THREAD_NAME
    until(lambda: not is_open(large))


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
