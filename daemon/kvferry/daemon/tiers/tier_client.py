"""The daemon's end of a tier: sends requests to its process and bounds what they may cost.

A request ends at its deadline at the latest. If the tier fails, the circuit breaker turns it off,
and requests end as misses at once. Host blocks that were handed to the process are released when it
has answered, or when it was killed and reaped: until then it might write into them. Event loop
only; callbacks run there, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import structlog

from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.tiers.base import Result, TierUsage
from kvferry.daemon.tiers.circuit_breaker import CircuitBreaker
from kvferry.daemon.tiers.messages import (
    FAILED,
    MAX_KEYS,
    Answer,
    ContainsRequest,
    DropRequest,
    FetchRequest,
    LogLine,
    PutRequest,
    Started,
    TierReply,
    TierRequest,
    UsageAnswer,
    UsageRequest,
)
from kvferry.daemon.tiers.tier_process import PoolFiles, TierProcess, TierSpec

# Seconds for a put and a drop: nobody waits for them, but one that takes longer shows a dead tier.
PUT_SECONDS, DROP_SECONDS = 10.0, 10.0
# Seconds after a missed deadline until the process is killed, if it has not answered by then.
KILL_AFTER = 1.0
# Seconds between two questions about the usage.
USAGE_EVERY = 1.0
Done = Callable[[Sequence[Result]], None]

log = structlog.get_logger()


def nothing(*_: object) -> None:
    """A callback that does nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class TierBlocks:
    """Host blocks of one namespace: their keys, and the offset of each in the pool in bytes."""

    namespace: str
    keys: Sequence[bytes]
    offsets: Int64s
    nbytes: int


@dataclass(slots=True)
class TierCounters:
    """Keys and bytes since the start of the daemon."""

    results: dict[str, dict[Result, int]] = field(
        default_factory=lambda: {kind: dict.fromkeys(Result, 0) for kind in ("fetch", "put")}
    )
    read_bytes: int = 0
    written_bytes: int = 0
    deaths: int = 0


@dataclass(eq=False, slots=True)
class _Pending:
    """A request without an answer. done: None once it has ended for the caller."""

    request: TierRequest
    keys: int
    done: Done | None
    released: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


class TierClient:
    """Requests of at most MAX_KEYS keys to one tier. The process starts at once."""

    def __init__(self, spec: TierSpec, pool: PoolFiles) -> None:
        self.spec = spec
        self.usage = TierUsage()
        self.counters = TierCounters()
        self._loop = asyncio.get_running_loop()
        self.breaker = CircuitBreaker(time.monotonic)
        self._numbers = count(1)
        self._pending: dict[int, _Pending] = {}
        # Drops that the process has not confirmed; repeated first thing after a restart.
        self._drops: dict[int, _Pending] = {}
        self._started = self._closed = False
        self._usage_timer: asyncio.TimerHandle | None = None
        self._process = TierProcess(spec, pool, self._handle, self._lose, self._release_all)
        self._process.start()

    @property
    def is_on(self) -> bool:
        """Whether a request would be sent now, be it as a probe."""
        return self._started and not self._closed and self.breaker.state != "open"

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def in_flight(self) -> int:
        """Requests that the process has not answered."""
        return len(self._pending)

    def contains(self, namespace: str, keys: Sequence[bytes], seconds: float, done: Done) -> None:
        """Find out which keys the tier has: OK or MISS, or LATE after `seconds`."""
        _check_count(keys)
        if not self.is_on:
            self._end_soon(done, Result.MISS, len(keys))
            return
        request = ContainsRequest(next(self._numbers), namespace, keys)
        self._submit(request, _Pending(request, len(keys), done, nothing), seconds)

    def fetch(
        self,
        blocks: TierBlocks,
        seconds: float,
        done: Done,
        released: Callable[[], None] = nothing,
    ) -> None:
        """Read blocks into the pool within `seconds`. OK means that the checksum was compared.

        released: called once the tier cannot write into the blocks any more; never before `done`.
        """
        if not self._admit(blocks.keys):
            self._end_soon(done, Result.MISS, len(blocks.keys), released)
            return
        request = FetchRequest(
            next(self._numbers),
            blocks.namespace,
            blocks.keys,
            blocks.offsets.astype(np.int64).tobytes(),
            blocks.nbytes,
            time.monotonic() + seconds,
        )
        self._submit(request, _Pending(request, len(blocks.keys), done, released), seconds)

    def put(
        self,
        blocks: TierBlocks,
        checksums: np.ndarray[Any, np.dtype[np.uint64]],
        done: Done,
        released: Callable[[], None] = nothing,
    ) -> None:
        """Write blocks of the pool. released: called once the tier cannot read them any more."""
        if not self._admit(blocks.keys):
            self._end_soon(done, Result.FULL, len(blocks.keys), released)
            return
        request = PutRequest(
            next(self._numbers),
            blocks.namespace,
            blocks.keys,
            blocks.offsets.astype(np.int64).tobytes(),
            blocks.nbytes,
            checksums.astype(np.uint64).tobytes(),
        )
        self._submit(request, _Pending(request, len(blocks.keys), done, released), PUT_SECONDS)

    def drop(
        self,
        namespace: str,
        keys: Sequence[bytes] | None = None,
        done: Callable[[], None] = nothing,
    ) -> None:
        """Drop keys, or all keys of a namespace, also if the tier is off.

        done: called when the tier has confirmed it. No request that follows finds these keys.
        """
        request = DropRequest(next(self._numbers), namespace, keys)
        pending = _Pending(request, 0, lambda _: done(), nothing)
        self._drops[request.number] = pending
        if self._started:
            self._submit(request, pending, DROP_SECONDS)

    async def close(self) -> None:
        """End the process once it has written everything back."""
        self._closed = True
        self._lose("the daemon is stopping")
        await self._process.close()

    # Requests

    def _admit(self, keys: Sequence[bytes]) -> bool:
        _check_count(keys)
        return self._started and not self._closed and self.breaker.admit()

    def _end_soon(
        self, done: Done, result: Result, keys: int, released: Callable[[], None] = nothing
    ) -> None:
        self._loop.call_soon(done, [result] * keys)
        self._loop.call_soon(released)

    def _submit(self, request: TierRequest, pending: _Pending, seconds: float) -> None:
        self._pending[request.number] = pending
        pending.timer = self._loop.call_later(seconds, self._miss_deadline, request.number)
        self._process.send(request)

    def _miss_deadline(self, number: int) -> None:
        kind = type(self._pending[number].request).__name__
        log.warning("tier missed a deadline", tier=self.spec.name, request=kind)
        self.breaker.trip()
        self._end_all(Result.LATE)
        for pending in self._pending.values():
            if pending.timer is not None:
                pending.timer.cancel()
            pending.timer = self._loop.call_later(KILL_AFTER, self._kill)

    def _kill(self) -> None:
        self._process.kill(f"no answer within {KILL_AFTER} s after a deadline")

    def _lose(self, why: str) -> None:
        """The process is lost, or is about to end. Everything pending is a miss."""
        self._started = False
        if self._usage_timer is not None:
            self._usage_timer.cancel()
        for pending in self._pending.values():
            if pending.timer is not None:
                pending.timer.cancel()
        self._end_all(Result.MISS)
        if not self._closed:
            log.warning("tier process lost", tier=self.spec.name, reason=why)
            self.counters.deaths += 1
            self.breaker.trip()

    def _release_all(self) -> None:
        """The process is dead: nothing that it began can write into the pool any more."""
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.released()

    def _end_all(self, result: Result) -> None:
        """End all requests for their callers; drops stay."""
        for number, pending in tuple(self._pending.items()):
            if number not in self._drops:
                self._finish(pending, [result] * pending.keys)

    def _finish(self, pending: _Pending, results: Sequence[Result]) -> None:
        done, pending.done = pending.done, None
        if done is None:
            return
        request = pending.request
        if isinstance(request, FetchRequest | PutRequest):
            kind = "fetch" if isinstance(request, FetchRequest) else "put"
            counted = self.counters.results[kind]
            for result in results:
                counted[result] += 1
            moved = request.block_bytes * sum(result is Result.OK for result in results)
            if kind == "fetch":
                self.counters.read_bytes += moved
            else:
                self.counters.written_bytes += moved
        done(results)

    # Answers

    def _handle(self, reply: TierReply) -> None:
        match reply:
            case Answer(number, results):
                self._end_request(number, results)
            case UsageAnswer(number, usage):
                self.usage = usage
                self._end_request(number, b"")
            case Started(usage):
                self.usage, self._started = usage, True
                log.info("tier started", tier=self.spec.name, keys=usage.keys)
                for number, pending in tuple(self._drops.items()):
                    if number not in self._pending:
                        self._submit(pending.request, pending, DROP_SECONDS)
                self._refresh_regularly()
            case LogLine(level, event, fields, fatal):
                getattr(log, level, log.info)(event, tier=self.spec.name, **fields)
                if fatal:
                    self.breaker.trip()

    def _end_request(self, number: int, results: bytes) -> None:
        pending = self._pending.pop(number)
        self._drops.pop(number, None)
        if pending.timer is not None:
            pending.timer.cancel()
        request = pending.request
        if isinstance(request, ContainsRequest):
            if failed := results.count(FAILED):
                self.counters.results["fetch"][Result.ERROR] += failed
                self.breaker.record_error()
            self._finish(pending, [Result.OK if each == 1 else Result.MISS for each in results])
        else:
            if isinstance(request, FetchRequest | PutRequest):
                self._process.note_progress()
                if pending.done is not None:
                    self._judge(results)
            self._finish(pending, [Result(each) for each in results])
        pending.released()

    def _judge(self, results: bytes) -> None:
        """Tell the breaker. A read that was not begun in time says nothing about the tier."""
        errors = results.count(Result.ERROR)
        for _ in range(errors):
            self.breaker.record_error()
        if results.count(Result.LATE) == len(results):
            self.breaker.end_probe()
        elif not errors:
            self.breaker.record_success()

    def refresh_usage(self) -> None:
        """Ask for the usage; `usage` is replaced when the answer arrives."""
        if self._started and not self._closed:
            request = UsageRequest(next(self._numbers))
            self._submit(request, _Pending(request, 0, nothing, nothing), DROP_SECONDS)

    def _refresh_regularly(self) -> None:
        self.refresh_usage()
        self._usage_timer = self._loop.call_later(USAGE_EVERY, self._refresh_regularly)


def _check_count(keys: Sequence[bytes]) -> None:
    if not 0 < len(keys) <= MAX_KEYS:
        raise ValueError(f"{len(keys)} keys in one request; give 1 to {MAX_KEYS}")
