"""Tiers under test with one interface: in this process, or through the process of a tier."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.daemon.memory.shared_memory import MappedFiles
from kvferry.daemon.tiers.base import Blocks, Result, Tier, TierUsage, block_checksum
from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.daemon.tiers.tier_blocks import TierBlocks
from kvferry.daemon.tiers.tier_client import TierClient
from kvferry.daemon.tiers.tier_process import DEFAULT_TIMES, PoolFiles, TierSpec, TierTimes

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

    def put(self, numbers: Sequence[int], namespace: str = NAMESPACE) -> list[Result]:
        checksums = []
        for block_number, number in enumerate(numbers):
            self.pool.block(block_number)[:] = content_of(number, self.pool.block_bytes)
            checksums.append(self.pool.checksum(block_number, key_of(number)))
        return self._put(namespace, [key_of(n) for n in numbers], range(len(numbers)), checksums)

    def fetch(
        self, numbers: Sequence[int], namespace: str = NAMESPACE, seconds: float = 30.0
    ) -> list[Result]:
        """Fetch keys, and check the bytes of those that are OK."""
        block_numbers = range(32, 32 + len(numbers))
        for block_number in block_numbers:
            self.pool.block(block_number)[:] = 0
        results = self._fetch(namespace, [key_of(n) for n in numbers], block_numbers, seconds)
        for block_number, number, result in zip(block_numbers, numbers, results, strict=True):
            if result is Result.OK:
                expected = content_of(number, self.pool.block_bytes)
                assert np.array_equal(self.pool.block(block_number), expected), (
                    f"wrong bytes of key {number}"
                )
        return results

    def contains(self, numbers: Sequence[int], namespace: str = NAMESPACE) -> list[bool]:
        raise NotImplementedError

    def drop(self, numbers: Sequence[int] | None = None, namespace: str = NAMESPACE) -> None:
        raise NotImplementedError

    def usage(self) -> TierUsage:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _put(
        self, namespace: str, keys: list[bytes], block_numbers: Sequence[int], checksums: list[int]
    ) -> list[Result]:
        raise NotImplementedError

    def _fetch(
        self, namespace: str, keys: list[bytes], block_numbers: Sequence[int], seconds: float
    ) -> list[Result]:
        raise NotImplementedError


class DirectSubject(Subject):
    """A tier in this process. Compares checksums itself, as the tier's process does."""

    def __init__(self, pool: PoolMemory, tier: Tier) -> None:
        super().__init__(pool)
        self.tier = tier
        tier.maintain()

    def contains(self, numbers: Sequence[int], namespace: str = NAMESPACE) -> list[bool]:
        return list(self.tier.contains(namespace, [key_of(n) for n in numbers]))

    def drop(self, numbers: Sequence[int] | None = None, namespace: str = NAMESPACE) -> None:
        self.tier.drop(namespace, None if numbers is None else [key_of(n) for n in numbers])

    def usage(self) -> TierUsage:
        return self.tier.usage()

    def close(self) -> None:
        self.tier.close()

    def _blocks(self, namespace: str, keys: list[bytes], block_numbers: Sequence[int]) -> Blocks:
        addresses = [
            self.pool.files.address + self.pool.offset(block_number)
            for block_number in block_numbers
        ]
        return Blocks(namespace, keys, addresses, self.pool.block_bytes)

    def _put(
        self, namespace: str, keys: list[bytes], block_numbers: Sequence[int], checksums: list[int]
    ) -> list[Result]:
        return list(self.tier.put(self._blocks(namespace, keys, block_numbers), checksums))

    def _fetch(
        self, namespace: str, keys: list[bytes], block_numbers: Sequence[int], seconds: float
    ) -> list[Result]:
        blocks = self._blocks(namespace, keys, block_numbers)
        results = []
        found = self.tier.fetch(blocks, time.monotonic() + seconds)
        for key, block_number, each in zip(keys, block_numbers, found, strict=True):
            is_good = each.checksum == self.pool.checksum(block_number, key)
            is_corrupt = each.result is Result.OK and not is_good
            results.append(Result.CORRUPT if is_corrupt else each.result)
        return results


class ProcessSubject(Subject):
    """A tier in its process, through its client."""

    def __init__(self, pool: PoolMemory, spec: TierSpec) -> None:
        super().__init__(pool)
        self.runner = asyncio.Runner()
        files = PoolFiles(pool.files.descriptors, POOL_BYTES // 2, POOL_BYTES)

        async def start() -> TierClient:
            return TierClient(spec, files)

        self.closed = False
        self.client = self.runner.run(start())

    def wait_until(self, condition: Callable[[], object]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(60):
                while not condition():
                    await asyncio.sleep(0.001)

        self.runner.run(wait())

    def contains(self, numbers: Sequence[int], namespace: str = NAMESPACE) -> list[bool]:
        reply: list[Sequence[Result]] = []
        keys = [key_of(number) for number in numbers]
        self.client.contains(namespace, keys, 30.0, reply.append)
        self.wait_until(lambda: reply)
        return [result is Result.OK for result in reply[0]]

    def drop(self, numbers: Sequence[int] | None = None, namespace: str = NAMESPACE) -> None:
        reply: list[bool] = []
        keys = None if numbers is None else [key_of(number) for number in numbers]
        self.client.drop(namespace, keys, lambda: reply.append(True))
        self.wait_until(lambda: reply)

    def usage(self) -> TierUsage:
        self.client.refresh_usage()
        before = self.client.usage
        self.wait_until(lambda: self.client.usage is not before)
        return self.client.usage

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.runner.run(self.client.close())
            self.runner.close()

    def blocks(self, namespace: str, keys: list[bytes], block_numbers: Sequence[int]) -> TierBlocks:
        offsets = np.array(
            [self.pool.offset(block_number) for block_number in block_numbers], np.int64
        )
        return TierBlocks(namespace, keys, offsets, self.pool.block_bytes)

    def _put(
        self, namespace: str, keys: list[bytes], block_numbers: Sequence[int], checksums: list[int]
    ) -> list[Result]:
        reply: list[Any] = []
        self.client.put(
            self.blocks(namespace, keys, block_numbers),
            np.array(checksums, np.uint64),
            reply.extend,
            lambda _: reply.append("released"),
        )
        self.wait_until(lambda: reply and reply[-1] == "released")
        return reply[:-1]

    def _fetch(
        self, namespace: str, keys: list[bytes], block_numbers: Sequence[int], seconds: float
    ) -> list[Result]:
        reply: list[Any] = []
        self.client.fetch(
            self.blocks(namespace, keys, block_numbers),
            seconds,
            reply.extend,
            lambda _: reply.append("released"),
        )
        self.wait_until(lambda: reply and reply[-1] == "released")
        return reply[:-1]


@dataclass(frozen=True, slots=True)
class TierSetup:
    """A tier to test. module, options: as in the configuration.

    capacity: bytes of blocks that it can store, at most about 64 MiB, because the tests fill it;
    0 if it can store more.
    in_process: call the tier in this process; else through TierClient and the process of a tier,
    with `times`.
    """

    module: str
    options: dict[str, Any]
    capacity: int = 4 << 20
    in_process: bool = False
    times: TierTimes = DEFAULT_TIMES


@contextmanager
def open_subject(setup: TierSetup, pool: PoolMemory) -> Iterator[Subject]:
    """Open a tier. It is closed at the end. Raises RuntimeError if it cannot be opened."""
    opened: DirectSubject | ProcessSubject
    if setup.in_process:
        module = importlib.import_module(setup.module)
        opened = DirectSubject(pool, module.open_tier(setup.options, pool.files))
    else:
        opened = ProcessSubject(pool, TierSpec("tested", setup.module, setup.options, setup.times))
    try:
        if isinstance(opened, ProcessSubject):
            opened.wait_until(lambda: opened.client.is_on or opened.client.failure)
            if opened.client.failure:
                raise RuntimeError(f"tier {setup.module} not opened: {opened.client.failure}")
        yield opened
    finally:
        opened.close()
