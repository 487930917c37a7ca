"""Checksums of host blocks are computed in another process, whatever happens to that."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import xxhash

from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.memory.shared_memory import PAGE, MappedFiles
from kvferry.daemon.persistence.block_table import BlockTable
from kvferry.daemon.persistence.checksum_client import (
    BATCH_BLOCKS,
    ChecksumClient,
    Purpose,
    batches,
)
from kvferry.proto.errors import Code, Failed, KVFerryError
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from support.eventually import eventually
from support.refused_starts import refuse_starts

CHUNK, COUNT = 4 * PAGE, 16
# Blocks lie across pages, and across chunks.
BLOCK = 3 * 1024
START = 512
# More than one call hashes, and across chunks.
LARGE = 5 * CHUNK + 100


@dataclass(frozen=True)
class Asked:
    """Host blocks, and the key of each, if they have any."""

    numbers: list[int]
    keys: list[bytes] = field(default_factory=list)
    block_bytes: int = BLOCK


class ClientFixture:
    """A pool of random bytes, and a client of its checksum process."""

    def __init__(self, **timeouts: float) -> None:
        self.pool = MappedFiles("kvferry-test", COUNT * CHUNK, CHUNK)
        self.bytes = (ctypes.c_ubyte * self.pool.nbytes).from_address(self.pool.address)
        random = np.random.default_rng(1)
        self.bytes[:] = random.integers(0, 256, self.pool.nbytes, np.uint8).tolist()
        self.failures: list[KVFerryError] = []
        self.client = ChecksumClient(
            self.pool.descriptors, CHUNK, 2, self.failures.append, **timeouts
        )
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
        await eventually(lambda: all(sums is not None for sums in self.sums.values()))

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
async def fixture(request: pytest.FixtureRequest) -> AsyncIterator[ClientFixture]:
    """Its parameter, if any, has the timeouts of the client."""
    fixture = ClientFixture(**getattr(request, "param", {}))
    yield fixture
    fixture.close()
    assert fixture.process.returncode is not None


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
    fixture: ClientFixture, keys: bool
) -> None:
    every = some(*range((COUNT * CHUNK - START) // BLOCK), keys=keys)
    last_first = some(5, 3, 4, keys=keys)
    large = Asked([2, 0], [b"a", b"b"] if keys else [], LARGE)
    all_of_them = every, last_first, large
    names = [fixture.read(asked) for asked in all_of_them]
    await fixture.summed()
    for name, asked in zip(names, all_of_them, strict=True):
        assert fixture.sums[name].tolist() == fixture.expected(asked)


async def test_commits_and_verification_take_turns_and_the_scrub_waits_for_both(
    fixture: ClientFixture,
) -> None:
    order: list[Purpose] = []
    table = fixture._table(BLOCK)

    def read(purpose: Purpose) -> None:
        fixture.client.request_checksums(
            table, np.array([1]), [], purpose, lambda _: order.append(purpose)
        )

    fixture.client.window = 1
    for purpose in (Purpose.SCRUB, Purpose.SCRUB, *[Purpose.VERIFY] * 3, *[Purpose.COMMIT] * 2):
        read(purpose)
    await eventually(lambda: len(order) == 7)
    scrub, commit, verify = Purpose.SCRUB, Purpose.COMMIT, Purpose.VERIFY
    assert order == [scrub, commit, verify, commit, verify, verify, scrub]


async def test_more_requests_than_the_process_takes_at_once(fixture: ClientFixture) -> None:
    whole = many(BATCH_BLOCKS)
    names = [fixture.read(whole) for _ in range(30)]
    await fixture.summed()
    assert all((fixture.sums[name] == fixture.expected(whole)).all() for name in names)


@pytest.mark.parametrize("fixture", [{"reply_timeout": 3.0}], indirect=True)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_dies_or_hangs_is_replaced_and_nothing_is_lost(
    fixture: ClientFixture, how: signal.Signals
) -> None:
    fixture.read(some(1))
    await fixture.summed()
    before = fixture.process
    os.kill(before.pid, how)
    asked = {fixture.read(some(n, n + 1), Purpose(n % 3)): some(n, n + 1) for n in range(20)}
    await fixture.summed()
    assert {name: fixture.sums[name].tolist() for name in asked} == {
        name: fixture.expected(blocks) for name, blocks in asked.items()
    }
    assert fixture.process is not before
    assert before.returncode == -signal.SIGKILL
    assert fixture.failures == []


async def test_an_idle_process_has_the_full_reply_timeout(fixture: ClientFixture) -> None:
    fixture.read(some(1))
    await fixture.summed()
    before = fixture.process
    fixture.client._last_reply -= 100
    fixture.read(some(2))
    assert fixture.client._watch is not None
    fixture.client._watch.cancel()
    fixture.client._check()
    await fixture.summed()
    assert fixture.process is before


async def test_an_idle_process_is_replaced_when_it_dies(fixture: ClientFixture) -> None:
    before = fixture.process
    before.kill()
    await eventually(lambda: fixture.process is not before)
    fixture.read(some(1))
    await fixture.summed()


@pytest.mark.parametrize("fixture", [{"retry_after": 0.01}], indirect=True)
async def test_starting_the_process_is_retried(
    fixture: ClientFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = refuse_starts(monkeypatch, OSError("too many"), OSError("too many"))
    fixture.process.kill()
    fixture.read(some(1))
    await fixture.summed()
    assert fixture.failures == []
    refusals += [OSError("none")] * 9
    fixture.process.kill()
    await eventually(lambda: fixture.failures)
    assert "none" in str(fixture.failures[0])
    with pytest.raises(Failed, match="checksum process failed: none"):
        ChecksumClient(fixture.pool.descriptors, CHUNK, 2, fixture.failures.append)


async def test_without_any_process_it_fails(fixture: ClientFixture) -> None:
    """And says so once, and is not asked again."""
    fixture.client._arguments[1] = "0"  # a chunk has no bytes: it dies when it reads
    fixture.process.kill()
    fixture.read(some(1))
    await eventually(lambda: fixture.failures)
    (error,) = fixture.failures
    assert error.code == Code.COPY_FAILED
    fixture.read(some(2))
    fixture.client.close()


async def test_signals_for_the_daemon_are_none_of_its_business(fixture: ClientFixture) -> None:
    """A terminal's interrupt and hangup, and a service manager's SIGTERM, go to all processes."""
    fixture.read(some(1))
    await fixture.summed()  # it has begun
    before = fixture.process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(before.pid, number)
    fixture.read(some(2))
    await fixture.summed()
    assert fixture.process is before


async def test_the_process_ends_with_its_client(fixture: ClientFixture) -> None:
    """However that ended: nobody closes anything then but the kernel."""
    fixture.read(some(1))
    await fixture.summed()
    process = fixture.process
    fixture.client._loop.remove_reader(fixture.client._socket.fileno())
    fixture.client._socket.close()
    assert await asyncio.to_thread(process.wait, 30) == 0


async def test_closing_drops_outstanding_requests() -> None:
    fixture = ClientFixture()
    fixture.read(many(BATCH_BLOCKS))
    fixture.client.close()
    fixture.client.close()
    time.sleep(0.01)
    assert fixture.sums == {0: None}
    fixture.pool.close()
