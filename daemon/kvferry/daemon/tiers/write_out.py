"""Writes blocks of the pool to a tier in the background, before they are evicted.

    take_writes --pinned blocks--> put --released--> BlocksWritten

It takes only what it can write soon: a bounded number of bytes is in flight, within a rate. What is
evicted before its turn is not written. Without anything to write no timer runs. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.layout import Bools, Int64s
from kvferry.daemon.core.records import RegionOwner
from kvferry.daemon.core.tier_actions import BlocksWritten, WriteJob
from kvferry.daemon.tiers.base import IN_TIER, Result, is_part_of
from kvferry.daemon.tiers.tier_blocks import Checksums, TierBlocks
from kvferry.daemon.tiers.tier_client import TierClient, nothing

# Blocks taken at a time, and bytes in flight from which no more are taken.
TAKEN_BLOCKS = 32
IN_FLIGHT_BYTES = 64 << 20
# Seconds from a change of the pool until blocks are taken, so that several changes are one.
DELAY = 0.02
# Seconds until blocks are taken again that could not be written: their namespace is being dropped,
# or their region has been freed.
RETRY = 0.25
# Seconds without writes after one that failed entirely, at first and at most.
FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0

ChecksumsOf: TypeAlias = Callable[[RegionOwner, Int64s], tuple[Checksums, Bools]]


class WriteSource(Protocol):
    """Core.writes."""

    def take_writes(self, tier: int, limit: int, coldest: float) -> list[WriteJob]:
        """Pin up to `limit` blocks that are not in this tier yet and were used often enough, of the
        coldest part of each namespace."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """tier: its index. coldest: the part of each namespace's blocks that is written, the coldest
    first. rate: bytes per second; 0: no limit."""

    tier: int
    coldest: float
    rate: int = 0


class WriteOut:
    """checksums_of: the checksums of blocks, and which of them are valid. report: called with
    BlocksWritten, which unpins the blocks of a job."""

    def __init__(
        self,
        source: WriteSource,
        checksums_of: ChecksumsOf,
        client: TierClient,
        options: WriteOptions,
        report: Callable[[list[Report]], None],
    ) -> None:
        self._source, self._checksums_of = source, checksums_of
        self._client, self._options, self._report = client, options, report
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        # When each put in flight began, by the number of its job, the oldest first.
        self._begun: dict[int, float] = {}
        self._in_flight_bytes = 0
        # Before this time nothing is written: because of the rate, or of a pause.
        self._not_before = 0.0
        self._pause = FIRST_PAUSE
        # Namespaces that are being dropped: what is put now would be dropped, too.
        self._held_stores = Counter[str]()

    @property
    def oldest(self) -> float | None:
        """When the oldest put in flight began; None if there is none."""
        return next(iter(self._begun.values()), None)

    def wake_up(self, delay: float = DELAY) -> None:
        """Blocks of the pool have changed."""
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(delay, self._write)

    def hold_store(self, store: str) -> None:
        """Write nothing of a namespace until `resume_store`."""
        self._held_stores[store] += 1

    def resume_store(self, store: str) -> None:
        self._held_stores -= Counter((store,))  # drops stores that are not held
        self.wake_up()

    def close(self) -> None:
        """Stop writing and reporting."""
        self._closed, self._report = True, nothing
        if self._timer is not None:
            self._timer.cancel()

    def _write(self) -> None:
        self._timer = None
        wait = self._not_before - time.monotonic()
        if wait > 0:
            self.wake_up(wait)
            return
        if not self._client.is_on:
            self.wake_up(FIRST_PAUSE)
            return
        if self._in_flight_bytes >= IN_FLIGHT_BYTES:
            return  # the end of a put wakes this up
        options = self._options
        jobs = self._source.take_writes(options.tier, TAKEN_BLOCKS, options.coldest)
        retry = False
        for job in jobs:
            retry |= not self._put(job)
        if retry:
            self.wake_up(RETRY)
        elif jobs:
            self.wake_up(0.0)

    def _put(self, job: WriteJob) -> bool:
        """Write the blocks of a job that have a checksum. Returns whether all have one."""
        checksums, valid = self._checksums_of(job.owner, job.blocks)
        if any(is_part_of(job.store, namespace) for namespace in self._held_stores):
            valid = np.zeros_like(valid)
        chosen = np.flatnonzero(valid)
        written = [False] * len(job.keys)
        if not chosen.size:
            # Not now: a report wakes this up, sooner than RETRY.
            self._loop.call_soon(self._end_job, job, written)
            return False
        nbytes = chosen.size * job.block_bytes
        self._begun[job.number] = now = time.monotonic()
        self._in_flight_bytes += nbytes
        if self._options.rate:
            self._not_before = max(now, self._not_before) + nbytes / self._options.rate

        def done(results: Sequence[Result]) -> None:
            for place, result in zip(chosen.tolist(), results, strict=True):
                written[place] = result in IN_TIER
            if any(written):
                self._pause = FIRST_PAUSE
            else:
                self._not_before = max(self._not_before, time.monotonic() + self._pause)
                self._pause = min(LAST_PAUSE, 2 * self._pause)

        def released(_: object) -> None:
            del self._begun[job.number]
            self._in_flight_bytes -= nbytes
            self.wake_up(0.0)  # first: the report would wake this up later
            self._end_job(job, written)

        keys = [job.keys[place] for place in chosen.tolist()]
        blocks = TierBlocks(job.store, keys, job.offsets[chosen], job.block_bytes, job.model)
        self._client.put(blocks, checksums[chosen], done, released)
        return chosen.size == len(written)

    def _end_job(self, job: WriteJob, written: Sequence[bool]) -> None:
        self._report([BlocksWritten(job.number, tuple(written))])
