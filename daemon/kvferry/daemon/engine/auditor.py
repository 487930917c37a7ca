"""Has host blocks read and summed up, by a process of its own (reader.py).

Should that die, or say nothing for long, there is another one, and it is asked the same again. Who
can have none has no way to tell good blocks from bad ones: the daemon ends then.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec
import numpy as np
import structlog

from kvferry.daemon.core.geometry import Int64s
from kvferry.daemon.engine.ledger import Sums
from kvferry.daemon.engine.reader import MAX_BYTES, NUMBER, Request
from kvferry.proto.errors import Code, Failed, KVFerryError
from kvferry.proto.keys import OffloadKey

BATCH_BYTES = 32 << 20
"""What is asked for at a time where a load waits for it: each thread is to have some of that."""
PATIENT_BYTES = 256 << 20
"""Where nobody waits. Each answer takes some of the loop's time, which loads want."""
BATCH_BLOCKS = 1024
"""Of either."""
AHEAD = 2
"""Requests that the reader has for each of its threads."""
PATIENCE = 10.0
"""Seconds for an answer; a batch is read in some ten milliseconds."""
RETRY = 0.5
"""Seconds after which another is started once more, where that could not be."""
MAX_DEATHS = 3
"""Readers that die one after the other without an answer."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Blocks:
    """Host blocks to read: numbers in a region that begins at byte `start` of the pool.

    keys: that of each block; none where blocks have none.
    """

    start: int
    block_bytes: int
    numbers: Int64s
    keys: Sequence[OffloadKey]

    def batches(self, *, urgent: bool) -> list[slice]:
        nbytes = BATCH_BYTES if urgent else PATIENT_BYTES
        step = max(1, min(BATCH_BLOCKS, nbytes // self.block_bytes))
        return [slice(at, at + step) for at in range(0, self.numbers.size, step)]

    def cut(self, part: slice) -> Blocks:
        return Blocks(self.start, self.block_bytes, self.numbers[part], self.keys[part])


@dataclass(frozen=True, slots=True)
class _Reading:
    request: Request
    done: Callable[[Sums], None]


class Auditor:
    """Called by the loop alone, and calls back there.

    descriptors: of the chunks of the pool, all but the last of `chunk_bytes`. threads: of the
    reader, for urgent blocks and for others each. failed: there can be no reader any more. Raises
    Failed where there can be none from the start.
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
        self._most = AHEAD * threads
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._numbers = count()
        self._waiting: dict[bool, deque[_Reading]] = {True: deque(), False: deque()}
        """Urgent, and others."""
        self._asked: dict[bool, dict[int, _Reading]] = {True: {}, False: {}}
        self._deaths = 0
        self._heard = 0.0
        """When it answered last, or was asked when it had nothing to do."""
        self._watch: asyncio.TimerHandle | None = None
        try:
            self._start()
        except OSError as error:
            raise self._gone(str(error)) from error

    def read(self, blocks: Blocks, *, urgent: bool, done: Callable[[Sums], None]) -> None:
        """Sum blocks up, those of one batch at most, and call `done` then."""
        request = Request(
            next(self._numbers),
            urgent,
            blocks.start,
            blocks.block_bytes,
            blocks.numbers.astype(np.int64).tobytes(),
            blocks.keys,
        )
        self._waiting[urgent].append(_Reading(request, done))
        self._ask()

    def close(self) -> None:
        """Nothing is read any more; what was not done is not."""
        self._end()
        for urgent in (True, False):
            self._waiting[urgent].clear()
            self._asked[urgent].clear()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number, module = str(theirs.fileno()), "kvferry.daemon.engine.reader"
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, number, *self._arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *self._descriptors),
                )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
        self._socket = ours
        self._loop.add_reader(ours.fileno(), self._hear)

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

    def _ask(self) -> None:
        if not any(self._asked.values()):
            self._heard = self._loop.time()
        for urgent, waiting in self._waiting.items():
            asked = self._asked[urgent]
            while waiting and len(asked) < self._most:
                request = waiting[0].request
                try:
                    self._socket.send(msgspec.msgpack.encode(request))
                except OSError:  # no room until it answers; or it is gone, and `_hear` is told
                    break
                asked[request.number] = waiting.popleft()
        if self._watch is None and any(self._asked.values()):
            self._watch = self._loop.call_later(PATIENCE, self._look)

    def _hear(self) -> None:
        try:
            data = self._socket.recv(MAX_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._replace("it ended")
            return
        self._deaths, self._heard = 0, self._loop.time()
        (number,) = NUMBER.unpack_from(data)
        read = [asked.pop(number) for asked in self._asked.values() if number in asked]
        self._ask()
        for reading in read:
            reading.done(np.frombuffer(data, np.uint64, offset=NUMBER.size))

    def _look(self) -> None:
        """It may hang."""
        self._watch = None
        if not any(self._asked.values()):
            return
        left = self._heard + PATIENCE - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            self._replace("it does not answer")

    def _replace(self, why: str) -> None:
        self._end()
        self._deaths += 1
        log.warning("the process that reads host blocks is replaced", reason=why)
        for urgent, asked in self._asked.items():
            self._waiting[urgent].extendleft(reversed(asked.values()))
            asked.clear()
        if self._deaths > MAX_DEATHS:
            self._failed(self._gone(f"{self._deaths} times, the last time {why}"))
            return
        try:
            self._start()
        except OSError as error:
            self._watch = self._loop.call_later(RETRY, self._replace, f"there is no other: {error}")
            return
        self._ask()

    def _gone(self, why: str) -> Failed:
        message = f"there is no process to read host blocks: {why}"
        return Failed(Code.COPY_FAILED, message, " ".join(self._arguments[:2]))
