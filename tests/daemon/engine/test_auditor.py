"""Host blocks are summed up in another process, whatever becomes of that."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import xxhash

from kvferry.daemon.engine import auditor as module
from kvferry.daemon.engine.auditor import Auditor, Blocks
from kvferry.daemon.engine.memory import PAGE, MappedFiles
from kvferry.proto.errors import Code, Failed, KVFerryError

CHUNK, COUNT = 4 * PAGE, 16
BLOCK = 3 * 1024
"""Blocks lie across pages, and across chunks."""
START = 512


class Desk:
    """A pool of random bytes, and who sums it up."""

    def __init__(self) -> None:
        self.pool = MappedFiles("kvferry-test", COUNT * CHUNK, CHUNK)
        self.bytes = (ctypes.c_ubyte * self.pool.nbytes).from_address(self.pool.address)
        random = np.random.default_rng(1)
        self.bytes[:] = random.integers(0, 256, self.pool.nbytes, np.uint8).tolist()
        self.failures: list[KVFerryError] = []
        self.auditor = Auditor(self.pool.descriptors, CHUNK, 2, self.failures.append)
        self.sums: dict[int, Any] = {}

    @property
    def process(self) -> Any:
        return self.auditor._process

    def read(self, blocks: Blocks, *, urgent: bool = False) -> int:
        name = len(self.sums)
        self.sums[name] = None
        self.auditor.read(blocks, urgent=urgent, done=lambda sums: self.sums.update({name: sums}))
        return name

    def expected(self, blocks: Blocks) -> list[int]:
        seeds = [xxhash.xxh3_64_intdigest(key) for key in blocks.keys] or blocks.numbers.tolist()
        starts = (blocks.start + blocks.numbers * blocks.block_bytes).tolist()
        whole = bytes(self.bytes)
        return [
            xxhash.xxh3_64_intdigest(whole[at : at + blocks.block_bytes], seed)
            for at, seed in zip(starts, seeds, strict=True)
        ]

    async def summed(self) -> None:
        async with asyncio.timeout(30):
            while any(sums is None for sums in self.sums.values()):
                await asyncio.sleep(0.001)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    desk.auditor.close()
    assert desk.process.returncode is not None
    desk.pool.close()


def some(*numbers: int, keys: bool = False) -> Blocks:
    names = [number.to_bytes(8, "big") for number in numbers] if keys else []
    return Blocks(START, BLOCK, np.array(numbers), names)


def many(count: int) -> Blocks:
    """As long a request as there is."""
    numbers = np.arange(count) % 64
    return Blocks(START, BLOCK, numbers, [bytes(56) + n.to_bytes(8, "big") for n in range(count)])


@pytest.mark.parametrize(
    ("block_bytes", "urgent", "blocks"),
    [(2 << 20, True, 16), (2 << 20, False, 128), (4096, True, 1024), (1 << 30, False, 1)],
)
def test_a_batch_that_somebody_waits_for_is_short(
    block_bytes: int, urgent: bool, blocks: int
) -> None:
    parts = Blocks(0, block_bytes, np.arange(3 * blocks + 1), []).batches(urgent=urgent)
    sizes = [part.stop - part.start for part in parts]
    assert sizes == [blocks] * 4


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("urgent", [False, True])
async def test_a_sum_is_of_a_blocks_bytes_under_its_key_or_number(
    desk: Desk, keys: bool, urgent: bool
) -> None:
    every = some(*range((COUNT * CHUNK - START) // BLOCK), keys=keys)
    last_first = some(5, 3, 4, keys=keys)
    names = [desk.read(blocks, urgent=urgent) for blocks in (every, last_first)]
    await desk.summed()
    for name, blocks in zip(names, (every, last_first), strict=True):
        assert desk.sums[name].tolist() == desk.expected(blocks)


async def test_more_is_asked_for_than_the_reader_takes_at_once(desk: Desk) -> None:
    whole = many(module.BATCH_BLOCKS)
    names = [desk.read(whole) for _ in range(30)]
    first = desk.read(some(1), urgent=True)
    async with asyncio.timeout(30):
        while desk.sums[first] is None:
            await asyncio.sleep(0)
    assert desk.sums[names[-1]] is None  # who is urgent does not wait for all the others
    await desk.summed()
    assert all((desk.sums[name] == desk.expected(whole)).all() for name in names)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_reader_that_dies_or_hangs_is_replaced_and_nothing_is_lost(
    desk: Desk, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    desk.read(some(1))
    await desk.summed()
    before = desk.process
    os.kill(before.pid, how)
    asked = {desk.read(some(n, n + 1), urgent=bool(n % 2)): some(n, n + 1) for n in range(20)}
    await desk.summed()
    assert {name: desk.sums[name].tolist() for name in asked} == {
        name: desk.expected(blocks) for name, blocks in asked.items()
    }
    assert desk.process is not before
    assert before.returncode == -signal.SIGKILL
    assert desk.failures == []


async def test_one_that_had_nothing_to_do_for_long_has_its_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.read(some(1))
    await desk.summed()
    before = desk.process
    await asyncio.sleep(0.01)
    monkeypatch.setattr(module, "PATIENCE", 5.0)
    desk.auditor._heard -= 100
    desk.read(some(2))
    assert desk.auditor._watch is not None
    desk.auditor._watch.cancel()
    desk.auditor._look()
    await desk.summed()
    assert desk.process is before


async def test_one_with_nothing_to_do_is_replaced_when_it_dies(desk: Desk) -> None:
    before = desk.process
    before.kill()
    async with asyncio.timeout(30):
        while desk.process is before:
            await asyncio.sleep(0.001)
    desk.read(some(1))
    await desk.summed()


async def test_it_is_tried_again_where_no_process_can_be_had(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
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
    with pytest.raises(Failed, match="no process to read host blocks: none"):
        Auditor(desk.pool.descriptors, CHUNK, 2, desk.failures.append)


async def test_who_can_have_no_reader_fails(desk: Desk) -> None:
    """And says so once, and is not asked again."""
    desk.auditor._arguments[1] = "0"  # a chunk has no bytes: it dies when it reads
    desk.process.kill()
    desk.read(some(1))
    async with asyncio.timeout(60):
        while not desk.failures:
            await asyncio.sleep(0.01)
    (error,) = desk.failures
    assert error.code == Code.COPY_FAILED
    desk.read(some(2))
    desk.auditor.close()


async def test_signals_for_the_daemon_are_none_of_its_business(desk: Desk) -> None:
    """A terminal's interrupt and hangup, and a service manager's SIGTERM, go to all processes."""
    desk.read(some(1))
    await desk.summed()  # it has begun
    before = desk.process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(before.pid, number)
    desk.read(some(2))
    await desk.summed()
    assert desk.process is before


async def test_it_ends_with_who_asks(desk: Desk) -> None:
    """However that ended: nobody closes anything then but the kernel."""
    desk.read(some(1))
    await desk.summed()
    process = desk.process
    desk.auditor._loop.remove_reader(desk.auditor._socket.fileno())
    desk.auditor._socket.close()
    assert await asyncio.to_thread(process.wait, 30) == 0


async def test_it_is_closed_at_once_whatever_is_to_be_done() -> None:
    desk = Desk()
    desk.read(many(module.BATCH_BLOCKS))
    desk.auditor.close()
    desk.auditor.close()
    time.sleep(0.01)
    assert desk.sums == {0: None}
    desk.pool.close()
