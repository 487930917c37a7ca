"""The helm: who has it may touch what the lane works with, and submit.

It is the lane's. While that sleeps it leaves the helm, and a guest may take it for a moment, to
begin what it has posted. While the driver is given stores, which takes it a tenth of a millisecond
without the GIL, the lane lends it: a guest may begin a load then, and no store, for one is about to
be submitted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Helm:
    """As a context, entered by whoever has it: lent meanwhile. A guest does not lend it on."""

    def __init__(self) -> None:
        self._taken = threading.Lock()
        self._taken.acquire()
        self._visited = False
        """Whether a guest has it."""
        self.lent = False

    @property
    def free(self) -> bool:
        """Whether nobody has it."""
        return not self._taken.locked()

    def leave(self) -> None:
        """The lane's part."""
        self._taken.release()

    def take(self) -> None:
        """The lane's part."""
        self._taken.acquire()

    def visit(self, do: Callable[[], None]) -> bool:
        """A guest's part: if nobody has it, do something there. Whether it was done."""
        if not self._taken.acquire(blocking=False):
            return False
        self._visited = True
        try:
            do()
        finally:
            self._visited = False
            self._taken.release()
        return True

    def __enter__(self) -> None:
        if not self._visited:
            self.lent = True
            self._taken.release()

    def __exit__(self, *_: object) -> None:
        if self.lent:
            self._taken.acquire()
            self.lent = False
