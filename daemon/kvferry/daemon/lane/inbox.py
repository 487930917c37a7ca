"""Orders on their way to the lane, and how it sleeps until there are some.

Not a queue.SimpleQueue: its get with a timeout as short as the lane's naps waits for ever when
the time is over before it looks twice (CPython 3.11 and 3.12; it takes a negative rest for none).
A lock that is let go for each order wakes as fast, and its timeout holds.

To wake a thread takes as long as to do the first of an order, and what it runs has left its core's
caches. So while the lane sleeps, who puts an order may take the helm (helm.py) and begin it
instead.

Who wants the GIL has it once it has waited for as long as the switch interval says. The lane goes
first: what it has to do is short, and the device waits for it. So others wait longer for the lane
than it waits for them. Python's own 5 ms show, for either: a load may come in while the lane
submits stores. And with a tenth of a millisecond they take each other's turns all the time.

A nap that ends by itself is another matter: the device has other things to do, and the loop may be
about to find out what a load wants. To be interrupted, and to get the GIL again, costs it as long
as half of that takes. So then the lane waits like the others.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kvferry.daemon.lane.helm import Helm

T = TypeVar("T")

CALLED, AWAKE = 5e-5, 5e-4
"""Seconds that a thread waits for the GIL: the lane that an order has woken; any other."""

RESTED = 1.5e-4
"""Seconds that the lane has slept, or is about to while the device is busy, before others begin for
it. Where orders come one on the heels of the other it had better take many in one go: the loop is
what is short then."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Tell that you go round: the lane reports a Beat. posted: when this was asked."""

    posted: float


@dataclass(frozen=True, slots=True)
class Stop:
    pass


class Inbox(Generic[T]):
    """`put` from any thread, `wait` and `take` in one, which has the helm unless it waits or lends
    it."""

    def __init__(self) -> None:
        self._orders: deque[T] = deque()
        self.helm = Helm()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._rested_at = 0.0
        self._sleeps = False

    def put(self, order: T, begin: Callable[[T], None] | None = None) -> None:
        """`begin`: what to do with it here, at the helm, where that is free and nothing else waits
        for the lane. It is woken after that, to go on."""
        begun = begin is not None and self._rested() and self.helm.visit(partial(begin, order))
        if not begun:
            self._orders.append(order)
        if self._sleeps:
            sys.setswitchinterval(CALLED)
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def _rested(self) -> bool:
        return not self._orders and time.perf_counter() > self._rested_at

    @property
    def empty(self) -> bool:
        return not self._orders

    def take(self) -> T | None:
        """The next order, if there is one."""
        return self._orders.popleft() if self._orders else None

    def wait(self, patience: float | None, *, let_in: bool = False) -> None:
        """Sleep until there is an order, for `patience` seconds at most; it may end before.

        0: do not sleep. None: for as long as it takes. let_in: others may begin for it at once.
        """
        if not self._orders and patience != 0:
            self._sleeps = True
            long = let_in or patience is None or patience > RESTED
            if long:
                self._rested_at = time.perf_counter() + (RESTED if patience is None else 0)
                self.helm.leave()
            self._bell.acquire(timeout=-1 if patience is None else patience)
            if long:
                self.helm.take()
            self._sleeps = False
            sys.setswitchinterval(AWAKE)
        self._bell.acquire(blocking=False)  # or the next nap would end at once, for what is taken
