"""Orders on their way to the lane, and how it sleeps until there are some.

Not a queue.SimpleQueue: its get with a timeout as short as the lane's naps waits for ever when
the time is over before it looks twice (CPython 3.11 and 3.12; it takes a negative rest for none).
A lock that is let go for each order wakes as fast, and its timeout holds.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listen:
    """Tell that you go round: the lane reports a Beat. posted: when this was asked."""

    posted: float


@dataclass(frozen=True, slots=True)
class Stop:
    pass


class Inbox(Generic[T]):
    """`put` from any thread, `get` from one."""

    def __init__(self) -> None:
        self._orders: deque[T] = deque()
        self._bell = threading.Lock()
        self._bell.acquire()

    def put(self, order: T) -> None:
        self._orders.append(order)
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def get(self, patience: float | None) -> T | None:
        """The next order, or None where there is none within `patience` seconds.

        0: do not wait. None: for as long as it takes, though it may come back with None.
        """
        if not self._orders and patience != 0:
            self._bell.acquire(timeout=-1 if patience is None else patience)
        return self._orders.popleft() if self._orders else None
