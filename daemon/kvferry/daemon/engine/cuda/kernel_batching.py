"""Kernel batching: when the kernels of staged chunks are launched, and which together.

Without MPS the kernels of two processes take turns on the GPU, and each turn costs a busy engine
0.3 to 0.45 ms, whatever is done in it. So few turns, with as much in each as the buffer holds. A
turn does not come at once either: an H200 gives a busy engine 2.1 ms at a time. The link empties
the buffer in about two such times, and needs something to do until the turn has come:

    loads    DMA fills the buffer all the time. Two thirds of what it holds are one turn; the last
             third is filled while that turn is awaited
    stores   a turn gathers into all that is free once only a third is left to drain (staging.py)

Chunks are small, and many of them share a turn, also those of several jobs and engines. What is
ready while a turn is awaited joins it: its kernel is launched behind those that wait already. So
nothing is held back but loads, and only while more of them arrive and a turn is under way. If no
other process uses the GPU a turn comes at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvferry.cuda.driver import Event
from kvferry.daemon.engine.cuda.chunk import Chunk
from kvferry.daemon.engine.cuda.staging import LAG
from kvferry.proto.specs import Direction


class KernelBatching:
    """Chunks of one direction that wait for a launch, and the turn that was asked for last.

    reached: whether the device has reached an event.
    """

    def __init__(self, direction: Direction, reached: Callable[[Event], bool]) -> None:
        self._direction = direction
        self._reached = reached
        self._waiting: deque[Chunk] = deque()
        # Events before and behind the kernels launched last. No event before them: their turn came.
        self._begun: Event | None = None
        self._done: Event | None = None
        self._launched_units = 0

    def add(self, chunk: Chunk) -> None:
        self._waiting.append(chunk)

    @property
    def waiting_units(self) -> int:
        return sum([chunk.units for chunk in self._waiting])

    @property
    def awaited(self) -> bool:
        """Whether kernels were launched, and their turn has not come."""
        if self._begun is not None and self._reached(self._begun):
            self._begun = None
        return self._begun is not None

    @property
    def ahead(self) -> int:
        """Units of chunks whose turn has not come."""
        return self.waiting_units + self.awaited * self._launched_units

    def due(self, more: bool) -> list[Chunk]:
        """Remove and return the chunks to launch now. more: others wait for the room of these."""
        return [self._waiting.popleft() for _ in range(self._due(more))]

    def launched(self, chunks: list[Chunk], begun: Event | None, done: Event) -> None:
        """These were launched between two events; begun is None if they join an awaited turn."""
        units = sum([chunk.units for chunk in chunks])
        self._launched_units = units if begun else self._launched_units + units
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
        """How many chunks have all but one part in LAG of the units that wait."""
        left = (LAG - 1) * self.waiting_units
        for count, chunk in enumerate(self._waiting, 1):
            left -= LAG * chunk.units
            if left <= 0:
                return count
        return len(self._waiting)

    def _arrived(self) -> int:
        """How many chunks the link has brought."""
        for count, chunk in enumerate(self._waiting):
            if chunk.moved is None or not self._reached(chunk.moved):
                return count
        return len(self._waiting)
