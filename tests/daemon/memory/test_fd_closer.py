"""Threads that close large memory: another starts if one hangs, and they end if idle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from kvferry.daemon.memory.fd_closer import MAX_THREADS, THREAD_NAME, Closer
from kvferry.testing.engine import until
from support.descriptors import is_open
from support.time_limits import TIMEOUT


class NewThreads:
    """The threads that have started since its creation."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def __len__(self) -> int:
        return len(set(threading.enumerate()) - self._before)


@pytest.fixture
def release_closes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Closes block until this is called, like a close of a file of a dead FUSE server."""
    released, close = threading.Event(), os.close

    def slow_close(descriptor: int) -> None:
        if threading.current_thread().name == THREAD_NAME:
            released.wait(TIMEOUT)
        close(descriptor)

    monkeypatch.setattr("kvferry.daemon.memory.fd_closer.os.close", slow_close)
    return released.set


def close_callback(descriptor: int) -> Callable[[], None]:
    return lambda: os.close(descriptor)


def test_threads_end_if_nothing_is_left_to_close(release_closes: Callable[[], None]) -> None:
    closer, threads = Closer(patience=0.05), NewThreads()
    descriptors = [os.memfd_create("closed") for _ in range(5)]
    for descriptor in descriptors:
        closer.close_later(close_callback(descriptor))
    assert len(threads) == 5
    release_closes()
    until(lambda: not threads)
    assert not any(map(is_open, descriptors))


def test_a_close_that_hangs_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    released, close = threading.Event(), os.close
    slow, quick = os.memfd_create("slow"), os.memfd_create("quick")

    def close_slowly(descriptor: int) -> None:
        if descriptor == slow:
            released.wait(TIMEOUT)
        close(descriptor)

    monkeypatch.setattr("kvferry.daemon.memory.fd_closer.os.close", close_slowly)
    closer = Closer(patience=0.05)
    closer.close_later(close_callback(slow))
    closer.close_later(close_callback(quick))
    until(lambda: not is_open(quick))
    assert is_open(slow)
    released.set()
    until(lambda: not is_open(slow))


def test_the_number_of_threads_is_bounded(release_closes: Callable[[], None]) -> None:
    closer, threads = Closer(patience=0.05), NewThreads()
    descriptors = [os.memfd_create("closed") for _ in range(3 * MAX_THREADS)]
    for descriptor in descriptors:
        closer.close_later(close_callback(descriptor))
    assert len(threads) == MAX_THREADS
    release_closes()
    until(lambda: not any(map(is_open, descriptors)))
    until(lambda: not threads)
