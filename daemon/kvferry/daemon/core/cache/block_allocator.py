"""Blocks of a cache that hold no key: free, or still used by jobs from before a reset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain


class BlockAllocator:
    """Free blocks, and orphaned blocks with the number of jobs that use each."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._freed: list[int] = []
        # From this block on, none has held a key since the last reset.
        self._unused = 0
        # Blocks above `_unused` that are orphaned; they are returned when their jobs end.
        self._skipped: set[int] = set()
        self._orphaned: Counter[int] = Counter()

    @property
    def free(self) -> int:
        return len(self._freed) + self._capacity - self._unused - len(self._skipped)

    @property
    def orphaned(self) -> int:
        return len(self._orphaned)

    def allocate_blocks(self, count: int) -> tuple[int, ...]:
        """Take `count` free blocks; there must be that many."""
        blocks = self._freed[-count:]
        del self._freed[-count:]
        while self._skipped and len(blocks) < count:
            if self._unused in self._skipped:
                self._skipped.remove(self._unused)
            else:
                blocks.append(self._unused)
            self._unused += 1
        first, self._unused = self._unused, self._unused + count - len(blocks)
        return *blocks, *range(first, self._unused)

    def free_blocks(self, blocks: Iterable[int]) -> None:
        self._freed.extend(blocks)

    def occupy_blocks(self, blocks: set[int]) -> None:
        """Take these blocks; all must be free."""
        self._unused = max(blocks, default=-1) + 1
        self._freed = [block for block in range(self._unused) if block not in blocks]

    def reset_blocks(self, jobs: Iterable[Sequence[int]]) -> None:
        """After a reset: the blocks that jobs use are orphaned, all others are free.

        The time grows with the blocks of the jobs, not with the number of keys.
        """
        for blocks in jobs:
            self._orphaned.update(blocks)
        self._freed = []
        self._unused, self._skipped = 0, set(self._orphaned)

    def release_orphaned(self, blocks: Iterable[int]) -> None:
        """A job from before a reset that used these blocks has ended."""
        for block in blocks:
            self._orphaned[block] -= 1
            if not self._orphaned[block]:
                del self._orphaned[block]
                self._freed.append(block)

    def check_integrity(self, held: list[int], past: Iterable[Sequence[int]]) -> None:
        orphaned = Counter(chain.from_iterable(past))
        assert orphaned == self._orphaned, (
            "orphaned blocks are not those of jobs from before a reset"
        )
        unused = set(range(self._unused, self._capacity))
        assert self._skipped <= unused, "a block is skipped that was passed"
        blocks = [*held, *orphaned, *self._freed, *(unused - self._skipped)]
        assert sorted(blocks) == list(range(self._capacity)), "a block is in two places, or in none"
