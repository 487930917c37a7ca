"""What has to be made anew whenever a daemon went and came back, without anybody waiting for it.

An engine must neither fail nor stall for want of its daemon. So what depends on one (a client that
has registered tensors, a manager over clients) is made by a function, in a thread, and taken over
when it is there; until then there is none, and offloading is off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvferry.proto.errors import Gone, KVFerryError

log = logging.getLogger("kvferry")

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
"""Seconds between two attempts: more after each."""


class Losable(Protocol):
    @property
    def gone(self) -> Gone | None: ...

    def close(self) -> None: ...


T = TypeVar("T", bound=Losable)


class Lasting(Generic[T]):
    """`make` is called at once, here, and later in a thread; it raises KVFerryError where it fails.

    Not for use by several threads at once.
    """

    def __init__(self, what: str, make: Callable[[], T]) -> None:
        self._what, self._make = what, make
        self._made: list[T] = []
        self._thread: threading.Thread | None = None
        self._pause, self._next = FIRST_PAUSE, 0.0
        self._now: T | None = None
        try:
            self._now = make()
        except KVFerryError as error:
            log.warning("kvferry: %s: %s; going on without, trying again", what, error)

    @property
    def current(self) -> T | None:
        """What there is; None while there is nothing."""
        if self._now is not None and self._now.gone is None:
            return self._now
        return self._look()

    def give_up(self) -> None:
        """What there is does not do: close it, and make another."""
        if self._now is not None:
            self._now.close()
            self._now = None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        for one in (*self._made, self._now):
            if one is not None:
                one.close()
        self._made, self._now = [], None

    def _look(self) -> T | None:
        if self._now is not None:
            log.warning("kvferry: %s: %s; offloading is off", self._what, self._now.gone)
            self.give_up()
        if self._thread is None:
            if time.monotonic() >= self._next:
                self._thread = threading.Thread(target=self._try, name="kvferry-connect")
                self._thread.start()
        elif not self._thread.is_alive():
            self._thread.join()
            self._thread = None
            self._next = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            if self._made:
                self._now, self._pause = self._made.pop(), FIRST_PAUSE
                log.warning("kvferry: %s: connected; offloading is on", self._what)
        return self._now

    def _try(self) -> None:
        try:
            self._made.append(self._make())
        except KVFerryError:
            pass  # the next attempt may do better; the first said what is wrong
        except Exception:
            log.exception("kvferry: %s", self._what)
