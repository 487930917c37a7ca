"""Reads checksums of host blocks through the checksum process (checksum_worker.py).

If that process dies or does not reply, it is replaced and gets the same requests again. If it
cannot be replaced, corrupt blocks cannot be detected, and the daemon ends. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec
import numpy as np
import structlog

from kvferry.daemon.core.block_lines import Checksums
from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.core.region import Region
from kvferry.daemon.persistence.checksum_worker import ChecksumRequest
from kvferry.daemon.processes import ChildProcess, ProcessDied, ProcessTimes, Program
from kvferry.proto.errors import Code, Failed

# Maximum of bytes and host blocks of one request. The event loop handles each reply, with all its
# keys, without a break.
BATCH_BYTES = 256 << 20
BATCH_BLOCKS = 1024
# Requests in flight per thread of the process, so that no thread waits for the event loop.
REQUESTS_PER_THREAD = 2
# Seconds until a reply must arrive. Reading a batch takes tens of milliseconds.
REPLY_SECONDS = 10.0
# Stores are not committed while the process is replaced.
TIMES = ProcessTimes(start=30.0, first_restart=0.2, last_restart=1.0, end=1.0)
# Consecutive processes that may end without a reply.
MAX_DEATHS = 3

# Blocks of one region, for one request.
Batch: TypeAlias = tuple[Region, Int64s]

log = structlog.get_logger()


class Purpose(Enum):
    """Why blocks are read. COMMIT and VERIFY alternate; SCRUB is sent when neither waits."""

    COMMIT = 0
    VERIFY = 1
    SCRUB = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A request, and its checksums once the process has replied."""

    request: ChecksumRequest
    purpose: Purpose
    checksums: asyncio.Future[Checksums]


class _ReadQueue:
    """Reads that are not sent yet, in the order of their purposes."""

    def __init__(self) -> None:
        self._waiting: dict[Purpose, deque[_Read]] = {each: deque() for each in Purpose}
        self._number = asyncio.Semaphore(0)
        self._last = Purpose.VERIFY

    def add_read(self, read: _Read) -> None:
        self._waiting[read.purpose].append(read)
        self._number.release()

    async def next_read(self) -> _Read:
        await self._number.acquire()
        commit, verify = Purpose.COMMIT, Purpose.VERIFY
        first, second = (verify, commit) if self._last is commit else (commit, verify)
        self._last = next(each for each in (first, second, Purpose.SCRUB) if self._waiting[each])
        return self._waiting[self._last].popleft()


class ChecksumClient:
    """The checksum process, and the requests to it.

    descriptors: of the chunks of the pool, which have `chunk_bytes` each, the last one perhaps
    fewer. threads: of the process. reply_timeout, times: see REPLY_SECONDS and TIMES. Raises
    Failed (COPY_FAILED) if no process can be started.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        chunk_bytes: int,
        threads: int,
        reply_timeout: float = REPLY_SECONDS,
        times: ProcessTimes = TIMES,
    ) -> None:
        # Maximum of requests in flight.
        self.window = REQUESTS_PER_THREAD * threads
        arguments = [str(number) for number in (threads, chunk_bytes, *descriptors)]
        module = "kvferry.daemon.persistence.checksum_worker"
        program = Program("checksums", module, arguments, descriptors)
        self._process = ChildProcess(program, times, lost=self._count_death)
        self._reply_timeout = reply_timeout
        self._queue = _ReadQueue()
        self._last_reply = 0.0
        self._deaths = 0
        try:
            self._process.start()
        except OSError as error:
            raise _failure(str(error)) from error

    async def read_checksums(self, region: Region, blocks: Int64s, purpose: Purpose) -> Checksums:
        """The checksums of one batch of blocks (see `batches`), in their order.

        Waits for ever unless `run` runs.
        """
        numbers, keys = blocks.astype(np.int64).tobytes(), region.table.lines.keys(blocks)
        request = ChecksumRequest(region.start, region.block_bytes, numbers, keys)
        read = _Read(request, purpose, asyncio.get_running_loop().create_future())
        self._queue.add_read(read)
        return await read.checksums

    async def run(self) -> None:
        """Serve reads until cancelled; then the process has ended.

        Raises Failed (COPY_FAILED), in an exception group, if the process cannot be replaced.
        """
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.window):
                tasks.create_task(self._serve_reads())
            await self._process.run()

    async def _serve_reads(self) -> None:
        while True:
            read = await self._queue.next_read()
            if read.checksums.cancelled():
                continue
            checksums = await self._request_checksums(read.request)
            if not read.checksums.cancelled():
                read.checksums.set_result(checksums)

    async def _request_checksums(self, request: ChecksumRequest) -> Checksums:
        """Send a request to one process after the other, until one has replied."""
        payload = msgspec.msgpack.encode(request)
        while True:
            reply = self._process.send(payload, self._receive)
            await self._process.wait(reply, self._reply_timeout, lambda: self._last_reply)
            if self._process.is_late(reply):
                self._process.kill(f"no reply within {self._reply_timeout} s")
            with suppress(ProcessDied):
                return await reply

    def _receive(self, payload: bytes) -> Checksums:
        self._deaths, self._last_reply = 0, time.monotonic()
        self._process.note_progress()
        return np.frombuffer(payload, np.uint64)

    def _count_death(self, why: str) -> None:
        """Raise Failed if too many processes have died in a row."""
        self._deaths += 1
        log.warning("checksum process lost", reason=why)
        if self._deaths > MAX_DEATHS:
            raise _failure(f"{self._deaths} processes in a row ended, the last one: {why}")


def _failure(why: str) -> Failed:
    return Failed(Code.COPY_FAILED, f"the checksum process failed: {why}; see the log", why)


async def for_each_batch(
    some: Iterator[Batch], limit: int, read: Callable[[Batch], Awaitable[None]]
) -> None:
    """Await `read` for each batch, for at most `limit` at a time.

    The next batch is taken from the iterator when it can be read.
    """

    async def read_next() -> None:
        for batch in some:
            await read(batch)

    async with asyncio.TaskGroup() as readers:
        for _ in range(limit):
            readers.create_task(read_next())


def batches(block_bytes: int, blocks: int) -> Iterator[slice]:
    """Slices of `blocks` blocks, each for one request."""
    step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // block_bytes))
    return (slice(at, at + step) for at in range(0, blocks, step))
