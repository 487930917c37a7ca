"""What pieces of a run need, made for many of them at once.

A piece is a few dozen blocks, and to find out where they lie takes numpy hardly less long than for
a thousand. While the lane does it no load comes, and a turn of the GPU that is due is asked for
late. So it is done for a stretch of the run when the first piece of it comes; and of the first
stretch before: who plans has numpy in its core's caches, and takes much less time than a lane which
has slept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import ReferenceType, ref

from kvferry.daemon.core.layout import Extent

T = TypeVar("T")

KEPT = 32
"""Stretches: of so many runs that wait, or whose pieces take turns."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch(Generic[T]):
    """Blocks `begin` to `end` of a run."""

    run: ReferenceType[Extent]
    """Nobody else may hold it any more: it was given up."""
    begin: int
    end: int
    made: T


class Stretches(Generic[T]):
    """blocks: of a stretch, at most. make: of a stretch, what its pieces need; in the thread that
    asks, which may be any."""

    def __init__(self) -> None:
        self._kept: deque[_Stretch[T]] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def find(self, piece: Extent, blocks: int, make: Callable[[Extent], T]) -> tuple[T, int]:
        """What was made for a stretch that has this piece, or is now for one that begins with it
        and has as many `blocks`, or as there are; and where in it the piece begins."""
        run, begin, end = piece.of or piece, piece.at, piece.at + piece.gpu_blocks.size
        with self._lock:
            for stretch in self._kept:
                if stretch.run() is run and stretch.begin <= begin and end <= stretch.end:
                    if end == stretch.end:
                        self._kept.remove(stretch)
                    return stretch.made, begin - stretch.begin
        last = max(end, min(begin + blocks, run.gpu_blocks.size))
        made = make(run.cut(begin, last))
        self._forget(run)  # a piece lay across its end: what follows is in this one
        if last > end:
            self._keep(_Stretch(ref(run), begin, last, made))
        return made, 0

    def prepare(self, run: Extent, blocks: int, make: Callable[[Extent], T]) -> None:
        """Make the first stretch of a run, unless as many wait as are kept."""
        if blocks and self._has_room():
            last = min(blocks, run.gpu_blocks.size)
            self._keep(_Stretch(ref(run), 0, last, make(run.cut(0, last))))

    def _has_room(self) -> bool:
        with self._lock:
            if len(self._kept) == KEPT:
                alive = [stretch for stretch in self._kept if stretch.run() is not None]
                self._kept = deque(alive, KEPT)
            return len(self._kept) < KEPT

    def _forget(self, run: Extent) -> None:
        with self._lock:
            for stretch in self._kept:
                if stretch.run() is run:
                    self._kept.remove(stretch)
                    return

    def _keep(self, stretch: _Stretch[T]) -> None:
        with self._lock:
            self._kept.append(stretch)
