"""Checksums of host blocks are computed in another process, whatever happens to that."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import xxhash

from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.memory.shared_memory import PAGE, MappedFiles
from kvferry.daemon.persistence import checksum_client as module
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.checksum_client import ChecksumClient, Purpose, batches
from kvferry.proto.errors import Code, Failed, KVFerryError
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef

CHUNK, COUNT = 4 * PAGE, 16
BLOCK = 3 * 1024
"""Blocks lie across pages, and across chunks."""
START = 512
LARGE = 5 * CHUNK + 100
"""More than one call hashes, and across chunks."""


@dataclass(frozen=True)
class Asked:
    """Host blocks, and the key of each, if they have any."""

    numbers: list[int]
    keys: list[bytes] = field(default_factory=list)
    block_bytes: int = BLOCK


class ClientFixture:
    """A pool of random bytes, and a client of its checksum process."""

    def __init__(self) -> None:
        self.pool = MappedFiles("kvferry-test", COUNT * CHUNK, CHUNK)
        self.bytes = (ctypes.c_ubyte * self.pool.nbytes).from_address(self.pool.address)
        random = np.random.default_rng(1)
        self.bytes[:] = random.integers(0, 256, self.pool.nbytes, np.uint8).tolist()
        self.failures: list[KVFerryError] = []
        self.client = ChecksumClient(self.pool.descriptors, CHUNK, 2, self.failures.append)
        self.sums: dict[int, Any] = {}
        self.tables: dict[int, BlockTable] = {}

    @property
    def process(self) -> Any:
        return self.client._process

    def read(self, asked: Asked, purpose: Purpose = Purpose.COMMIT) -> int:
        name = len(self.sums)
        self.sums[name] = None
        self.client.request_checksums(
            self._table(asked.block_bytes),
            np.array(asked.numbers),
            asked.keys,
            purpose,
            lambda sums: self.sums.update({name: sums}),
        )
        return name

    def expected(self, asked: Asked) -> list[int]:
        seeds = [xxhash.xxh3_64_intdigest(key) for key in asked.keys] or asked.numbers
        starts = [START + number * asked.block_bytes for number in asked.numbers]
        whole = bytes(self.bytes)
        return [
            xxhash.xxh3_64_intdigest(whole[at : at + asked.block_bytes], seed)
            for at, seed in zip(starts, seeds, strict=True)
        ]

    async def summed(self) -> None:
        async with asyncio.timeout(30):
            while any(sums is None for sums in self.sums.values()):
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.client.close()
        for table in self.tables.values():
            table.close()
        self.pool.close()

    def _table(self, block_bytes: int) -> BlockTable:
        if block_bytes not in self.tables:
            layout = KVLayout(
                (TensorLayout(4, block_bytes, block_bytes),), ((TensorRef(0, block_bytes),),)
            )
            self.tables[block_bytes] = BlockTable.create(
                RegionRecord("one", START, 8 * LARGE, LayoutArrays.from_layout(layout))
            )
        return self.tables[block_bytes]


@pytest.fixture
async def desk() -> AsyncIterator[ClientFixture]:
    desk = ClientFixture()
    yield desk
    desk.close()
    assert desk.process.returncode is not None


def some(*numbers: int, keys: bool = False) -> Asked:
    names = [number.to_bytes(8, "big") for number in numbers] if keys else []
    return Asked(list(numbers), names)


def many(count: int) -> Asked:
    """As long a request as there is."""
    numbers = [number % 64 for number in range(count)]
    return Asked(numbers, [bytes(56) + n.to_bytes(8, "big") for n in range(count)])


@pytest.mark.parametrize(("block_bytes", "blocks"), [(2 << 20, 128), (4096, 1024), (1 << 30, 1)])
def test_a_batch_is_bounded_in_bytes_and_in_blocks(block_bytes: int, blocks: int) -> None:
    sizes = [part.stop - part.start for part in batches(block_bytes, 3 * blocks + 1)]
    assert sizes == [blocks] * 4


@pytest.mark.parametrize("keys", [False, True])
async def test_a_checksum_is_of_a_blocks_bytes_under_its_key_or_number(
    desk: ClientFixture, keys: bool
) -> None:
    every = some(*range((COUNT * CHUNK - START) // BLOCK), keys=keys)
    last_first = some(5, 3, 4, keys=keys)
    large = Asked([2, 0], [b"a", b"b"] if keys else [], LARGE)
    all_of_them = every, last_first, large
    names = [desk.read(asked) for asked in all_of_them]
    await desk.summed()
    for name, asked in zip(names, all_of_them, strict=True):
        assert desk.sums[name].tolist() == desk.expected(asked)


async def test_commits_and_verification_take_turns_and_the_scrub_waits_for_both(
    desk: ClientFixture,
) -> None:
    order: list[Purpose] = []
    table = desk._table(BLOCK)

    def read(purpose: Purpose) -> None:
        desk.client.request_checksums(
            table, np.array([1]), [], purpose, lambda _: order.append(purpose)
        )

    desk.client.window = 1
    for purpose in (Purpose.SCRUB, Purpose.SCRUB, *[Purpose.VERIFY] * 3, *[Purpose.COMMIT] * 2):
        read(purpose)
    async with asyncio.timeout(30):
        while len(order) < 7:
            await asyncio.sleep(0.001)
    scrub, commit, verify = Purpose.SCRUB, Purpose.COMMIT, Purpose.VERIFY
    assert order == [scrub, commit, verify, commit, verify, verify, scrub]


async def test_more_is_asked_for_than_the_process_takes_at_once(desk: ClientFixture) -> None:
    whole = many(module.BATCH_BLOCKS)
    names = [desk.read(whole) for _ in range(30)]
    await desk.summed()
    assert all((desk.sums[name] == desk.expected(whole)).all() for name in names)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_dies_or_hangs_is_replaced_and_nothing_is_lost(
    desk: ClientFixture, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    desk.read(some(1))
    await desk.summed()
    before = desk.process
    os.kill(before.pid, how)
    asked = {desk.read(some(n, n + 1), Purpose(n % 3)): some(n, n + 1) for n in range(20)}
    await desk.summed()
    assert {name: desk.sums[name].tolist() for name in asked} == {
        name: desk.expected(blocks) for name, blocks in asked.items()
    }
    assert desk.process is not before
    assert before.returncode == -signal.SIGKILL
    assert desk.failures == []


async def test_one_that_had_nothing_to_do_for_long_has_its_time(
    desk: ClientFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.read(some(1))
    await desk.summed()
    before = desk.process
    await asyncio.sleep(0.01)
    monkeypatch.setattr(module, "PATIENCE", 5.0)
    desk.client._last_reply -= 100
    desk.read(some(2))
    assert desk.client._watch is not None
    desk.client._watch.cancel()
    desk.client._check()
    await desk.summed()
    assert desk.process is before


async def test_one_with_nothing_to_do_is_replaced_when_it_dies(desk: ClientFixture) -> None:
    before = desk.process
    before.kill()
    async with asyncio.timeout(30):
        while desk.process is before:
            await asyncio.sleep(0.001)
    desk.read(some(1))
    await desk.summed()


async def test_it_is_tried_again_where_no_process_can_be_had(
    desk: ClientFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY", 0.01)
    start, refusals = subprocess.Popen, [OSError("too many"), OSError("too many")]

    def popen(*arguments: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    desk.process.kill()
    desk.read(some(1))
    await desk.summed()
    assert desk.failures == []
    refusals += [OSError("none")] * 9
    desk.process.kill()
    async with asyncio.timeout(30):
        while not desk.failures:
            await asyncio.sleep(0.001)
    assert "none" in str(desk.failures[0])
    with pytest.raises(Failed, match="checksum process failed: none"):
        ChecksumClient(desk.pool.descriptors, CHUNK, 2, desk.failures.append)


async def test_without_any_process_it_fails(desk: ClientFixture) -> None:
    """And says so once, and is not asked again."""
    desk.client._arguments[1] = "0"  # a chunk has no bytes: it dies when it reads
    desk.process.kill()
    desk.read(some(1))
    async with asyncio.timeout(60):
        while not desk.failures:
            await asyncio.sleep(0.01)
    (error,) = desk.failures
    assert error.code == Code.COPY_FAILED
    desk.read(some(2))
    desk.client.close()


async def test_signals_for_the_daemon_are_none_of_its_business(desk: ClientFixture) -> None:
    """A terminal's interrupt and hangup, and a service manager's SIGTERM, go to all processes."""
    desk.read(some(1))
    await desk.summed()  # it has begun
    before = desk.process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(before.pid, number)
    desk.read(some(2))
    await desk.summed()
    assert desk.process is before


async def test_it_ends_with_who_asks(desk: ClientFixture) -> None:
    """However that ended: nobody closes anything then but the kernel."""
    desk.read(some(1))
    await desk.summed()
    process = desk.process
    desk.client._loop.remove_reader(desk.client._socket.fileno())
    desk.client._socket.close()
    assert await asyncio.to_thread(process.wait, 30) == 0


async def test_it_is_closed_at_once_whatever_is_to_be_done() -> None:
    desk = ClientFixture()
    desk.read(many(module.BATCH_BLOCKS))
    desk.client.close()
    desk.client.close()
    time.sleep(0.01)
    assert desk.sums == {0: None}
    desk.pool.close()
