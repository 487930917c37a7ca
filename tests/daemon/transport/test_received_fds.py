"""Received descriptors: the event loop closes only memfds with little memory itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from kvferry.daemon.memory.fd_closer import SMALL_BYTES, THREAD_NAME
from kvferry.daemon.transport.received_fds import close_received_fd
from kvferry.testing.engine import until


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def large_memory() -> int:
    descriptor = os.memfd_create("received")
    os.posix_fallocate(descriptor, 0, SMALL_BYTES)
    return descriptor


@pytest.mark.parametrize(
    ("make", "by_a_thread"),
    [(lambda: os.memfd_create("received"), False), (large_memory, True), (pipe, True)],
)
def test_received_descriptors_are_closed_by_kind(
    make: Callable[[], int], by_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, close = make(), os.close
    closed_by: list[str] = []

    def record_close(number: int) -> None:
        if number == descriptor:
            closed_by.append(threading.current_thread().name)
        close(number)

    monkeypatch.setattr(os, "close", record_close)
    close_received_fd(descriptor)
    until(lambda: bool(closed_by))
    assert (closed_by == [THREAD_NAME]) is by_a_thread
