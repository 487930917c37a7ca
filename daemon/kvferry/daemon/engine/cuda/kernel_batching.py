"""Kernel batching: when the kernels of staged chunks are launched, and how many together.

Without MPS, processes share a GPU by time slices. Each time slice of this process costs a busy
engine 0.3 to 0.45 ms, whatever the kernels in it do. So many chunks share one time slice. It also
starts late: an H200 first lets the engine run for 2.1 ms. The link drains the staging buffer in
about twice that time, and must not become idle until the time slice starts:

    loads    DMA fills the buffer continuously. The kernels of two thirds of its content are
             launched for one time slice, and the last third is filled until that starts
    stores   once only a third of the buffer remains to be written back, kernels that gather into
             all free units are launched for one time slice (staging.py)

Chunks are small; chunks of several jobs and engines share a time slice. If a chunk becomes ready
before the requested time slice has started, its kernel is launched, too. So only loads are held
back, and only while more of them arrive and launched kernels have not ended. If no other process
uses the GPU, a time slice starts at once. Called by the device worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvferry.cuda.driver import Event
from kvferry.daemon.engine.cuda.chunk import Chunk
from kvferry.daemon.engine.cuda.staging import LAG
from kvferry.proto.specs import Direction


class KernelBatching:
    """Chunks of one direction that wait for their launch, and the last requested time slice.

    reached: returns whether the device has reached an event.
    """

    def __init__(self, direction: Direction, reached: Callable[[Event], bool]) -> None:
        self._direction = direction
        self._reached = reached
        self._waiting: deque[Chunk] = deque()
        # Events before and after the kernels launched last. _begun is None once they have started.
        self._begun: Event | None = None
        self._done: Event | None = None
        self._launched_units = 0

    def add(self, chunk: Chunk) -> None:
        """Add a chunk that will be launched after those added before."""
        self._waiting.append(chunk)

    @property
    def waiting_units(self) -> int:
        return sum([chunk.units for chunk in self._waiting])

    @property
    def awaited(self) -> bool:
        """Whether kernels were launched whose time slice has not started."""
        if self._begun is not None and self._reached(self._begun):
            self._begun = None
        return self._begun is not None

    @property
    def ahead(self) -> int:
        """Units of chunks whose kernels have not started."""
        return self.waiting_units + self.awaited * self._launched_units

    def due(self, more: bool) -> list[Chunk]:
        """Remove and return the chunks to launch now.

        more: other chunks wait for units of the buffer.
        """
        return [self._waiting.popleft() for _ in range(self._due(more))]

    def launched(self, chunks: list[Chunk], begun: Event | None, done: Event) -> None:
        """These chunks were launched between two events.

        begun: None if they joined a time slice that was awaited.
        """
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
        """How many chunks have (LAG - 1) / LAG of the waiting units."""
        left = (LAG - 1) * self.waiting_units
        for count, chunk in enumerate(self._waiting, 1):
            left -= LAG * chunk.units
            if left <= 0:
                return count
        return len(self._waiting)

    def _arrived(self) -> int:
        """How many chunks were completely copied over the link."""
        for count, chunk in enumerate(self._waiting):
            if chunk.moved is None or not self._reached(chunk.moved):
                return count
        return len(self._waiting)
