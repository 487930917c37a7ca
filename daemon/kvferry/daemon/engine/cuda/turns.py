"""Turns of the GPU: when the kernels of staged pieces are launched, and which together.

Without MPS the kernels of two processes take turns on the GPU, and each turn costs a busy engine
0.3 to 0.45 ms, whatever is done in it: so few turns, with as much in each as the buffer holds. A
turn does not come at once either. An H200 gives a busy engine 2.1 ms at a time, and ours come
between. The link empties the buffer in two such times: who asks in the second gets a turn at its
end, whenever that was; in the first, one with half as much in it; and a little late, after a third.
Until it has come the link needs something to do:

    loads    DMA fills the buffer all the time; of what it holds, two thirds are one turn. The last
             third is filled while that turn comes
    stores   a turn gathers into all that is free once only a third is left to drain (staging.py)

Pieces are small, and many of them share a turn, also those of several jobs and engines. What is
ready while a turn is awaited joins it: its kernel is launched behind those that wait already. So
nothing is held back but loads, and only while more of them come and a turn is under way.

Where no other process has the GPU a turn comes at once and costs nobody anything. Then what counts
is the lane's time: stores go in few large pieces, each gathered while the one before it is on the
link. A turn that is seen to take long ends that for a while.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvferry.cuda.driver import Event
from kvferry.daemon.engine.cuda.piece import Piece
from kvferry.daemon.engine.cuda.staging import LAG
from kvferry.proto.specs import Direction

SLOW = 150e-6
"""Seconds: a turn that comes no sooner waits for another process."""
REMEMBERED = 8
"""Turns that may come at once until none of them is thought to be slow."""


class Turns:
    """The turns of one direction. `reached`: whether the device has come to an event."""

    def __init__(
        self,
        direction: Direction,
        reached: Callable[[Event], bool],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._direction = direction
        self._reached = reached
        self._clock = clock
        self._asked_at = 0.0
        self._slow = 0
        self._waiting: deque[Piece] = deque()
        self._begun: Event | None = None
        self._done: Event | None = None
        self._asked = 0

    def add(self, piece: Piece) -> None:
        self._waiting.append(piece)

    @property
    def waiting(self) -> int:
        """Pieces that were not launched yet."""
        return len(self._waiting)

    @property
    def waiting_units(self) -> int:
        return sum([piece.units for piece in self._waiting])

    @property
    def awaited(self) -> bool:
        """A turn was asked for, and has not come."""
        if self._begun is not None and self._reached(self._begun):
            self._begun = None  # it came: the driver need not be asked again
        return self._begun is not None

    @property
    def at_once(self) -> bool:
        """Whether turns come at once, as far as those of late were `watch`ed."""
        return not self._slow

    def watch(self) -> None:
        """While a turn is awaited it shows whether it takes long."""
        if self.awaited and self._clock() - self._asked_at > SLOW:
            self._slow = REMEMBERED

    @property
    def ahead(self) -> int:
        """Units of pieces whose turn has not come."""
        return self.waiting_units + self.awaited * self._asked

    def due(self, more: bool) -> list[Piece]:
        """The pieces to launch now; `more`: others wait for the room that these have."""
        return [self._waiting.popleft() for _ in range(self._due(more))]

    def ask(self, pieces: list[Piece], begun: Event | None, done: Event) -> None:
        """These were launched between two events; begun is None where they join."""
        if begun is not None:
            self._asked_at, self._slow = self._clock(), max(0, self._slow - 1)
        units = sum([piece.units for piece in pieces])
        self._asked = units if begun else self._asked + units
        self._begun, self._done = begun or self._begun, done

    def _due(self, more: bool) -> int:
        if not self._waiting:
            return 0
        if self._direction is Direction.STORE or not more:
            return len(self._waiting)
        if self._done is None or self._reached(self._done):
            return self._all_but_the_lag()
        return self._arrived() if self.awaited else 0

    def _all_but_the_lag(self) -> int:
        """Of the units that wait: how many pieces have as much."""
        left = (LAG - 1) * self.waiting_units
        for count, piece in enumerate(self._waiting, 1):
            left -= LAG * piece.units
            if left <= 0:
                return count
        return len(self._waiting)

    def _arrived(self) -> int:
        for count, piece in enumerate(self._waiting):
            if piece.moved is None or not self._reached(piece.moved):
                return count
        return len(self._waiting)
