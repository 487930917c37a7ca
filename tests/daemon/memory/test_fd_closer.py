"""Threads that close large memory: they start when one hangs, and end when nothing is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from kvferry.daemon.memory.fd_closer import MAX_THREADS, THREAD_NAME, Closer
from kvferry.testing.engine import until
from support.descriptors import is_open


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


def test_threads_end_when_there_is_nothing_to_close(hanging: Callable[[], None]) -> None:
    closer, crowd = Closer(patience=0.05), Crowd()
    descriptors = [os.memfd_create("some") for _ in range(5)]
    for descriptor in descriptors:
        closer.close_later(closing_of(descriptor))
    assert len(crowd) == 5
    hanging()
    until(lambda: not crowd, 10)
    assert not any(map(is_open, descriptors))


def test_one_close_that_hangs_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_more_closes_than_threads(hanging: Callable[[], None]) -> None:
    closer, crowd = Closer(patience=0.05), Crowd()
    descriptors = [os.memfd_create("some") for _ in range(3 * MAX_THREADS)]
    for descriptor in descriptors:
        closer.close_later(closing_of(descriptor))
    assert len(crowd) == MAX_THREADS
    hanging()
    until(lambda: not any(map(is_open, descriptors)), 10)
    until(lambda: not crowd, 10)


def test_threads_start_again_after_all_have_ended(hanging: Callable[[], None]) -> None:
    hanging()
    closer, crowd = Closer(patience=0.05), Crowd()
    for _ in range(3):
        descriptor = os.memfd_create("some")
        closer.close_later(closing_of(descriptor))
        until(lambda: not crowd, 10)
        assert not is_open(descriptor)
