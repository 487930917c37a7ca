"""A Tiering over stand-ins of tiers, and a core that has blocks to write."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.tier_actions import BlocksWritten, FetchBlocks, WriteJob, WrittenBlocks
from kvferry.daemon.core.writes import Writes
from kvferry.daemon.processes import ProcessDied
from kvferry.daemon.tier_config import CustomTierConfig
from kvferry.daemon.tiers.base import Result, TierUsage
from kvferry.daemon.tiers.messages import TierBlocks
from kvferry.daemon.tiers.tiering import AttachedTier, Tiering
from kvferry.testing.tier_subjects import NAMESPACE, key_of
from support.background import in_background
from support.eventually import eventually

BLOCK = 16 << 10
R = TypeVar("R", bound=Report)
Moved = tuple[Sequence[Result], asyncio.Future[Sequence[Result]]]


class FakeTierClient:
    """As a TierClient. It has keys, and its calls end when the test lets them.

    result: what every fetch and put answers. found: what every lookup answers. None: the truth.
    holds_blocks: fetches and puts do not release their blocks until `release`.
    """

    def __init__(self, *numbers: int, **options: Any) -> None:
        self.config = CustomTierConfig(**({"write": "off"} | options))
        self.stored = defaultdict[str, set[bytes]](set, {NAMESPACE: set(map(key_of, numbers))})
        self.usage, self.counts, self.failure = TierUsage(), Counter[str](), ""
        self.breaker = SimpleNamespace(state="closed")
        self.is_started = self.is_on = self.is_prompt = True
        self.result: Result | None = None
        self.found: Result | None = None
        self.sought: list[Sequence[bytes]] = []
        self.holds_blocks = False
        self.epochs: dict[str, int] = {}
        self.dropped: list[str] = []
        # Fetches and puts, and when they began.
        self.moved: list[TierBlocks] = []
        self.begun: list[float] = []
        self.may_move, self.may_settle = asyncio.Event(), asyncio.Event()
        self.may_move.set()
        self.may_settle.set()
        self._held: list[asyncio.Future[Sequence[Result]]] = []

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def contains(self, store: str, keys: Sequence[bytes], _: float) -> list[Result]:
        self.sought.append(keys)
        if self.found is not None:
            return [self.found] * len(keys)
        return [Result.OK if key in self.stored[store] else Result.MISS for key in keys]

    async def fetch(self, blocks: TierBlocks, seconds: float) -> Moved:
        return await self._move(blocks, await self.contains(blocks.store, blocks.keys, seconds))

    async def put(self, blocks: TierBlocks, _: object) -> Moved:
        if self.result is None:
            self.stored[blocks.store] |= set(blocks.keys)
        return await self._move(blocks, [Result.OK] * len(blocks.keys))

    def drop(self, store: str) -> None:
        self.dropped.append(store)

    async def settle(self, epochs: Mapping[str, int]) -> Mapping[str, int]:
        await self.may_settle.wait()
        self.epochs |= {name: max(each, self.epochs.get(name, 0)) for name, each in epochs.items()}
        return dict(self.epochs)

    def release(self, *, died: bool) -> None:
        """The process has answered, or died."""
        for each in self._held:
            each.set_exception(ProcessDied("test")) if died else each.set_result([Result.LATE])
        self._held.clear()

    async def _move(self, blocks: TierBlocks, results: list[Result]) -> Moved:
        self.moved.append(blocks)
        self.begun.append(time.monotonic())
        await self.may_move.wait()
        if self.result is not None:
            results = [self.result] * len(blocks.keys)
        released = asyncio.get_running_loop().create_future()
        self._held.append(released)
        if not self.holds_blocks:
            self._held.pop().set_result(results)
        return results, released


class FakeWrites:
    """As Core.writes: provides blocks to write, and records how each job ended.

    tier_of: the tier that must write a job, by its number; others may write any. written: rounds of
    next_written.
    """

    def __init__(self) -> None:
        self.jobs: list[WriteJob] = []
        self.tier_of: dict[int, int] = {}
        self.ended: dict[int, list[bool]] = {}
        self.asked: list[tuple[int, int, float]] = []
        self.written: list[list[WrittenBlocks]] = []
        self.reopened: list[Sequence[bool]] = []

    def take_writes(self, tier: int, limit: int, coldest: float) -> list[WriteJob]:
        self.asked.append((tier, limit, coldest))
        for place, job in enumerate(self.jobs):
            if self.tier_of.get(job.number, tier) == tier:
                return [self.jobs.pop(place)]
        return []

    def next_written(self, tier: int, limit: int) -> WrittenBlocks | None:
        if self.written and self.written[0]:
            return self.written[0].pop(0)
        self.written = self.written[1:]
        return None

    def reopen_writes(self, _: WrittenBlocks, missing: Sequence[bool]) -> None:
        self.reopened.append(missing)


class TieringFixture:
    """A Tiering over clients. epochs: of namespaces in use, which shared tiers settle."""

    def __init__(self, clients: Sequence[FakeTierClient]) -> None:
        self.reports: list[Report] = []
        self.promoted: list[tuple[str, float]] = []
        self.writes = FakeWrites()
        self.epochs = dict[str, int]()
        self.tiering = Tiering(
            [AttachedTier(cast(Any, client)) for client in clients],
            cast(Writes, self.writes),
            self._receive,
            lambda *seen: self.promoted.append(seen),
            lambda: self.epochs,
        )

    def _receive(self, reports: list[Report]) -> None:
        for each in reports:
            if isinstance(each, BlocksWritten):
                self.writes.ended[each.job] = list(each.done)
            else:
                self.reports.append(each)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run it. An error of it is raised at the end of the block."""
        async with in_background(self.tiering.run()):
            await asyncio.sleep(0)
            yield

    async def wait_for(self, kind: type[R]) -> R:
        await eventually(lambda: self.all_of(kind))
        return self.all_of(kind)[0]

    def all_of(self, kind: type[R]) -> list[R]:
        return [each for each in self.reports if isinstance(each, kind)]

    def fetch(self, *numbers: int) -> None:
        """From the first tier into blocks from 32 on."""
        offsets = np.arange(32, 32 + len(numbers)) * BLOCK
        keys = tuple(map(key_of, numbers))
        self.tiering.perform(FetchBlocks(3, 0, NAMESPACE, keys, offsets, BLOCK, 5.0))

    def write(self, *jobs: WriteJob) -> None:
        self.writes.jobs += jobs
        self.tiering.wake_up()


def write_job(number: int, *blocks: int) -> WriteJob:
    array = np.array(blocks, np.int64)
    keys = tuple(map(key_of, blocks))
    return WriteJob(number, NAMESPACE, keys, array.astype(np.uint64), array * BLOCK, BLOCK)


@asynccontextmanager
async def tiers(*clients: FakeTierClient) -> AsyncIterator[TieringFixture]:
    """A Tiering that runs."""
    fixture = TieringFixture(clients)
    async with fixture.running():
        yield fixture
