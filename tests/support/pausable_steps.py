"""A step of a program that can be paused at any access to shared memory, resumed, or killed there.

The step runs on a thread of its own, but only one thread of all runs at a time: `resume` returns
when the step pauses or ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from support.time_limits import TIMEOUT


class StepKilled(BaseException):
    """The process of a step was killed."""


class PausableStep:
    """Calls `function` on a thread, beginning with the first `resume`."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        # Accesses until the next pause; 0: none follows.
        self._left = 0
        self.ended = self.killed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self, accesses: int = 0) -> None:
        """Run until before this access from now on; 0: to the end. Raises what the step raises."""
        if not self.ended:
            self._left = accesses
            self._go.release()
            if not self._back.acquire(timeout=TIMEOUT):
                raise TimeoutError("a step waits for something outside of its thread")
        if self.ended:
            self._thread.join()
            if self._error is not None and not self.killed:
                raise self._error

    def kill(self) -> None:
        """End the step where it is: it makes no access any longer."""
        self.killed = True
        if not self.ended:
            self.resume()

    def note_access(self) -> None:
        """The step makes an access next. Called by the step."""
        if self.killed:
            raise StepKilled
        if self._left:
            self._left -= 1
            if not self._left:
                self.pause()

    def pause(self) -> None:
        """Let others run. Called by the step."""
        self._back.release()
        self._go.acquire()
        if self.killed:
            raise StepKilled

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.killed:
                self._function()
        except BaseException as error:  # raised again by `resume`
            self._error = error
        self.ended = True
        self._back.release()
