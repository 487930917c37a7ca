"""EngineEnd: whether vLLM's engine is about to end, so that it stores what only its GPU has.

vLLM tells its connectors only when the workers have ended. Its engine process ends on SIGTERM and
SIGINT, and goes on while a connector has work. So the signals are noted on their way to vLLM's own
handlers. In the scheduler, in the main thread; without such handlers nothing is noted.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# Seconds in which the stores must end; 50 GB cross the link in one.
SECONDS = 3.0


class EngineEnd:
    def __init__(self) -> None:
        self._deadline: float | None = None
        self._taken = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(number)
                if callable(handler) and handler is not signal.default_int_handler:
                    signal.signal(number, partial(self._note, handler))

    def allows_steps(self, in_flight: bool) -> bool:
        """Whether to run more steps for stores. in_flight: whether there are any."""
        if self._deadline is None:
            return in_flight
        return (in_flight or not self._taken) and time.monotonic() < self._deadline

    def take(self) -> bool:
        """Whether the engine ends; True once."""
        ends = self._deadline is not None and not self._taken
        self._taken |= ends
        return ends

    def _note(self, handler: Callable[..., Any], number: int, frame: Any) -> None:
        self._deadline = self._deadline or time.monotonic() + SECONDS
        handler(number, frame)
