"""Scrub: reads all committed blocks repeatedly, at a limited rate, to find corrupt memory.

It reads one batch at a time, when no checksum of a store or of the verification is requested. Then
it pauses for the time that the batch takes at the configured rate. A small block counts as one of
COUNTED_BYTES, and a round over few blocks takes as long as one over ROUND_BYTES, but at most
ROUND_SECONDS, so that an idle daemon sleeps. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.persistence.block_check import BlockCheck
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.checksum_client import BATCH_BLOCKS, Purpose

# Lines of a block table that are searched for committed blocks without a break.
LINES_PER_SEARCH = 1 << 16
# A batch has the bytes of this many seconds at the configured rate, but at least one block.
BATCH_SECONDS = 0.25
# What a smaller block counts as. Each block costs about 2 us, whatever its size: at 64 MiB/s,
# blocks of 4 KiB would use 3 % of a core.
COUNTED_BYTES = 128 << 10
# A round takes at least the time of so many bytes at the configured rate, or ROUND_SECONDS if that
# is less.
ROUND_BYTES, ROUND_SECONDS = 4 << 30, 60.0


class Scrub:
    """Reads blocks between `start` and `stop`.

    rate: bytes per second; 0: no scrub. tables: returns the current block tables. round_bytes,
    counted_bytes, searched: see ROUND_BYTES, COUNTED_BYTES and LINES_PER_SEARCH.
    """

    def __init__(
        self,
        check: BlockCheck,
        rate: int,
        tables: Callable[[], Sequence[BlockTable]],
        *,
        round_bytes: int = ROUND_BYTES,
        counted_bytes: int = COUNTED_BYTES,
        searched: int = LINES_PER_SEARCH,
    ) -> None:
        self._check = check
        self._rate = rate
        self._tables = tables
        self._round_seconds = min(ROUND_SECONDS, round_bytes / rate) if rate else ROUND_SECONDS
        self._counted_bytes, self._searched = counted_bytes, searched
        self._loop = asyncio.get_running_loop()
        self._steps = self._rounds()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._rate:
            self._step()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _step(self) -> None:
        """Read the next batch, or continue the search soon."""
        step = next(self._steps)
        if isinstance(step, float):
            self._timer = self._loop.call_later(step, self._step)
            return
        table, blocks = step
        pause = blocks.size * max(table.record.block_bytes, self._counted_bytes) / self._rate
        self._check.check_blocks(table, blocks, Purpose.SCRUB, lambda: self._pause(pause))

    def _pause(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._step)

    def _rounds(self) -> Iterator[tuple[BlockTable, Int64s] | float]:
        """Yields a batch of verified blocks, or the seconds until the search continues."""
        while True:
            began = self._loop.time()
            for table in self._tables():
                at = 0
                while not table.closed and at < table.num_blocks:
                    end = min(at + self._searched, table.num_blocks)
                    blocks = table.committed_blocks(at, end)
                    if table.unverified is not None:
                        blocks = blocks[~table.unverified[blocks]]
                    most = int(self._rate * BATCH_SECONDS) // table.record.block_bytes
                    batch = blocks[: max(1, min(most, BATCH_BLOCKS))]
                    at = int(batch[-1]) + 1 if batch.size else end
                    yield (table, batch) if batch.size else 0.0
            yield max(0.0, self._round_seconds - (self._loop.time() - began))
