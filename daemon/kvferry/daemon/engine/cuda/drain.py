"""The second half of staged stores: from the staging buffer to the pool, behind their gather.

To enqueue the DMA of a whole turn takes the lane as long as the link takes for some MiB, and no
load can come meanwhile. So only as much is enqueued as keeps the link busy, and a part of a piece
at a time: the driver takes 1.5 to 3 us for a fragment, and who wants something else of it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvferry.cuda.driver import Driver, Event
from kvferry.daemon.engine.cuda.link import Link
from kvferry.daemon.engine.cuda.piece import Piece, fail, over
from kvferry.proto.errors import KVFerryError
from kvferry.proto.specs import Direction

AHEAD = 140 << 20
"""Bytes that keep the link busy until the lane comes again; of whatever size, a piece has another
one behind it."""
PART, PART_BYTES = 32, 32 << 20
"""Fragments of a part; or where they are small as many as have so many bytes, for the link has to
take longer for them than the lane."""


class Drain:
    """Pieces in the order in which they were gathered, on one stream."""

    def __init__(self, driver: Driver, link: Link, stream: int) -> None:
        self._driver = driver
        self._link = link
        self._stream = stream
        self._waiting: deque[tuple[Piece, Event]] = deque()
        """With the end of its gather, each."""
        self._enqueued: deque[tuple[int, Event]] = deque()
        """Bytes and end of each piece."""
        self._nbytes = 0
        """Of these."""
        self._parts: Iterator[bool] | None = None
        """Of the first that waits, if some of it was enqueued."""

    def add(self, piece: Piece, gathered: Event) -> None:
        self._waiting.append((piece, gathered))

    @property
    def waiting(self) -> int:
        """Pieces that were not enqueued whole yet."""
        return len(self._waiting)

    @property
    def dry(self) -> bool:
        """Whether one waits and the link has none."""
        self._look()
        return bool(self._waiting) and not (self._enqueued or self._parts)

    def go_on(self) -> bool:
        """Enqueue a part, unless the link is busy; whether there is another one to enqueue."""
        self._look()
        if self._due:
            self._enqueue_next()
        return self._due

    @property
    def _due(self) -> bool:
        return bool(self._waiting) and (self._nbytes < AHEAD or len(self._enqueued) < 2)

    def finish(self) -> None:
        """Enqueue everything."""
        while self._waiting:
            self._enqueue_next()

    def _look(self) -> None:
        while self._enqueued and over(self._driver, self._enqueued[0][1]):
            self._nbytes -= self._enqueued.popleft()[0]

    def _enqueue_next(self) -> None:
        """A piece that could not be has its `error`, and so have those behind it."""
        piece, gathered = self._waiting[0]
        try:
            if self._parts is None:
                self._parts = self._begin(piece, gathered)
            if next(self._parts):
                return
            piece.done = piece.moved = end = self._driver.record(self._stream)
        except KVFerryError as error:
            fail(self._driver, [piece for piece, _ in self._waiting], error)
            self._parts = None
            self._waiting.clear()
            return
        self._parts = None
        self._waiting.popleft()
        self._enqueued.append((piece.nbytes, end))
        self._nbytes += piece.nbytes

    def _begin(self, piece: Piece, gathered: Event) -> Iterator[bool]:
        assert piece.stage is not None
        self._driver.call("cuStreamWaitEvent", self._stream, gathered.handle, 0)
        most = max(PART, PART_BYTES // piece.stage.table.block_bytes)
        return self._link.in_parts(Direction.STORE, piece.stage.packed, most, self._stream)
