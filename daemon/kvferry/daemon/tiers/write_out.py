"""Writes blocks of the pool to a tier in the background, before they are evicted.

    take_writes --pinned blocks--> put --released--> BlocksWritten

It takes only what it can write soon: a bounded number of bytes is in flight, within a rate. What is
evicted before its turn is not written. Without anything to write no timer runs. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.tier_actions import BlocksWritten, WriteJob
from kvferry.daemon.core.writes import Writes
from kvferry.daemon.processes import ProcessDied
from kvferry.daemon.tiers.base import IN_TIER
from kvferry.daemon.tiers.messages import TierBlocks
from kvferry.daemon.tiers.tier_client import TierClient
from kvferry.proto.sizes import parse_bytes

# Blocks taken at a time, and bytes in flight from which no more are taken.
TAKEN_BLOCKS = 32
IN_FLIGHT_BYTES = 64 << 20
# Seconds from a change of the pool until blocks are taken, so that several changes are one.
DELAY = 0.02
# Seconds without writes after one that failed entirely, at first and at most.
FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0

WRITE_THROUGH = "write_through"
# The part of each namespace's blocks, from the coldest on, that a write policy keeps written.
COLDEST = {"clean_ahead": 0.25, WRITE_THROUGH: 1.0}


class WriteOut:
    """Writes the blocks of one tier while `run` runs.

    tier: its index. report: called with BlocksWritten, which unpins the blocks of a job.
    """

    def __init__(
        self,
        writes: Writes,
        client: TierClient,
        tier: int,
        report: Callable[[Report], None],
    ) -> None:
        self._writes, self._client = writes, client
        self._tier, self._report = tier, report
        self._coldest = COLDEST[client.config.write]
        self._rate = parse_bytes(client.config.rate)
        self._changed = asyncio.Event()
        # When each put in flight began, by the number of its job, the oldest first.
        self._begun: dict[int, float] = {}
        self._in_flight_bytes = 0
        self._put_ended = asyncio.Event()
        # Before this time nothing is written: because of the rate, or of a pause.
        self._not_before = 0.0
        self._pause = FIRST_PAUSE

    @property
    def oldest(self) -> float | None:
        """When the oldest put in flight began; None if there is none."""
        return next(iter(self._begun.values()), None)

    def wake_up(self) -> None:
        """Blocks of the pool have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as puts:
            while True:
                await self._changed.wait()
                await asyncio.sleep(DELAY)
                jobs = None
                while jobs is None or jobs:
                    await self._until_allowed()
                    self._changed.clear()
                    jobs = self._writes.take_writes(self._tier, TAKEN_BLOCKS, self._coldest)
                    for job in jobs:
                        self._note_begin(job)
                        puts.create_task(self._write(job))
                    await asyncio.sleep(0)

    async def _until_allowed(self) -> None:
        """Wait until the rate limit, the tier and the bytes in flight allow another write."""
        while True:
            if (wait := self._not_before - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            elif not self._client.is_on:
                await asyncio.sleep(FIRST_PAUSE)
            elif self._in_flight_bytes >= IN_FLIGHT_BYTES:
                self._put_ended.clear()
                await self._put_ended.wait()
            else:
                return

    def _note_begin(self, job: WriteJob) -> None:
        nbytes = len(job.keys) * job.block_bytes
        self._begun[job.number] = now = time.monotonic()
        self._in_flight_bytes += nbytes
        if self._rate:
            self._not_before = max(now, self._not_before) + nbytes / self._rate

    async def _write(self, job: WriteJob) -> None:
        """Put the blocks of a job, and end it when the tier no longer reads them."""
        offsets = job.offsets.tobytes()
        blocks = TierBlocks(job.store, job.keys, offsets, job.block_bytes, job.model)
        results, released = await self._client.put(blocks, job.checksums)
        written = tuple(result in IN_TIER for result in results)
        if any(written):
            self._pause = FIRST_PAUSE
        else:
            self._not_before = max(self._not_before, time.monotonic() + self._pause)
            self._pause = min(LAST_PAUSE, 2 * self._pause)
        with suppress(ProcessDied):
            await released
        del self._begun[job.number]
        self._in_flight_bytes -= len(job.keys) * job.block_bytes
        self._put_ended.set()
        self._end(job, written)

    def _end(self, job: WriteJob, written: tuple[bool, ...]) -> None:
        self._report(BlocksWritten(job.number, written))
