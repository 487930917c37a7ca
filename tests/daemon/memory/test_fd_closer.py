"""Threads that close large memory: they start when one hangs, and end when nothing is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from kvferry.daemon.memory.fd_closer import (
    MAX_THREADS,
    SMALL_BYTES,
    THREAD_NAME,
    Closer,
    close_memory,
)
from kvferry.daemon.memory.shared_memory import MappedFile
from kvferry.testing.engine import until


class Crowd:
    """The threads that came since."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def __len__(self) -> int:
        return len(set(threading.enumerate()) - self._before)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Closing takes until this is called, as that of a file of a dead FUSE server."""
    let_go, close = threading.Event(), os.close

    def slow(descriptor: int) -> None:
        if threading.current_thread().name == THREAD_NAME:
            let_go.wait(10)
        close(descriptor)

    monkeypatch.setattr("kvferry.daemon.memory.fd_closer.os.close", slow)
    return let_go.set


def closing_of(descriptor: int) -> Callable[[], None]:
    return lambda: os.close(descriptor)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_threads_end_when_there_is_nothing_to_close(hanging: Callable[[], None]) -> None:
    closer, crowd = Closer(patience=0.05), Crowd()
    descriptors = [os.memfd_create("some") for _ in range(5)]
    for descriptor in descriptors:
        closer.close_later(closing_of(descriptor))
    assert len(crowd) == 5
    hanging()
    until(lambda: not crowd, 10)
    assert not any(map(is_open, descriptors))


def test_one_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, close = threading.Event(), os.close
    slow, quick = os.memfd_create("slow"), os.memfd_create("quick")

    def closing(descriptor: int) -> None:
        if descriptor == slow:
            let_go.wait(10)
        close(descriptor)

    monkeypatch.setattr("kvferry.daemon.memory.fd_closer.os.close", closing)
    closer = Closer(patience=0.05)
    closer.close_later(closing_of(slow))
    closer.close_later(closing_of(quick))
    until(lambda: not is_open(quick), 10)
    assert is_open(slow)
    let_go.set()
    until(lambda: not is_open(slow), 10)


def test_more_than_there_may_be_threads(hanging: Callable[[], None]) -> None:
    closer, crowd = Closer(patience=0.05), Crowd()
    descriptors = [os.memfd_create("some") for _ in range(3 * MAX_THREADS)]
    for descriptor in descriptors:
        closer.close_later(closing_of(descriptor))
    assert len(crowd) == MAX_THREADS
    hanging()
    until(lambda: not any(map(is_open, descriptors)), 10)
    until(lambda: not crowd, 10)


def test_after_all_threads_have_gone(hanging: Callable[[], None]) -> None:
    hanging()
    closer, crowd = Closer(patience=0.05), Crowd()
    for _ in range(3):
        descriptor = os.memfd_create("some")
        closer.close_later(closing_of(descriptor))
        until(lambda: not crowd, 10)
        assert not is_open(descriptor)


def memfd(nbytes: int) -> int:
    """A memfd with memory, which its last close frees."""
    descriptor = os.memfd_create("kvferry-test-closed")
    os.ftruncate(descriptor, nbytes)
    os.posix_fallocate(descriptor, 0, nbytes)
    return descriptor


@pytest.fixture
def closed_by(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Which thread closed a descriptor, by its number."""
    threads: dict[int, str] = {}
    close = os.close

    def note(descriptor: int) -> None:
        threads[descriptor] = threading.current_thread().name
        close(descriptor)

    monkeypatch.setattr("kvferry.daemon.memory.fd_closer.os.close", note)
    return threads


def test_large_memory_is_closed_by_a_thread(closed_by: dict[int, str]) -> None:
    """What a memfd has counts, and not its size: pages that nobody touched cost nothing."""
    large, small = memfd(SMALL_BYTES), memfd(SMALL_BYTES // 2)
    sparse = os.memfd_create("kvferry-test-closed")
    os.ftruncate(sparse, 1 << 30)
    for descriptor in (large, small, sparse):
        close_memory(descriptor)
    here = threading.current_thread().name
    assert (closed_by[small], closed_by[sparse]) == (here, here)
    until(lambda: large in closed_by, 10)
    assert closed_by[large] == THREAD_NAME
    until(lambda: not is_open(large), 10)


def is_mapped(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return any(name in line for line in maps)


def test_memory_of_a_client_is_unmapped_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping may be the last that holds it."""
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
