"""Blocks of a cache that hold no key: free, or still used by jobs from before a reset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain


class BlockAllocator:
    """Free blocks, and doomed ones with the number of jobs that use each."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._given_back: list[int] = []
        # From this block on, none has held a key since the last reset.
        self._unused = 0
        # Blocks above `_unused` that are doomed; they are returned when their jobs end.
        self._skipped: set[int] = set()
        self._doomed: Counter[int] = Counter()

    @property
    def free(self) -> int:
        return len(self._given_back) + self._capacity - self._unused - len(self._skipped)

    @property
    def doomed(self) -> int:
        return len(self._doomed)

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` free blocks; there must be that many."""
        blocks = self._given_back[-count:]
        del self._given_back[-count:]
        while self._skipped and len(blocks) < count:
            if self._unused in self._skipped:
                self._skipped.remove(self._unused)
            else:
                blocks.append(self._unused)
            self._unused += 1
        first, self._unused = self._unused, self._unused + count - len(blocks)
        return *blocks, *range(first, self._unused)

    def give_back(self, blocks: Iterable[int]) -> None:
        self._given_back.extend(blocks)

    def occupy(self, blocks: set[int]) -> None:
        """Take these blocks; all must be free."""
        self._unused = max(blocks, default=-1) + 1
        self._given_back = [block for block in range(self._unused) if block not in blocks]

    def vacate(self, jobs: Iterable[Sequence[int]]) -> None:
        """No key is anywhere any more: what jobs use is doomed, and all the rest is free.

        Takes as long as the jobs are large, however many keys there were.
        """
        for blocks in jobs:
            self._doomed.update(blocks)
        self._given_back = []
        self._unused, self._skipped = 0, set(self._doomed)

    def redeem(self, blocks: Iterable[int]) -> None:
        """A job from before a reset that used these blocks has ended."""
        for block in blocks:
            self._doomed[block] -= 1
            if not self._doomed[block]:
                del self._doomed[block]
                self._given_back.append(block)

    def check_integrity(self, held: list[int], past: Iterable[Sequence[int]]) -> None:
        doomed = Counter(chain.from_iterable(past))
        assert doomed == self._doomed, "doomed blocks are not those of jobs from before a reset"
        unused = set(range(self._unused, self._capacity))
        assert self._skipped <= unused, "a block is skipped that was passed"
        blocks = [*held, *doomed, *self._given_back, *(unused - self._skipped)]
        assert sorted(blocks) == list(range(self._capacity)), "a block is in two places, or in none"
