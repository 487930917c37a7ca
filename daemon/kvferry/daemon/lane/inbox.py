"""Orders on their way to the lane, and how it sleeps until there are some.

Not a queue.SimpleQueue: its get with a timeout as short as the lane's naps waits for ever when
the time is over before it looks twice (CPython 3.11 and 3.12; it takes a negative rest for none).
A lock that is let go for each order wakes as fast, and its timeout holds.

The lane goes before all other threads of the daemon: what it has to do is short, and the device
waits for it. Who wants the GIL gets it once it has waited for as long as the switch interval says,
so that is short while the lane sleeps, and long while it is awake. (Python's own 5 ms, for all
alike, show. So did 0.1: who has the GIL lets it go for a moment now and then, at a socket say, and
with that the wait of the other began anew: sixteen submits were taken in before the first copy
began. With a tenth of that the two threads took each other's turns all the time.)
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

ASLEEP, AWAKE, WATCHING = 5e-5, 5e-3, 1e-4
"""Seconds that a thread waits for the GIL: the lane that has slept; others while it is at work, or
looks at the device without a pause."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Tell that you go round: the lane reports a Beat. posted: when this was asked."""

    posted: float


@dataclass(frozen=True, slots=True)
class Stop:
    pass


class Inbox(Generic[T]):
    """`put` from any thread, `wait` and `take` in one."""

    def __init__(self) -> None:
        self._orders: deque[T] = deque()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._interval = 0.0

    def put(self, order: T) -> None:
        self._orders.append(order)
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    @property
    def full(self) -> bool:
        """Whether there is an order."""
        return bool(self._orders)

    def take(self) -> T | None:
        """The next order, if there is one."""
        return self._orders.popleft() if self._orders else None

    def wait(self, patience: float | None) -> None:
        """Sleep until there is an order, for `patience` seconds at most; it may end before.

        0: do not sleep. None: for as long as it takes.
        """
        if self._orders:
            self._others_wait(AWAKE)
        elif patience == 0:
            if self._others_wait(WATCHING):
                time.sleep(0)  # who waits already waits for as long as before: let it begin anew
        else:
            self._others_wait(ASLEEP)
            self._bell.acquire(timeout=-1 if patience is None else patience)
            self._others_wait(AWAKE)

    def _others_wait(self, seconds: float) -> bool:
        """Whether it was another time before."""
        if seconds == self._interval:
            return False
        self._interval = seconds
        sys.setswitchinterval(seconds)
        return True
