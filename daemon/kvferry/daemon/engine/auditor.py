"""Threads that read host blocks and sum them up: what was stored, and what is loaded.

XXH3 reads about as fast as one core can, and lets the others run meanwhile. Urgent work, that a
load waits for, has threads of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import numpy as np
import xxhash

from kvferry.daemon.core.geometry import Int64s
from kvferry.daemon.engine.ledger import Sums
from kvferry.proto.keys import OffloadKey

BATCH_BYTES = 32 << 20
BATCH_BLOCKS = 1024
"""What one thread takes at a time, at most."""
START_TIMEOUT = 30.0
LOWER = 10
"""How much nicer than the rest of the daemon sealing is."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Host blocks to read: numbers in a region that begins at byte `start` of the pool.

    keys: that of each block; none where blocks have none. A sum is of a block's bytes under its
    key, or its number, so that a block in the wrong place does not pass either.
    """

    start: int
    block_bytes: int
    numbers: Int64s
    keys: Sequence[OffloadKey]

    def batches(self) -> list[slice]:
        step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // self.block_bytes))
        return [slice(at, at + step) for at in range(0, self.numbers.size, step)]

    def cut(self, part: slice) -> Blocks:
        return Blocks(self.start, self.block_bytes, self.numbers[part], self.keys[part])


class Auditor:
    def __init__(self, address: int, nbytes: int, threads: int) -> None:
        self._pool = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        self._urgent = ThreadPoolExecutor(threads, "kvferry-check")
        self._patient = ThreadPoolExecutor(threads, "kvferry-seal", _be_nice)
        for pool in (self._urgent, self._patient):
            _start_all(pool, threads)

    def read(self, blocks: Blocks, *, urgent: bool, done: Callable[[Sums], None]) -> None:
        """Sum blocks up in another thread, and call `done` from there."""

        def finish(future: Future[Sums]) -> None:
            if not future.cancelled():
                done(future.result())

        pool = self._urgent if urgent else self._patient
        pool.submit(self.sums, blocks).add_done_callback(finish)

    def sums(self, blocks: Blocks) -> Sums:
        pool, nbytes, digest = self._pool, blocks.block_bytes, xxhash.xxh3_64_intdigest
        starts = (blocks.start + blocks.numbers * nbytes).tolist()
        seeds = [digest(key) for key in blocks.keys] or blocks.numbers.tolist()
        sums = [digest(pool[a : a + nbytes], s) for a, s in zip(starts, seeds, strict=True)]
        return np.array(sums, dtype=np.uint64)

    def close(self) -> None:
        """Return once no thread reads the pool any more; what was not begun is not done."""
        for pool in (self._urgent, self._patient):
            pool.shutdown(cancel_futures=True)


def _start_all(pool: ThreadPoolExecutor, threads: int) -> None:
    """Have it start its threads now, not when it has that much to do: a daemon at work grows by
    nothing, not even by these. It waits for them: who closes a pool whose threads still wait for
    one another takes one's work away, and the others wait for ever."""
    together = Barrier(threads + 1, timeout=START_TIMEOUT)
    for _ in range(threads):
        pool.submit(together.wait)
    together.wait()


def _be_nice(*_: Any) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + LOWER)
