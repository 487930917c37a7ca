"""Threads that close descriptors and mappings, so that no event loop or device worker waits for it.

The last close or unmap of a memfd frees its memory: 100 to 200 ms a GiB. The last close of another
file takes as long as its owner likes: a TCP socket lingers, FUSE asks its server, a Unix socket
closes what is on its way through it. Called from any thread; the end of the process waits for
nothing that is still to be closed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

# That close at a time: one that hangs holds up no other.
MOST_THREADS = 16
# Seconds that a thread with nothing to close waits for more before it ends.
PATIENCE = 2.0
THREAD_NAME = "kvferry-closer"
# A memfd with less memory is closed at once, in 50 us: a client that sends many small ones must not
# have the daemon run out of descriptors because the threads are behind.
SMALL_BYTES = 256 << 10


class Closer:
    """Threads that are there when needed."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        self._due: deque[Callable[[], None]] = deque()
        self._threads = self._idle = 0

    def put(self, close: Callable[[], None]) -> None:
        """Have it called in a thread. What it raises as OSError is nobody's."""
        with self._changed:
            self._due.append(close)
            if len(self._due) <= self._idle or self._threads == MOST_THREADS:
                self._changed.notify()
                return
            with suppress(RuntimeError):  # no thread can be had: one that is there closes it later
                threading.Thread(target=self._run, name=THREAD_NAME, daemon=True).start()
                self._threads += 1

    def _run(self) -> None:
        while (close := self._take()) is not None:
            with suppress(OSError):
                close()
            del close  # or what it holds would live until there is more to close

    def _take(self) -> Callable[[], None] | None:
        """The next one; None, when there was none for a while, to the thread that shall end."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._due, self._patience)
            self._idle -= 1
            if self._due:
                return self._due.popleft()
            self._threads -= 1
            return None


_closer = Closer()


def close_later(close: Callable[[], None]) -> None:
    """Have something closed or unmapped in a thread."""
    _closer.put(close)


def close_descriptor_later(descriptor: int) -> None:
    _closer.put(partial(os.close, descriptor))


def close_memory(descriptor: int) -> None:
    """Close a memfd or a file of tmpfs: here if it has little memory, else in a thread."""
    if os.fstat(descriptor).st_blocks * 512 < SMALL_BYTES:
        os.close(descriptor)
    else:
        close_descriptor_later(descriptor)
