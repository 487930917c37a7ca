"""Requests checksums of host blocks from the checksum process (checksum_worker.py).

If that process dies or does not reply, it is replaced and gets the same requests again. If it
cannot be replaced, corrupt blocks cannot be detected, and the daemon ends. Event loop only.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

import msgspec
import numpy as np
import structlog

from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.persistence.block_table import BlockTable, Checksums
from kvferry.daemon.persistence.checksum_worker import MAX_BYTES, NUMBER, ChecksumRequest
from kvferry.daemon.processes import start_worker
from kvferry.proto.errors import Code, Failed, KVFerryError

# Bytes and host blocks of one request, at most. The event loop handles each reply, with all of its
# keys, in one turn.
BATCH_BYTES = 256 << 20
BATCH_BLOCKS = 1024
# Requests in flight per thread of the process, so that no thread waits for the event loop.
AHEAD = 2
# Seconds for a reply. A batch is read in tens of milliseconds.
PATIENCE = 10.0
# Seconds until another attempt to start a process.
RETRY = 0.5
# Processes in a row that may die without a reply.
MAX_DEATHS = 3

log = structlog.get_logger()


class Purpose(Enum):
    """Why blocks are read. COMMIT and VERIFY take turns; SCRUB is sent when neither waits."""

    COMMIT = 0
    VERIFY = 1
    SCRUB = 2


@dataclass(frozen=True, slots=True)
class _Reading:
    request: ChecksumRequest
    done: Callable[[Checksums], None]


class ChecksumClient:
    """Event loop only; callbacks run there, too.

    descriptors: of the chunks of the pool, all but the last of `chunk_bytes`. threads: of the
    process. failed: called if the process cannot be replaced. Raises Failed (COPY_FAILED) if no
    process can be started.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        chunk_bytes: int,
        threads: int,
        failed: Callable[[KVFerryError], None],
    ) -> None:
        self._descriptors = descriptors
        self._arguments = [str(number) for number in (threads, chunk_bytes, *descriptors)]
        # Requests that keep the process busy.
        self.window = AHEAD * threads
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        self._waiting: dict[Purpose, deque[_Reading]] = {each: deque() for each in Purpose}
        self._sent: dict[int, tuple[Purpose, _Reading]] = {}
        self._last = Purpose.VERIFY
        self._deaths = 0
        # Time of the last reply, or of the first request after the process was idle.
        self._last_reply = 0.0
        self._watch: asyncio.TimerHandle | None = None
        try:
            self._start()
        except OSError as error:
            raise self._failure(str(error)) from error

    def request_checksums(
        self,
        table: BlockTable,
        blocks: Int64s,
        keys: Sequence[bytes],
        purpose: Purpose,
        done: Callable[[Checksums], None],
    ) -> None:
        """Request the checksums of one batch of a table's blocks under these keys."""
        record = table.record
        request = ChecksumRequest(
            next(self._numbers),
            record.start,
            record.block_bytes,
            blocks.astype(np.int64).tobytes(),
            keys,
        )
        self._waiting[purpose].append(_Reading(request, done))
        self._send()

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
            reading = self._waiting[purpose][0]
            try:
                self._socket.send(msgspec.msgpack.encode(reading.request))
            except (
                OSError
            ):  # the socket is full until it replies; or it died, and `_receive` follows
                break
            self._sent[reading.request.number] = purpose, self._waiting[purpose].popleft()
            self._last = purpose
        if self._watch is None and self._sent:
            self._watch = self._loop.call_later(PATIENCE, self._check)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._replace("exited")
            return
        self._deaths, self._last_reply = 0, self._loop.time()
        (number,) = NUMBER.unpack_from(data)
        _, reading = self._sent.pop(number)
        self._send()
        reading.done(np.frombuffer(data, np.uint64, offset=NUMBER.size))

    def _check(self) -> None:
        """Replace the process if it has not replied in time."""
        self._watch = None
        if not self._sent:
            return
        left = self._last_reply + PATIENCE - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._check)
        else:
            self._replace(f"no reply within {PATIENCE} s")

    def _replace(self, why: str) -> None:
        self._end()
        self._deaths += 1
        log.warning("checksum process restarted", reason=why)
        for purpose, reading in reversed(self._sent.values()):
            self._waiting[purpose].appendleft(reading)
        self._sent.clear()
        if self._deaths > MAX_DEATHS:
            self._failed(self._failure(f"{self._deaths} times in a row, the last time: {why}"))
            return
        try:
            self._start()
        except OSError as error:
            self._watch = self._loop.call_later(RETRY, self._replace, f"cannot start: {error}")
            return
        self._send()

    def _failure(self, why: str) -> Failed:
        message = f"the checksum process failed: {why}; see the log"
        return Failed(Code.COPY_FAILED, message, why)


def batches(block_bytes: int, blocks: int) -> Iterator[slice]:
    """Slices of `blocks` blocks, each for one request."""
    step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // block_bytes))
    return (slice(at, at + step) for at in range(0, blocks, step))
