"""Time that passes at once: the loop and clock of tests that are marked `virtual_time`.

Where the loop would wait for a timer, the clock jumps to it, as trio's autojump clock does. So a
test may wait for hours, a limit of time has the value that users have, and no load of the machine
makes a test late. For code on one thread only: to the clock, a thread or a process that works
elsewhere does nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from selectors import DefaultSelector, SelectorKey


class JumpingSelector(DefaultSelector):
    """Instead of waiting, it calls `jump` with the seconds that it would wait."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        assert timeout is not None, "the test waits for nothing that is known to its loop"
        ready = super().select(0)
        if not ready and timeout > 0:
            self._jump(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which is `time.monotonic` until it is closed."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._real_clock = time.monotonic
        super().__init__(JumpingSelector(self.advance))
        time.monotonic = self.time

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass without running anything, as a call that blocks does."""
        self._now += seconds

    def close(self) -> None:
        if not self.is_closed():
            time.monotonic = self._real_clock
        super().close()
