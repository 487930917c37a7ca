"""A Tiering over real tier processes, and a core that has blocks to write."""

from __future__ import annotations

import asyncio
import time
from itertools import chain, repeat
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    BlocksWritten,
    FetchBlocks,
    FindKeys,
    KeysFound,
    WriteJob,
    WrittenBlocks,
)
from kvferry.daemon.core.writes import Writes
from kvferry.daemon.tiers.tiering import AttachedTier, Tiering
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    PoolMemory,
    ProcessSubject,
    content_of,
    key_of,
)
from support.time_limits import TIMEOUT

BLOCK = 16 << 10
R = TypeVar("R", bound=Report)


async def _wait_forever() -> None:
    await asyncio.Event().wait()


class FakeWrites:
    """As Core.writes: provides blocks to write, and records how each job ended.

    tier_of: the tier that must write a job, by its number; others may write any.
    """

    def __init__(self) -> None:
        self.jobs: list[WriteJob] = []
        self.tier_of: dict[int, int] = {}
        self.ended: dict[int, list[bool]] = {}
        self.asked: list[tuple[int, int, float]] = []

    def take_writes(self, tier: int, limit: int, coldest: float) -> list[WriteJob]:
        self.asked.append((tier, limit, coldest))
        for place, job in enumerate(self.jobs):
            if self.tier_of.get(job.number, tier) == tier:
                return [self.jobs.pop(place)]
        return []

    def next_written(self, tier: int, limit: int) -> WrittenBlocks | None:
        return None

    def stores_in_use(self) -> list[str]:
        return [NAMESPACE]


class TieringFixture:
    """A Tiering over tiers. Key n has `content_of(n)`."""

    def __init__(self, pool: PoolMemory, tiers: list[ProcessSubject]) -> None:
        self.pool, self.tiers = pool, tiers
        self.reports: list[Report] = []
        self.promoted: list[tuple[str, float]] = []
        self.core = FakeWrites()
        self.running: asyncio.Task[None] | None = None
        # Of namespaces in use, which shared tiers settle.
        self.epochs = dict[str, int]()

    def start(self, *write: str, rate: int = 0) -> None:
        """write: the policies of the first tiers; the others are not written."""
        for tier, policy in zip(self.tiers, chain(write, repeat("off")), strict=False):
            tier.client.config = msgspec.structs.replace(
                tier.client.config, write=policy, rate=str(rate)
            )

        async def make() -> Tiering:
            return Tiering(
                [AttachedTier(tier.client) for tier in self.tiers],
                cast(Writes, self.core),
                self._receive,
                lambda *seen: self.promoted.append(seen),
                lambda: self.epochs,
            )

        for tier in self.tiers:
            tier.client.run = _wait_forever  # type: ignore[method-assign]  # the ProcessSubject runs it
        self.tiering = self.tiers[0].runner.run(make())
        self.running = self.tiers[0].start(self.tiering.run())

    def close(self) -> None:
        running, self.running = self.running, None
        if running is None:
            return

        async def close() -> None:
            running.cancel()
            await asyncio.wait({running})

        self.tiers[0].runner.run(close())

    def _receive(self, reports: list[Report]) -> None:
        for each in reports:
            if isinstance(each, BlocksWritten):
                self.core.ended[each.job] = list(each.done)
            else:
                self.reports.append(each)

    def perform(self, action: Any) -> None:
        async def act() -> None:
            self.tiering.perform(action)

        self.tiers[0].runner.run(act())

    def wait_for(self, kind: type[R]) -> R:
        def found() -> list[R]:
            return [each for each in self.reports if isinstance(each, kind)]

        self.tiers[0].wait_until(found)
        return found()[0]

    def find(self, *numbers: int) -> KeysFound:
        self.reports.clear()
        self.perform(FindKeys(7, NAMESPACE, tuple(map(key_of, numbers))))
        return self.wait_for(KeysFound)

    def fetch(self, tier: int, *numbers: int, seconds: float = TIMEOUT) -> BlocksFetched:
        self.begin_fetch(tier, *numbers, seconds=seconds)
        return self.wait_for(BlocksFetched)

    def begin_fetch(self, tier: int, *numbers: int, seconds: float = TIMEOUT) -> None:
        self.reports.clear()
        blocks = np.arange(32, 32 + len(numbers))
        keys, offsets = tuple(map(key_of, numbers)), blocks * BLOCK + self.pool.start
        self.perform(FetchBlocks(3, tier, NAMESPACE, keys, offsets, BLOCK, seconds))

    def write_job(self, number: int, *blocks: int) -> WriteJob:
        for block in blocks:
            self.pool.block(block)[:] = content_of(block, BLOCK)
        array = np.array(blocks, np.int64)
        keys = tuple(map(key_of, blocks))
        sums = [self.pool.checksum(block, key_of(block)) for block in blocks]
        checksums = np.array(sums, np.uint64)
        return WriteJob(number, NAMESPACE, keys, checksums, array * BLOCK, BLOCK)

    def write(self, *jobs: WriteJob) -> None:
        self.core.jobs += jobs

        async def wake_up() -> None:
            self.tiering.wake_up()

        self.tiers[0].runner.run(wake_up())


def pause(tier: ProcessSubject) -> None:
    """Let the event loop run for a moment, in which nothing should happen."""
    until = time.monotonic() + 0.1
    tier.wait_until(lambda: time.monotonic() > until)
