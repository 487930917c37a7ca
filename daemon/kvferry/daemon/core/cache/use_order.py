"""The order in which numbers were used, the least recent first.

The order is a log: a use appends the number and a stamp, and the stamp of the number's newest use
is kept beside it. An entry of the log with another stamp is stale and is skipped. So a use moves
nothing, and many uses cost one call of numpy. The log consists of segments. Whenever one is full, a
few neighbours with many stale entries are merged, which keeps the log below three times the size.

    log      a1 b2 c3 a4        stamps  a: 4, b: 2, c: 3        order  b c a

Numbers are host blocks, or the places of keys that a policy remembers. Event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from kvferry.proto.layout import Bools, Int64s

Int32s: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
# Numbers, and the stamp of each.
Segment: TypeAlias = tuple[Int32s, Int64s]

SEGMENT = 4096
# Merges per full segment, if less than half of the log is live. Four visit all segments often
# enough to keep the log below three times the size.
MERGES = 4


class UseOrder:
    """Numbers below `size`. segment: entries of a segment of the log."""

    def __init__(self, size: int, segment: int = SEGMENT) -> None:
        self._stamps = np.zeros(size, np.int64)  # 0: not in the order
        self._now = self._count = 0
        self._segment = segment
        self._segments: list[Segment] = []
        self._last = _new_segment(segment)
        self._filled = self._merged = 0
        # Entries of the full segments, stale ones included.
        self._full_entries = 0

    def __len__(self) -> int:
        return self._count

    @property
    def log_entries(self) -> int:
        """Entries of the log, stale ones included."""
        return self._full_entries + self._filled

    def contains(self, numbers: Int64s) -> Bools:
        """Which of these numbers are in the order."""
        found: Bools = self._stamps[numbers] > 0
        return found

    def stamps_of(self, numbers: Int64s) -> Int64s:
        """The stamp of each number's newest use, which grows; 0: not in the order."""
        return self._stamps[numbers]

    def append(self, numbers: Int64s) -> None:
        """Use distinct numbers, the last one most recently. Those that are absent are added."""
        size, at = numbers.size, 0
        stamps = np.arange(self._now + 1, self._now + size + 1)
        self._now += size
        self._count += size - int(np.count_nonzero(self._stamps[numbers]))
        self._stamps[numbers] = stamps
        while at < size:
            end = min(size, at + self._segment - self._filled)
            filled = self._filled + end - at
            self._last[0][self._filled : filled] = numbers[at:end]
            self._last[1][self._filled : filled] = stamps[at:end]
            self._filled, at = filled, end
            if filled == self._segment:
                self._start_segment()

    def remove(self, numbers: Int64s) -> None:
        """Remove distinct numbers that are in the order."""
        self._stamps[numbers] = 0
        self._count -= numbers.size

    def oldest(self) -> Iterator[Int64s]:
        """All numbers in order, some at a time. The order may change meanwhile: a number that is
        used again comes again, at its new place or not at all."""
        for segment in [*self._segments, self._open_segment()]:
            if (live := self._live(segment)[0]).size:
                yield live.astype(np.int64)

    def numbers(self) -> Int64s:
        """All numbers in order."""
        return np.concatenate([np.empty(0, np.int64), *self.oldest()])

    def check_integrity(self) -> None:
        numbers = self.numbers().tolist()
        assert len(numbers) == len(set(numbers)) == self._count, "a number is in the log twice"
        assert np.flatnonzero(self._stamps).tolist() == sorted(numbers), "stamps are wrong"

    def _open_segment(self) -> Segment:
        numbers, stamps = self._last
        return numbers[: self._filled], stamps[: self._filled]

    def _live(self, segment: Segment) -> Segment:
        numbers, stamps = segment
        live = self._stamps[numbers] == stamps
        return numbers[live], stamps[live]

    def _start_segment(self) -> None:
        segments = self._segments
        segments.append(self._last)
        self._full_entries += self._segment
        self._last, self._filled = _new_segment(self._segment), 0
        while segments and not self._live(segments[0])[0].size:
            self._full_entries -= segments.pop(0)[0].size
            self._merged = max(0, self._merged - 1)
        for _ in range(MERGES if self.log_entries > 2 * self._count else 0):
            self._merge_two()

    def _merge_two(self) -> None:
        """Merge two neighbours if their live entries fit into one segment; else go on."""
        segments, at = self._segments, self._merged
        if at + 1 >= len(segments):
            self._merged = 0
            return
        first, second = self._live(segments[at]), self._live(segments[at + 1])
        if first[0].size + second[0].size > self._segment:
            self._merged += 1
            return
        merged = np.concatenate((first[0], second[0])), np.concatenate((first[1], second[1]))
        self._full_entries += merged[0].size - segments[at][0].size - segments[at + 1][0].size
        segments[at : at + 2] = [merged]


def _new_segment(size: int) -> Segment:
    return np.empty(size, np.int32), np.empty(size, np.int64)
