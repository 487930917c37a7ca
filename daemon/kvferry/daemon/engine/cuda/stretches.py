"""What the chunks of a run need, made for many of them at once.

A chunk is a few dozen blocks, and finding out where they lie takes numpy hardly less time than for
a thousand. So it is done for a stretch of the run when the first chunk of it is submitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import ReferenceType, ref

from kvferry.daemon.core.layout import Extent

T = TypeVar("T")

# Stretches: of as many runs whose chunks take turns.
KEPT = 32


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch(Generic[T]):
    """Blocks `begin` to `end` of a run, which may be gone: its transfer was cancelled."""

    run: ReferenceType[Extent]
    begin: int
    end: int
    made: T


class Stretches(Generic[T]):
    """The newest stretches; of one run at most one."""

    def __init__(self) -> None:
        self._kept: deque[_Stretch[T]] = deque(maxlen=KEPT)

    def find(self, chunk: Extent, blocks: int, make: Callable[[Extent], T]) -> tuple[T, int]:
        """What was made for a stretch that contains this chunk, and the chunk's first block there.

        If there is none, it is made for a stretch of at most `blocks` that begins with the chunk.
        """
        run, begin, end = chunk.of or chunk, chunk.at, chunk.at + chunk.gpu_blocks.size
        for stretch in self._kept:
            if stretch.run() is run:
                if stretch.begin <= begin and end <= stretch.end:
                    if end == stretch.end:
                        self._kept.remove(stretch)
                    return stretch.made, begin - stretch.begin
                self._kept.remove(stretch)  # the chunk crosses its end
                break
        last = max(end, min(begin + blocks, run.gpu_blocks.size))
        made = make(run.cut(begin, last))
        if last > end:
            self._kept.append(_Stretch(ref(run), begin, last, made))
        return made, 0
