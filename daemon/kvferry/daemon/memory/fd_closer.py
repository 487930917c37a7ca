"""Closes descriptors and mappings on threads of its own, so that its callers do not block.

The last close or unmap of a memfd frees its memory, which takes 100 to 200 ms per GiB. The last
close of other files may block for any time: a TCP socket lingers, FUSE calls its server, a Unix
socket closes the descriptors in its queue. Called on any thread. When the process ends, the kernel
closes the remaining files.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

# Maximum of threads. One that hangs does not delay the others.
MAX_THREADS = 16
# Seconds that an idle thread waits for work before it ends.
IDLE_SECONDS = 2.0
THREAD_NAME = "kvferry-closer"
# A memfd with less memory is closed by the caller, in 50 us. Otherwise a client that sends many
# small ones could use up the daemon's descriptors faster than the threads close them.
SMALL_BYTES = 256 << 10


class Closer:
    """Starts threads as needed; a thread without work ends after `patience` seconds."""

    def __init__(self, patience: float = IDLE_SECONDS) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        self._due: deque[Callable[[], None]] = deque()
        self._threads = self._idle = 0

    def close_later(self, close: Callable[[], None]) -> None:
        """Call `close` on a thread. An OSError that it raises is ignored."""
        with self._changed:
            self._due.append(close)
            if len(self._due) <= self._idle or self._threads == MAX_THREADS:
                self._changed.notify()
                return
            with suppress(RuntimeError):  # cannot start a thread: a running one closes it later
                threading.Thread(target=self._run, name=THREAD_NAME, daemon=True).start()
                self._threads += 1

    def _run(self) -> None:
        while (close := self._next_close()) is not None:
            with suppress(OSError):
                close()
            del close  # else what it references stays in memory until the next close

    def _next_close(self) -> Callable[[], None] | None:
        """The next close; None if there was none within `patience`: the thread must end."""
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
    """Call `close` on a thread."""
    _closer.close_later(close)


def close_descriptor_later(descriptor: int) -> None:
    """Close a descriptor on a thread."""
    _closer.close_later(partial(os.close, descriptor))


def close_memory(descriptor: int) -> None:
    """Close a memfd or a file of tmpfs: here if it has little memory, else on a thread."""
    if os.fstat(descriptor).st_blocks * 512 < SMALL_BYTES:
        os.close(descriptor)
    else:
        close_descriptor_later(descriptor)
