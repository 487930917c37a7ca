"""The daemon's end of a tier: sends requests to its process and bounds what they may cost.

A request ends for its caller at its deadline at the latest. Until the process has answered it,
lookups and fetches are misses at once. A process that has not answered some time after a
deadline has failed: it is killed, reaped and started again. A circuit breaker turns a tier off that
fails; no request waits for its probes. Host blocks that were handed to the process are released
when it has answered, or when it was killed and reaped: until then it might write into them. Event
loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import structlog

from kvferry.daemon.processes import ChildProcess, ProcessDied
from kvferry.daemon.tier_config import TierConfig
from kvferry.daemon.tiers.base import Result, TierUsage
from kvferry.daemon.tiers.circuit_breaker import CircuitBreaker
from kvferry.daemon.tiers.messages import (
    FAILED,
    ContainsRequest,
    DropRequest,
    FetchRequest,
    LogLine,
    PutRequest,
    SettleRequest,
    Started,
    TierBlocks,
    UsageRequest,
    decode_answer,
    decode_epochs,
    decode_notice,
    decode_usage,
    encode,
)
from kvferry.daemon.tiers.tier_process import DEFAULT_TIMES, PoolFiles, TierTimes, tier_program

# Seconds for a put and for the usage: nobody waits for them, but if one takes longer, the tier is
# dead. Those of a put count from the last fetch or put that was answered: fetches overtake it.
PUT_SECONDS, USAGE_SECONDS = 10.0, 10.0
# Seconds for a probe.
PROBE_SECONDS = 1.0
# The part of a fetch's time in which reads begin. The rest is for those in progress, so that they
# count when others are late.
BEGIN_WITHIN = 0.75
# Seconds between two questions about the usage.
USAGE_EVERY = 1.0
# Of a lookup, by what the process answers: FAILED is the last.
LOOKUP_RESULTS = Result.MISS, Result.OK, Result.ERROR
Results: TypeAlias = Sequence[Result]
Checksums: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
# Ends with what became of the blocks, or with nothing if they were not sent; or with ProcessDied,
# once the process is reaped. One who awaits it and is cancelled does not learn that it ended.
Released: TypeAlias = asyncio.Future[Results]

log = structlog.get_logger()


class TierClient:
    """Requests of at most MAX_TIER_KEYS keys to one tier. The process starts at once.

    config: its section of the configuration. stores_in_use: returns the stores that engines use.
    started: called with the names of the stores that a new process has.

    counts: counters of TierStatus by field, since the start of the daemon.
    """

    def __init__(
        self,
        config: TierConfig,
        pool: PoolFiles,
        times: TierTimes = DEFAULT_TIMES,
        stores_in_use: Callable[[], Sequence[str]] = tuple,
        started: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        self.config, self._times = config, times
        self._stores_in_use, self._started = stores_in_use, started
        self.usage = TierUsage()
        self.counts = Counter[str]()
        # Why the process has ended; empty once it has started again.
        self.failure = ""
        # The reason in the log why no process starts: it is logged again if it changes.
        self._logged_reason = ""
        self.breaker = CircuitBreaker(
            time.monotonic, times.first_off, times.longest_off, self.counts
        )
        # The last lookup: a probe repeats it.
        self._last_lookup: tuple[str, Sequence[bytes]] = "", ()
        # Requests that were late, and drops, behind which lookups are answered; and when a fetch or
        # put was answered last.
        self._late: set[Released] = set()
        self._drops: set[Released] = set()
        self._moved = 0.0
        self._process = ChildProcess(
            tier_program(config, pool), times, self._handle_notice, self._note_death
        )
        with suppress(OSError):  # `run` tries again
            self._process.start()

    @property
    def is_started(self) -> bool:
        return self._process.is_ready

    @property
    def is_on(self) -> bool:
        """Whether the tier is in use."""
        return self._process.is_ready and self.breaker.state == "closed"

    @property
    def is_prompt(self) -> bool:
        """Whether a request can be answered now: the tier is in use, and neither late nor busy with
        a drop."""
        return self.is_on and all(reply.done() for reply in (*self._late, *self._drops))

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def in_flight(self) -> int:
        """Requests that the process has not answered."""
        return self._process.in_flight

    async def run(self) -> None:
        """Keep the process running, probe the tier while it is off, and ask for its usage.

        When it is cancelled, the process writes everything back and ends.
        """
        async with asyncio.TaskGroup() as flows:
            flows.create_task(self._process.run())
            flows.create_task(self._probe_when_off())
            flows.create_task(self._refresh_regularly())

    # Requests

    async def contains(self, store: str, keys: Sequence[bytes], seconds: float) -> Results:
        """Find out which keys the tier has: OK, MISS or ERROR, or LATE after `seconds`."""
        self._last_lookup = store, keys
        if not self.is_prompt:
            return [Result.MISS] * len(keys)
        reply = self._look_up(store, keys, self.breaker.record_error)
        ended = await self._wait(reply, seconds)
        if ended is Result.MISS:
            return [ended] * len(keys)
        results = [ended] * len(keys) if ended else reply.result()
        if Result.ERROR not in results:
            self.breaker.record_lookup(in_time=ended is None)
        return results

    async def fetch(self, blocks: TierBlocks, seconds: float) -> tuple[Results, Released]:
        """Read blocks into the pool within `seconds`. OK means that the checksum was compared.

        Returns the results, and a future that ends once the tier can no longer write into the
        blocks: see Released.
        """
        if not self.is_prompt:
            return self._refuse(blocks, Result.MISS)
        begin_before = time.monotonic() + BEGIN_WITHIN * seconds
        request = FetchRequest(blocks, begin_before)
        results, released = await self._move(blocks, request, seconds)
        fetched = results.count(Result.OK)
        self.counts["promoted"] += fetched
        self.counts["read_bytes"] += fetched * blocks.nbytes
        self.counts["checksum_failures"] += results.count(Result.CORRUPT)
        return results, released

    async def put(self, blocks: TierBlocks, checksums: Checksums) -> tuple[Results, Released]:
        """Write blocks of the pool. Returns the results, and when the tier no longer reads them."""
        if not self.is_on:
            return self._refuse(blocks, Result.FULL)
        sums = checksums.astype(np.uint64).tobytes()
        request = PutRequest(blocks, sums)
        results, released = await self._move(blocks, request, PUT_SECONDS, lambda: self._moved)
        written = results.count(Result.OK)
        self.counts["written"] += written
        self.counts["written_bytes"] += written * blocks.nbytes
        return results, released

    def drop(self, store: str, keys: Sequence[bytes] | None = None) -> Released:
        """Drop keys, or free the blocks of a store that is not used again. If the process ends
        before that, the next one names the store when it starts."""
        reply: Released = self._process.send(encode(DropRequest(store, keys)), lambda _: ())
        self._drops = {each for each in self._drops if not each.done()} | {reply}
        return reply

    async def settle(self, epochs: Mapping[str, int]) -> Mapping[str, int]:
        """See SharedTier.settle; nothing if the process is lost. A store that cannot be reached may
        take long."""
        with suppress(ProcessDied):
            return await self._process.send(encode(SettleRequest(epochs)), decode_epochs)
        return {}

    async def refresh_usage(self) -> None:
        """Ask for the usage, and replace `usage` by the answer."""
        request = encode(UsageRequest(tuple(self._stores_in_use())))
        await self._wait(self._process.send(request, self._receive_usage), USAGE_SECONDS)

    def _refuse(self, blocks: TierBlocks, result: Result) -> tuple[Results, Released]:
        released: Released = asyncio.get_running_loop().create_future()
        released.set_result(())
        return [result] * len(blocks.keys), released

    async def _move(
        self,
        blocks: TierBlocks,
        request: FetchRequest | PutRequest,
        seconds: float,
        progress: Callable[[], float] = lambda: 0.0,
    ) -> tuple[Results, Released]:
        released = self._process.send(encode(request), self._receive_moved)
        ended = await self._wait(released, seconds, progress)
        results = released.result() if ended is None else [ended] * len(blocks.keys)
        self.counts["errors"] += results.count(Result.ERROR)
        return results, released

    def _look_up(
        self,
        store: str,
        keys: Sequence[bytes],
        failed: Callable[[], None],
    ) -> Released:
        receive = partial(self._receive_found, failed)
        return self._process.send(encode(ContainsRequest(store, keys)), receive)

    async def _wait(
        self,
        reply: Released,
        seconds: float,
        progress: Callable[[], float] = lambda: 0.0,
    ) -> Result | None:
        """Wait for a reply; see ChildProcess.wait. None: it has arrived. LATE, or MISS if the
        process is lost. If it is late, the process is killed after the grace time."""
        if await self._process.wait(reply, seconds, progress):
            return None
        if not self._process.is_late(reply):
            return Result.MISS
        self._late = {each for each in self._late if not each.done()} | {reply}
        loop = asyncio.get_running_loop()
        loop.call_later(self._times.grace, self._kill_silent, reply)
        return Result.LATE

    def _kill_silent(self, reply: Released) -> None:
        self._process.read_arrived()
        if self._process.is_late(reply):
            log.warning("tier does not answer", tier=self.config.name)
            self._process.kill(f"no answer within {self._times.grace} s after a deadline")

    # Answers: what they change at once, before anything counts as late

    def _receive_found(self, failed: Callable[[], None], payload: bytes) -> Results:
        answer = decode_answer(payload)
        if errors := answer.results.count(FAILED):
            self.counts["errors"] += errors
            failed()
        return [LOOKUP_RESULTS[each] for each in answer.results]

    def _receive_moved(self, payload: bytes) -> Results:
        results = [Result(each) for each in decode_answer(payload).results]
        self._moved = time.monotonic()
        self._process.note_progress()
        for _ in range(results.count(Result.ERROR)):
            self.breaker.record_error()
        if Result.OK in results and Result.ERROR not in results:
            self.breaker.record_success()
        return results

    def _receive_usage(self, payload: bytes) -> Results:
        self.usage = decode_usage(payload)
        return ()

    # The process

    def _handle_notice(self, payload: bytes) -> None:
        match decode_notice(payload):
            case Started(usage, stores):
                self.usage, self.failure, self._logged_reason = usage, "", ""
                log.info("tier started", tier=self.config.name, keys=usage.keys)
                self._started(stores)
            case LogLine(level, event, fields, fatal):
                if fatal:
                    self.failure = str(fields.get("reason", event))
                    self.breaker.trip()
                if not fatal or self._is_new_reason(self.failure):
                    getattr(log, level, log.info)(event, tier=self.config.name, **fields)

    def _note_death(self, why: str) -> None:
        can_start = self._process.pid is not None  # else that says nothing about the tier
        if can_start:
            self.counts["deaths"] += 1
            self.failure = self.failure or why
            self.breaker.trip()
        if self._is_new_reason(self.failure if can_start else why):
            log.warning("tier process lost", tier=self.config.name, reason=why)

    def _is_new_reason(self, reason: str) -> bool:
        """Whether this reason why no process starts is not the one that was logged last."""
        is_new, self._logged_reason = reason != self._logged_reason, reason
        return is_new

    async def _probe_when_off(self) -> None:
        """Each time the breaker is half open, repeat the last lookup, once the process is ready."""
        while True:
            await self.breaker.until_half_open()
            await self._process.until_ready()
            if not self.breaker.begin_probe():
                continue
            reply = self._look_up(*self._last_lookup, lambda: None)
            ended = await self._wait(reply, PROBE_SECONDS)
            answered = ended is None and Result.ERROR not in reply.result()
            self.breaker.end_probe(answered)

    async def _refresh_regularly(self) -> None:
        while True:
            await self._process.until_ready()
            await self.refresh_usage()
            await asyncio.sleep(USAGE_EVERY)
