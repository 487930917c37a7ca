"""Requests checksums of host blocks from the checksum process (checksum_worker.py).

If that process dies or does not reply, it is replaced and gets the same requests again. If it
cannot be replaced, corrupt blocks cannot be detected, and the daemon ends. Event loop only.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import TypeVar

import msgspec
import numpy as np
import structlog

from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.persistence.block_table import BlockTable, Checksums
from kvferry.daemon.persistence.checksum_worker import MAX_BYTES, NUMBER, ChecksumRequest
from kvferry.daemon.processes import start_worker
from kvferry.proto.errors import Code, Failed

# Maximum of bytes and host blocks of one request. The event loop handles each reply, with all its
# keys, without a break.
BATCH_BYTES = 256 << 20
BATCH_BLOCKS = 1024
# Requests in flight per thread of the process, so that no thread waits for the event loop.
REQUESTS_PER_THREAD = 2
# Seconds until a reply must arrive. Reading a batch takes tens of milliseconds.
REPLY_SECONDS = 10.0
# Seconds until another attempt to start a process.
RETRY = 0.5
# Consecutive processes that may end without a reply.
MAX_DEATHS = 3

log = structlog.get_logger()


class Purpose(Enum):
    """Why blocks are read. COMMIT and VERIFY alternate; SCRUB is sent when neither waits."""

    COMMIT = 0
    VERIFY = 1
    SCRUB = 2


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request, and its checksums."""

    request: ChecksumRequest
    checksums: asyncio.Future[Checksums]


class ChecksumClient:
    """The checksum process, and the requests to it.

    descriptors: of the chunks of the pool, which have `chunk_bytes` each, the last one perhaps
    fewer. threads: of the process. reply_timeout, retry_after: see REPLY_SECONDS and RETRY. Raises
    Failed (COPY_FAILED) if no process can be started.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        chunk_bytes: int,
        threads: int,
        reply_timeout: float = REPLY_SECONDS,
        retry_after: float = RETRY,
    ) -> None:
        self._descriptors = descriptors
        self._arguments = [str(number) for number in (threads, chunk_bytes, *descriptors)]
        # Maximum of requests in flight.
        self.window = REQUESTS_PER_THREAD * threads
        self._reply_timeout, self._retry_after = reply_timeout, retry_after
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._numbers = count()
        self._waiting: dict[Purpose, deque[_Pending]] = {each: deque() for each in Purpose}
        self._sent: dict[int, tuple[Purpose, _Pending]] = {}
        self._last = Purpose.VERIFY
        self._deaths = 0
        # Time of the last reply, or of the first request after an idle time.
        self._last_reply = 0.0
        self._watch: asyncio.TimerHandle | None = None
        try:
            self._start()
        except OSError as error:
            raise self._failure(str(error)) from error

    async def read_checksums(
        self, table: BlockTable, blocks: Int64s, keys: Sequence[bytes], purpose: Purpose
    ) -> Checksums:
        """The checksums of one batch of blocks of a table (see `batches`), in their order.

        keys: of the blocks, or none. Needs `run`.
        """
        record = table.record
        request = ChecksumRequest(
            next(self._numbers),
            record.start,
            record.block_bytes,
            blocks.astype(np.int64).tobytes(),
            keys,
        )
        pending = _Pending(request, self._loop.create_future())
        self._waiting[purpose].append(pending)
        self._send()
        return await pending.checksums

    async def run(self) -> None:
        """Serve requests until cancelled. Raises Failed if the process cannot be replaced."""
        try:
            await self._failed
        finally:
            self.close()

    def close(self) -> None:
        """End the process. Outstanding requests get no reply."""
        self._end()
        self._sent.clear()
        for waiting in self._waiting.values():
            waiting.clear()

    def _start(self) -> None:
        module = "kvferry.daemon.persistence.checksum_worker"
        self._process, ours = start_worker(
            module, lambda number: [str(number), *self._arguments], self._descriptors
        )
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
        self._socket = ours
        self._loop.add_reader(ours.fileno(), self._receive)

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _next(self) -> Purpose | None:
        commit, verify = Purpose.COMMIT, Purpose.VERIFY
        first, second = (verify, commit) if self._last is commit else (commit, verify)
        return next((each for each in (first, second, Purpose.SCRUB) if self._waiting[each]), None)

    def _send(self) -> None:
        if not self._sent:
            self._last_reply = self._loop.time()
        while len(self._sent) < self.window and (purpose := self._next()) is not None:
            pending = self._waiting[purpose][0]
            try:
                self._socket.send(msgspec.msgpack.encode(pending.request))
            except OSError:  # the socket is full; or the process ended, which `_receive` handles
                break
            self._sent[pending.request.number] = purpose, self._waiting[purpose].popleft()
            self._last = purpose
        if self._watch is None and self._sent:
            self._watch = self._loop.call_later(self._reply_timeout, self._check)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._replace("the process exited")
            return
        self._deaths, self._last_reply = 0, self._loop.time()
        (number,) = NUMBER.unpack_from(data)
        _, pending = self._sent.pop(number)
        self._send()
        if not pending.checksums.done():  # otherwise cancelled
            pending.checksums.set_result(np.frombuffer(data, np.uint64, offset=NUMBER.size))

    def _check(self) -> None:
        """Replace the process if it has not replied in time."""
        self._watch = None
        if not self._sent:
            return
        left = self._last_reply + self._reply_timeout - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._check)
            return
        self._receive()  # if the event loop was busy, a reply may have arrived
        if self._watch is None and self._sent:
            self._replace(f"no reply within {self._reply_timeout} s")

    def _replace(self, why: str) -> None:
        """Start another process, and send it the same requests again."""
        self._end()
        self._deaths += 1
        log.warning("checksum process restarted", reason=why)
        for purpose, pending in reversed(self._sent.values()):
            self._waiting[purpose].appendleft(pending)
        self._sent.clear()
        if self._deaths > MAX_DEATHS:
            message = f"{self._deaths} processes in a row ended, the last one: {why}"
            self._failed.set_exception(self._failure(message))
            return
        try:
            self._start()
        except OSError as error:
            reason = f"cannot start: {error}"
            self._watch = self._loop.call_later(self._retry_after, self._replace, reason)
            return
        self._send()

    def _failure(self, why: str) -> Failed:
        message = f"the checksum process failed: {why}; see the log"
        return Failed(Code.COPY_FAILED, message, why)


_Batch = TypeVar("_Batch")


async def for_each_batch(
    some: Iterable[_Batch], limit: int, read: Callable[[_Batch], Awaitable[None]]
) -> None:
    """Await `read` for each batch, for at most `limit` at a time. `some` is read in step."""
    iterator = iter(some)

    async def read_next() -> None:
        for batch in iterator:
            await read(batch)

    async with asyncio.TaskGroup() as readers:
        for _ in range(limit):
            readers.create_task(read_next())


def batches(block_bytes: int, blocks: int) -> Iterator[slice]:
    """Slices of `blocks` blocks, each for one request."""
    step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // block_bytes))
    return (slice(at, at + step) for at in range(0, blocks, step))
