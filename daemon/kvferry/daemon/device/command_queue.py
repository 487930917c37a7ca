"""The queue of commands for the device worker, which sleeps on it.

A queue.SimpleQueue cannot be used: its `get` with a timeout of some microseconds can block forever
(CPython 3.11 and 3.12: a negative remainder of the timeout counts as no timeout). A lock that each
`put_command` releases wakes the thread as fast, and its timeout holds.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ping:
    """Heartbeat: the worker reports a Pong. posted: time.monotonic() at the request."""

    posted: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the device worker's thread."""


class CommandQueue(Generic[T]):
    """FIFO. `put_command`: any thread. The other methods: only the device worker's thread."""

    def __init__(self) -> None:
        self._commands: deque[T] = deque()
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    def put_command(self, command: T) -> None:
        self._commands.append(command)
        with contextlib.suppress(RuntimeError):  # a wake-up is pending already
            self._wakeup.release()

    def take_command(self) -> T | None:
        """The oldest command; None if there is none."""
        return self._commands.popleft() if self._commands else None

    def wait_for_command(self, timeout: float | None) -> None:
        """Sleep until there is a command, for at most `timeout` seconds; None: without limit.

        It may return early.
        """
        if not self._commands:
            self._wakeup.acquire(timeout=-1 if timeout is None else timeout)
        self._wakeup.acquire(blocking=False)  # else the next wait would end at once
