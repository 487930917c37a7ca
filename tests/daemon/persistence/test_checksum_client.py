"""The checksum client: checksums from another process, and failures of that process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import xxhash

from kvferry.daemon.core.records import engine_owner, namespace_owner
from kvferry.daemon.core.region import Region
from kvferry.daemon.memory.shared_memory import PAGE, MappedFiles
from kvferry.daemon.persistence.checksum_client import (
    BATCH_BLOCKS,
    MAX_DEATHS,
    ChecksumClient,
    Purpose,
    batches,
)
from kvferry.daemon.processes import ProcessTimes
from kvferry.proto.errors import Failed
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.keys import MAX_KEY_BYTES
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from support.background import in_background
from support.eventually import eventually
from support.refused_starts import refuse_starts

CHUNK, COUNT = 4 * PAGE, 16
# Blocks cross pages and chunks.
BLOCK = 3 * 1024
START = 512
# A block that is hashed in several calls and crosses chunks.
LARGE = 5 * CHUNK + 100
SHORT = ProcessTimes(first_restart=0.01)


@dataclass(frozen=True)
class BlockRequest:
    """Host blocks, and the key of each, if they have any."""

    numbers: list[int]
    keys: list[bytes] = field(default_factory=list)
    block_bytes: int = BLOCK


class ClientFixture:
    """A pool of random bytes, and a client of its checksum process."""

    def __init__(self, chunk_bytes: int = CHUNK, **options: Any) -> None:
        self.pool = MappedFiles("kvferry-test", COUNT * CHUNK, CHUNK)
        self.bytes = (ctypes.c_ubyte * self.pool.nbytes).from_address(self.pool.address)
        rng = np.random.default_rng(1)
        self.bytes[:] = rng.integers(0, 256, self.pool.nbytes, np.uint8).tolist()
        self.client = ChecksumClient(self.pool.descriptors, chunk_bytes, 2, **options)
        self.reads: list[asyncio.Task[Any]] = []

    @property
    def pid(self) -> int | None:
        """Of the checksum process."""
        return self.client._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def read(self, request: BlockRequest, purpose: Purpose = Purpose.COMMIT) -> asyncio.Task[Any]:
        self.reads.append(
            asyncio.create_task(
                self.client.read_checksums(
                    self._region(request), np.array(request.numbers), purpose
                )
            )
        )
        return self.reads[-1]

    def expected(self, request: BlockRequest) -> list[int]:
        seeds = [xxhash.xxh3_64_intdigest(key) for key in request.keys] or request.numbers
        starts = [START + number * request.block_bytes for number in request.numbers]
        pool = bytes(self.bytes)
        return [
            xxhash.xxh3_64_intdigest(pool[at : at + request.block_bytes], seed)
            for at, seed in zip(starts, seeds, strict=True)
        ]

    async def wait_for_sums(self) -> list[Any]:
        return list(await asyncio.gather(*self.reads))

    async def close(self) -> None:
        for read in self.reads:
            read.cancel()
        await self.client._process.close()
        self.pool.close()

    def _region(self, request: BlockRequest) -> Region:
        """A region of blocks with these keys."""
        nbytes = request.block_bytes
        if not request.keys:
            rows, refs = (TensorLayout(4, nbytes, nbytes),), ((TensorRef(0, nbytes),),)
            layout = LayoutArrays.from_layout(KVLayout(rows, refs))
            return Region(engine_owner("one"), layout, START, 8 * LARGE)
        key_bytes = len(request.keys[0])
        fingerprint = Fingerprint("one", nbytes, key_bytes=key_bytes)
        region = Region(namespace_owner("one"), fingerprint, START, 64 * LARGE)
        blocks, first = np.unique(np.array(request.numbers), return_index=True)
        region.table.set_pending(blocks)
        region.table.set_stored(blocks, [request.keys[place] for place in first.tolist()])
        return region


@pytest.fixture
async def stopped(request: pytest.FixtureRequest) -> AsyncIterator[ClientFixture]:
    """A ClientFixture that does not run. The parameter has its arguments."""
    fixture = ClientFixture(**getattr(request, "param", {}))
    yield fixture
    await fixture.close()


@pytest.fixture
async def fixture(stopped: ClientFixture) -> AsyncIterator[ClientFixture]:
    """A ClientFixture that runs."""
    async with in_background(stopped.client.run()):
        yield stopped


def request_of(*numbers: int, keys: bool = False) -> BlockRequest:
    names = [number.to_bytes(8, "big") for number in numbers] if keys else []
    return BlockRequest(list(numbers), names)


@pytest.mark.parametrize(("block_bytes", "blocks"), [(2 << 20, 128), (4096, 1024), (1 << 30, 1)])
def test_a_batch_is_bounded_in_bytes_and_in_blocks(block_bytes: int, blocks: int) -> None:
    sizes = [part.stop - part.start for part in batches(block_bytes, 3 * blocks + 1)]
    assert sizes == [blocks] * 4


@pytest.mark.parametrize("keys", [False, True])
async def test_a_checksum_depends_on_the_bytes_and_the_key_or_number(
    fixture: ClientFixture, keys: bool
) -> None:
    all_blocks = request_of(*range((COUNT * CHUNK - START) // BLOCK), keys=keys)
    unordered = request_of(5, 3, 4, keys=keys)
    large = BlockRequest([2, 0], [b"a", b"b"] if keys else [], LARGE)
    for request in (all_blocks, unordered, large):
        assert (await fixture.read(request)).tolist() == fixture.expected(request)


async def test_commits_and_verification_alternate_and_the_scrub_waits_for_both(
    stopped: ClientFixture,
) -> None:
    order: list[Purpose] = []
    stopped.client.window = 1
    scrub, commit, verify = Purpose.SCRUB, Purpose.COMMIT, Purpose.VERIFY
    for purpose in (scrub, scrub, *[verify] * 3, *[commit] * 2):
        read = stopped.read(request_of(1), purpose)
        read.add_done_callback(lambda _, purpose=purpose: order.append(purpose))  # type: ignore[misc]
    await asyncio.sleep(0)
    async with in_background(stopped.client.run()):
        await stopped.wait_for_sums()
        await eventually(lambda: len(order) == 7)
    assert order == [commit, verify, commit, verify, verify, scrub, scrub]


async def test_the_largest_requests_are_queued_for_the_process(fixture: ClientFixture) -> None:
    numbers = [number % 64 for number in range(BATCH_BLOCKS)]
    keys = [bytes(MAX_KEY_BYTES - 8) + number.to_bytes(8, "big") for number in numbers]
    request = BlockRequest(numbers, keys)
    for _ in range(30):
        fixture.read(request)
    expected = fixture.expected(request)
    assert all((sums == expected).all() for sums in await fixture.wait_for_sums())


@pytest.mark.parametrize("stopped", [{"reply_timeout": 1.0}], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_dies_or_hangs_is_replaced_and_requests_are_repeated(
    fixture: ClientFixture, number: signal.Signals
) -> None:
    await fixture.read(request_of(1))
    before = fixture.pid
    fixture.send_signal(number)
    requests = [request_of(n, n + 1) for n in range(20)]
    for n, request in enumerate(requests):
        fixture.read(request, Purpose(n % 3))
    _, *sums = await fixture.wait_for_sums()
    assert [each.tolist() for each in sums] == list(map(fixture.expected, requests))
    assert fixture.pid != before


@pytest.mark.parametrize("stopped", [{"times": SHORT}], indirect=True)
async def test_a_reply_ends_the_count_of_deaths(
    fixture: ClientFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        refusals = refuse_starts(monkeypatch, *[OSError("too many")] * (MAX_DEATHS - 1))
        fixture.send_signal(signal.SIGKILL)
        await eventually(lambda: not refusals)  # noqa: B023
        await fixture.read(request_of(1))


@pytest.mark.parametrize("stopped", [{"times": SHORT}], indirect=True)
async def test_a_process_that_cannot_be_started_ends_the_client(
    stopped: ClientFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_starts(monkeypatch, *[OSError("none")] * 9)
    stopped.send_signal(signal.SIGKILL)
    last = "4 processes in a row ended, the last one: cannot start: none"
    with pytest.RaisesGroup(pytest.RaisesExc(Failed, match=last)):
        await stopped.client.run()
    with pytest.raises(Failed, match="checksum process failed: none"):
        ChecksumClient(stopped.pool.descriptors, CHUNK, 2)


@pytest.mark.parametrize("stopped", [{"times": SHORT, "chunk_bytes": 0}], indirect=True)
async def test_a_process_that_dies_at_each_request_ends_the_client(stopped: ClientFixture) -> None:
    stopped.read(request_of(1))
    last = "4 processes in a row ended, the last one: it has ended"
    with pytest.RaisesGroup(pytest.RaisesExc(Failed, match=f"copy_failed.*{last}")):
        await stopped.client.run()


async def test_the_process_ignores_signals_for_the_daemon(fixture: ClientFixture) -> None:
    """A terminal sends SIGINT and SIGHUP, and a service manager SIGTERM, to all processes."""
    await fixture.read(request_of(1))  # the process is running
    before = fixture.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        fixture.send_signal(number)
    await fixture.read(request_of(2))
    assert fixture.pid == before


async def test_a_reply_to_a_cancelled_read_is_dropped(fixture: ClientFixture) -> None:
    sent, waiting = fixture.read(request_of(1)), [fixture.read(request_of(2)) for _ in range(9)]
    await asyncio.sleep(0)
    for read in (sent, *waiting):
        read.cancel()
    request = request_of(1)
    assert (await fixture.read(request)).tolist() == fixture.expected(request)
    assert sent.cancelled()
