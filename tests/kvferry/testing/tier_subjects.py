"""Tiers under test with one interface: in this process, or through the process of a tier."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.daemon.memory.shared_memory import MappedFiles
from kvferry.daemon.processes import ProcessDied
from kvferry.daemon.tier_config import CustomTierConfig, TierConfig
from kvferry.daemon.tiers.base import Blocks, Result, SharedTier, Tier, TierUsage, block_checksum
from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.daemon.tiers.messages import TierBlocks
from kvferry.daemon.tiers.tier_client import TierClient
from kvferry.daemon.tiers.tier_process import DEFAULT_TIMES, PoolFiles, TierTimes

NAMESPACE = "0123456789abcdef"
POOL_BYTES = 8 << 20


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(4)


def content_of(number: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


class PoolMemory:
    """A host pool of two chunks, with blocks of one size from byte `start` on."""

    def __init__(self, block_bytes: int, start: int = 0) -> None:
        self.files = MappedFiles("kvferry-test", POOL_BYTES, POOL_BYTES // 2)
        self.block_bytes, self.start = block_bytes, start
        memory = (ctypes.c_ubyte * POOL_BYTES).from_address(self.files.address)
        self.bytes = np.ctypeslib.as_array(memory)

    def block(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        at = self.start + number * self.block_bytes
        return self.bytes[at : at + self.block_bytes]

    def offset(self, number: int) -> int:
        return self.start + number * self.block_bytes

    def checksum(self, number: int, key: bytes) -> int:
        return block_checksum(
            key, view_memory(self.files.address + self.offset(number), self.block_bytes)
        )


class Subject:
    """Calls a tier with numbers of keys. Key n has `content_of(n)`.

    Puts use the first blocks of the pool, and fetches use blocks from 32 on, which are cleared
    before. So fetched bytes can only come from the tier.
    """

    def __init__(self, pool: PoolMemory) -> None:
        self.pool = pool

    def put(self, numbers: Sequence[int], store: str = NAMESPACE) -> list[Result]:
        checksums = []
        for block_number, number in enumerate(numbers):
            self.pool.block(block_number)[:] = content_of(number, self.pool.block_bytes)
            checksums.append(self.pool.checksum(block_number, key_of(number)))
        return self._put(store, [key_of(n) for n in numbers], range(len(numbers)), checksums)

    def fetch(
        self, numbers: Sequence[int], store: str = NAMESPACE, seconds: float = 30.0
    ) -> list[Result]:
        """Fetch keys, and check the bytes of those that are OK."""
        block_numbers = range(32, 32 + len(numbers))
        for block_number in block_numbers:
            self.pool.block(block_number)[:] = 0
        results = self._fetch(store, [key_of(n) for n in numbers], block_numbers, seconds)
        for block_number, number, result in zip(block_numbers, numbers, results, strict=True):
            if result is Result.OK:
                expected = content_of(number, self.pool.block_bytes)
                assert np.array_equal(self.pool.block(block_number), expected), (
                    f"wrong bytes of key {number}"
                )
        return results

    def contains(self, numbers: Sequence[int], store: str = NAMESPACE) -> list[bool]:
        raise NotImplementedError

    def drop(self, numbers: Sequence[int] | None = None, store: str = NAMESPACE) -> None:
        raise NotImplementedError

    def stores(self) -> list[str]:
        """The stores that outlived an earlier process, as the tier has named them at first."""
        raise NotImplementedError

    def settle(self, epochs: Mapping[str, int]) -> dict[str, int]:
        """See SharedTier.settle."""
        raise NotImplementedError

    def usage(self) -> TierUsage:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _put(
        self, store: str, keys: list[bytes], block_numbers: Sequence[int], checksums: list[int]
    ) -> list[Result]:
        raise NotImplementedError

    def _fetch(
        self, store: str, keys: list[bytes], block_numbers: Sequence[int], seconds: float
    ) -> list[Result]:
        raise NotImplementedError


class DirectSubject(Subject):
    """A tier in this process. Compares checksums itself, as the tier's process does."""

    def __init__(self, pool: PoolMemory, tier: Tier) -> None:
        super().__init__(pool)
        self.tier = tier
        self._stores = list(tier.stores())
        tier.maintain()

    def contains(self, numbers: Sequence[int], store: str = NAMESPACE) -> list[bool]:
        return list(self.tier.contains(store, [key_of(n) for n in numbers]))

    def drop(self, numbers: Sequence[int] | None = None, store: str = NAMESPACE) -> None:
        self.tier.drop(store, None if numbers is None else [key_of(n) for n in numbers])

    def stores(self) -> list[str]:
        return self._stores

    def settle(self, epochs: Mapping[str, int]) -> dict[str, int]:
        assert isinstance(self.tier, SharedTier)
        return dict(self.tier.settle(epochs))

    def usage(self) -> TierUsage:
        return self.tier.usage()

    def close(self) -> None:
        self.tier.close()

    def _blocks(self, store: str, keys: list[bytes], block_numbers: Sequence[int]) -> Blocks:
        addresses = [
            self.pool.files.address + self.pool.offset(block_number)
            for block_number in block_numbers
        ]
        return Blocks(store, keys, addresses, self.pool.block_bytes)

    def _put(
        self, store: str, keys: list[bytes], block_numbers: Sequence[int], checksums: list[int]
    ) -> list[Result]:
        return list(self.tier.put(self._blocks(store, keys, block_numbers), checksums))

    def _fetch(
        self, store: str, keys: list[bytes], block_numbers: Sequence[int], seconds: float
    ) -> list[Result]:
        blocks = self._blocks(store, keys, block_numbers)
        results = []
        found = self.tier.fetch(blocks, time.monotonic() + seconds)
        for key, block_number, each in zip(keys, block_numbers, found, strict=True):
            is_good = each.checksum == self.pool.checksum(block_number, key)
            is_corrupt = each.result is Result.OK and not is_good
            results.append(Result.CORRUPT if is_corrupt else each.result)
        return results


@dataclass(eq=False, slots=True)
class CallOutcome:
    """The outcome of a fetch or put; None: it is not known yet. released: nothing if the process
    has not answered."""

    results: list[Result] | None = None
    released: list[Result] | None = None


class ProcessSubject(Subject):
    """A tier in its process, through its client, in an event loop that runs during each call."""

    def __init__(
        self,
        pool: PoolMemory,
        config: TierConfig,
        times: TierTimes = DEFAULT_TIMES,
        runner: asyncio.Runner | None = None,
    ) -> None:
        super().__init__(pool)
        self.runner, self._owns_runner = runner or asyncio.Runner(), runner is None
        self.closed = False
        self._stores = list[str]()
        self._flows: set[asyncio.Task[None]] = set()
        files = PoolFiles(pool.files.descriptors, POOL_BYTES // 2, POOL_BYTES)

        async def start() -> TierClient:
            return TierClient(config, files, times, self._stores_in_use, self._receive_stores)

        # Those that the process is told.
        self.used_stores: Sequence[str] = ()
        self.client = self.runner.run(start())
        self._running = self.start(self.client.run())

    def start(self, flow: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a coroutine, up to where it waits first."""

        async def start() -> asyncio.Task[None]:
            task = asyncio.create_task(flow)
            await asyncio.sleep(0)
            return task

        task = self.runner.run(start())
        self._flows.add(task)
        return task

    def begin_fetch(self, blocks: TierBlocks, seconds: float = 30.0) -> CallOutcome:
        """Send a fetch, and go on without waiting for its end."""
        return self._begin(self.client.fetch(blocks, seconds))

    def begin_put(self, blocks: TierBlocks, checksums: Sequence[int] | None = None) -> CallOutcome:
        """Send a put. checksums: all 0 if not given."""
        sums = np.array(checksums or [0] * len(blocks.keys), np.uint64)
        return self._begin(self.client.put(blocks, sums))

    def begin_lookup(
        self, keys: Sequence[bytes], seconds: float = 30.0, store: str = NAMESPACE
    ) -> list[Result]:
        """Send a lookup. Returns a list that gets the results."""
        found: list[Result] = []

        async def look_up() -> None:
            found.extend(await self.client.contains(store, keys, seconds))

        self.start(look_up())
        return found

    def begin_drop(
        self, keys: Sequence[bytes] | None = None, store: str = NAMESPACE
    ) -> asyncio.Future[Any]:
        """Send a drop. The future has ProcessDied if the process ends before."""

        async def drop() -> asyncio.Future[Any]:
            return self.client.drop(store, keys)

        return self.runner.run(drop())

    def begin_settle(self, epochs: Mapping[str, int]) -> asyncio.Future[Mapping[str, int]]:
        """Send epochs to settle."""

        async def begin() -> asyncio.Future[Mapping[str, int]]:
            return asyncio.ensure_future(self.client.settle(epochs))

        return self.runner.run(begin())

    def _begin(
        self, call: Coroutine[Any, Any, tuple[Sequence[Result], asyncio.Future[Sequence[Result]]]]
    ) -> CallOutcome:
        outcome = CallOutcome()

        async def follow() -> None:
            results, released = await call
            outcome.results = list(results)
            try:
                outcome.released = list(await released)
            except ProcessDied:
                outcome.released = []

        self.start(follow())
        return outcome

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Let the event loop run until then. Raises the error of a coroutine that was started."""

        async def wait() -> None:
            async with asyncio.timeout(60):
                while not condition():
                    await asyncio.sleep(0.001)
                    for flow in [flow for flow in self._flows if flow.done()]:
                        self._flows.discard(flow)
                        flow.result()

        self.runner.run(wait())

    def contains(self, numbers: Sequence[int], store: str = NAMESPACE) -> list[bool]:
        keys = [key_of(number) for number in numbers]
        found = self.begin_lookup(keys, store=store)
        self.wait_until(lambda: found)
        return [result is Result.OK for result in found]

    def drop(self, numbers: Sequence[int] | None = None, store: str = NAMESPACE) -> None:
        keys = None if numbers is None else [key_of(number) for number in numbers]
        self.wait_until(self.begin_drop(keys, store).done)

    def stores(self) -> list[str]:
        """Of the process that has started last."""
        return self._stores

    def settle(self, epochs: Mapping[str, int]) -> dict[str, int]:
        settled = self.begin_settle(epochs)
        self.wait_until(settled.done)
        return dict(settled.result())

    def usage(self) -> TierUsage:
        self.wait_until(self.start(self.client.refresh_usage()).done)
        return self.client.usage

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True

        async def close() -> None:
            self._running.cancel()
            await asyncio.wait({self._running})

        self.runner.run(close())
        if self._owns_runner:
            self.runner.close()

    def blocks(self, store: str, keys: list[bytes], block_numbers: Sequence[int]) -> TierBlocks:
        offsets = np.array(
            [self.pool.offset(block_number) for block_number in block_numbers], np.int64
        )
        return TierBlocks(store, keys, offsets.tobytes(), self.pool.block_bytes)

    def _stores_in_use(self) -> Sequence[str]:
        return self.used_stores

    def _receive_stores(self, stores: Sequence[str]) -> None:
        self._stores = list(stores)

    def _put(
        self, store: str, keys: list[bytes], block_numbers: Sequence[int], checksums: list[int]
    ) -> list[Result]:
        blocks = self.blocks(store, keys, block_numbers)
        return self._results(self.begin_put(blocks, checksums))

    def _fetch(
        self, store: str, keys: list[bytes], block_numbers: Sequence[int], seconds: float
    ) -> list[Result]:
        blocks = self.blocks(store, keys, block_numbers)
        return self._results(self.begin_fetch(blocks, seconds))

    def _results(self, outcome: CallOutcome) -> list[Result]:
        self.wait_until(lambda: outcome.released is not None)
        assert outcome.results is not None
        return outcome.results


@dataclass(frozen=True, slots=True)
class TierSetup:
    """A tier to test. module, options: as in the configuration.

    capacity: bytes of blocks that it can store, at most about 64 MiB, because the tests fill it;
    0 if it can store more.
    keeps: whether its blocks outlive its process. shared: whether it is a SharedTier.
    in_process: call the tier in this process; else through TierClient and the process of a tier,
    with `times`.
    """

    module: str
    options: dict[str, Any]
    capacity: int = 4 << 20
    in_process: bool = False
    keeps: bool = False
    shared: bool = False
    times: TierTimes = DEFAULT_TIMES


@contextmanager
def open_subject(setup: TierSetup, pool: PoolMemory) -> Iterator[Subject]:
    """Open a tier. It is closed at the end. Raises RuntimeError if it cannot be opened."""
    opened: DirectSubject | ProcessSubject
    if setup.in_process:
        module = importlib.import_module(setup.module)
        opened = DirectSubject(pool, module.open_tier(setup.options, pool.files))
    else:
        config = CustomTierConfig(setup.module, setup.options, shared=setup.shared)
        opened = ProcessSubject(pool, config, setup.times)
    try:
        if isinstance(opened, ProcessSubject):
            opened.wait_until(lambda: opened.client.is_on or opened.client.failure)
            if opened.client.failure:
                raise RuntimeError(f"tier {setup.module} not opened: {opened.client.failure}")
        yield opened
    finally:
        opened.close()
