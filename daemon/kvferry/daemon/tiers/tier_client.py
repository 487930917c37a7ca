"""The daemon's end of a tier: sends requests to its process and bounds what they may cost.

A request ends for its caller at its deadline at the latest. Until the process has answered it,
lookups and fetches are misses at once. A process that has not answered some time after a
deadline has failed: it is killed, reaped and started again. A circuit breaker turns a tier off that
fails; no request waits for its probes. Host blocks that were handed to the process are released
when it has answered, or when it was killed and reaped: until then it might write into them. Event
loop only; callbacks run there, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import structlog

from kvferry.daemon.tiers.base import Result, TierUsage, without_part
from kvferry.daemon.tiers.circuit_breaker import CircuitBreaker
from kvferry.daemon.tiers.messages import (
    FAILED,
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
from kvferry.daemon.tiers.tier_blocks import Checksums, TierBlocks, check_count
from kvferry.daemon.tiers.tier_process import PoolFiles, TierProcess, TierSpec

# Seconds for a put and a drop: nobody waits for them, but one that takes longer shows a dead tier.
# Those of a put count from the last fetch or put that was answered: fetches overtake it.
PUT_SECONDS, DROP_SECONDS = 10.0, 10.0
# Seconds for a probe.
PROBE_SECONDS = 1.0
# The part of a fetch's time in which reads begin. The rest is for those in progress, so that they
# count when others are late.
BEGIN_WITHIN = 0.75
# Seconds between two questions about the usage.
USAGE_EVERY = 1.0
# Of a lookup, by what the process answers: FAILED is the last.
LOOKUP_RESULTS = Result.MISS, Result.OK, Result.ERROR
Done = Callable[[Sequence[Result]], None]
# Called with what became of the blocks; empty if the process did not answer.
Released = Callable[[Sequence[Result]], None]

log = structlog.get_logger()


def nothing(*_: object) -> None:
    """A callback that does nothing."""


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
    """A request without an answer. done: None once it has ended for the caller. probe: whether it
    is one of the breaker. late: whether its deadline has passed."""

    request: TierRequest
    keys: int
    done: Done | None
    released: Released = nothing
    probe: bool = False
    timer: asyncio.TimerHandle | None = None
    late: bool = False


class TierClient:
    """Requests of at most MAX_KEYS keys to one tier. The process starts at once."""

    def __init__(self, spec: TierSpec, pool: PoolFiles) -> None:
        self.spec = spec
        self.usage = TierUsage()
        self.counters = TierCounters()
        # Why the process has ended; empty once it has started again.
        self.failure = ""
        self._loop = asyncio.get_running_loop()
        times = spec.times
        self.breaker = CircuitBreaker(
            time.monotonic, self._probe_after, times.first_off, times.longest_off
        )
        self._numbers = count(1)
        self._pending: dict[int, _Pending] = {}
        # Requests in `_pending` that are late.
        self._late = 0
        # When a fetch or put was answered last.
        self._moved = 0.0
        # Drops that the process has not confirmed; repeated first thing after a restart.
        self._drops: dict[int, _Pending] = {}
        # Returns the namespaces in the pool, see UsageRequest.
        self.namespaces: Callable[[], dict[str, str]] = dict
        # Of each namespace its generation, as far as known; see tiers/__init__.py.
        self._generations: dict[str, int] = {}
        # Called with the name of a namespace that another daemon has dropped.
        self.dropped_elsewhere: Callable[[str], None] = nothing
        # The last lookup: a probe repeats it.
        self._last_lookup: tuple[str, Sequence[bytes]] | None = None
        self._started = self._closed = False
        self._usage_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._process = TierProcess(spec, pool, self._handle, self._lose, self._release_all)
        self._process.start()

    @property
    def is_started(self) -> bool:
        return self._started

    @property
    def is_on(self) -> bool:
        """Whether the tier is in use."""
        return self._started and not self._closed and self.breaker.state == "closed"

    @property
    def is_prompt(self) -> bool:
        """Whether a request can be answered now: the tier is in use, and neither late nor busy with
        a drop."""
        return self.is_on and not self._late and not self._drops

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def in_flight(self) -> int:
        """Requests that the process has not answered."""
        return len(self._pending)

    def contains(self, namespace: str, keys: Sequence[bytes], seconds: float, done: Done) -> None:
        """Find out which keys the tier has: OK, MISS or ERROR, or LATE after `seconds`."""
        check_count(keys)
        self._last_lookup = namespace, keys
        if not self.is_prompt:
            self._loop.call_soon(done, [Result.MISS] * len(keys))
            return
        request = ContainsRequest(next(self._numbers), namespace, keys)
        self._submit(request, _Pending(request, len(keys), done), seconds)

    def fetch(
        self, blocks: TierBlocks, seconds: float, done: Done, released: Released = nothing
    ) -> None:
        """Read blocks into the pool within `seconds`. OK means that the checksum was compared.

        released: called once the tier cannot write into the blocks any more; never before `done`.
        """
        if not self.is_prompt:
            self._refuse(blocks, Result.MISS, done, released)
            return
        begin_before = time.monotonic() + BEGIN_WITHIN * seconds
        request = FetchRequest(next(self._numbers), *blocks.fields(), begin_before)
        self._submit(request, _Pending(request, len(blocks.keys), done, released), seconds)

    def put(
        self,
        blocks: TierBlocks,
        checksums: Checksums,
        done: Done,
        released: Released = nothing,
    ) -> None:
        """Write blocks of the pool. released: called once the tier cannot read them any more."""
        if not self.is_on:
            self._refuse(blocks, Result.FULL, done, released)
            return
        sums = checksums.astype(np.uint64).tobytes()
        generation = self._generations.get(without_part(blocks.namespace), -1)
        request = PutRequest(next(self._numbers), *blocks.fields(), sums, generation, blocks.model)
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
        pending = _Pending(request, 0, lambda _: done())
        self._drops[request.number] = pending
        if self._started:
            self._submit(request, pending, DROP_SECONDS)

    def refresh_usage(self) -> None:
        """Ask for the usage; `usage` is replaced when the answer arrives."""
        if self._started and not self._closed:
            request = UsageRequest(next(self._numbers), self.namespaces())
            self._submit(request, _Pending(request, 0, nothing), DROP_SECONDS)

    async def close(self) -> None:
        """End the process once it has written everything back."""
        self._closed = True
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._lose("the daemon is stopping")
        await self._process.close()

    # Requests

    def _refuse(self, blocks: TierBlocks, result: Result, done: Done, released: Released) -> None:
        self._loop.call_soon(done, [result] * len(blocks.keys))
        self._loop.call_soon(released, ())

    def _submit(self, request: TierRequest, pending: _Pending, seconds: float) -> None:
        self._pending[request.number] = pending
        pending.timer = self._loop.call_later(seconds, self._miss_deadline, request.number)
        self._process.send(request)

    def _miss_deadline(self, number: int) -> None:
        pending = self._pending[number]
        self._process.read_arrived()
        if not self._is_unanswered(pending):
            return
        left = self._moved + PUT_SECONDS - time.monotonic()
        if isinstance(pending.request, PutRequest) and left > 0:
            pending.timer = self._loop.call_later(left, self._miss_deadline, number)
            return
        pending.late = True
        self._late += 1
        pending.timer = self._loop.call_later(self.spec.times.grace, self._kill_silent, pending)
        if number not in self._drops:
            self._finish(pending, [Result.LATE] * pending.keys)
        if pending.probe:
            self.breaker.end_probe(answered=False)
        elif isinstance(pending.request, ContainsRequest):
            self.breaker.record_lookup(in_time=False)

    def _is_unanswered(self, pending: _Pending) -> bool:
        """Whether the process may still answer this request."""
        return self._started and self._pending.get(pending.request.number) is pending

    def _kill_silent(self, pending: _Pending) -> None:
        self._process.read_arrived()
        if not self._is_unanswered(pending):
            return
        kind = type(pending.request).__name__
        log.warning("tier does not answer", tier=self.spec.name, request=kind)
        self._process.kill(f"no answer within {self.spec.times.grace} s after a deadline")

    def _lose(self, why: str) -> None:
        """The process is lost, or is about to end. Everything pending is a miss."""
        self._started, self._late = False, 0
        if self._usage_timer is not None:
            self._usage_timer.cancel()
        for number, pending in tuple(self._pending.items()):
            if pending.timer is not None:
                pending.timer.cancel()
            if number not in self._drops:
                self._finish(pending, [Result.MISS] * pending.keys)
        if not self._closed:
            log.warning("tier process lost", tier=self.spec.name, reason=why)
            self.counters.deaths += 1
            self.failure = self.failure or why
            self.breaker.trip()

    def _release_all(self) -> None:
        """The process is dead: nothing that it began can write into the pool any more."""
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.released(())

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
            case Answer(number, results, generation):
                self._end_request(number, results, generation)
            case UsageAnswer(number, usage, generations):
                self.usage = usage
                for name, generation in generations.items():
                    self._note_generation(name, generation)
                self._end_request(number, b"", -1)
            case Started(usage):
                self.usage, self._started, self.failure = usage, True, ""
                self._process.note_started()
                log.info("tier started", tier=self.spec.name, keys=usage.keys)
                for number, pending in tuple(self._drops.items()):
                    if number not in self._pending:
                        self._submit(pending.request, pending, DROP_SECONDS)
                self._probe()
                self._refresh_regularly()
            case LogLine(level, event, fields, fatal):
                getattr(log, level, log.info)(event, tier=self.spec.name, **fields)
                if fatal:
                    self.failure = str(fields.get("reason", event))
                    self.breaker.trip()

    def _end_request(self, number: int, results: bytes, generation: int) -> None:
        pending = self._pending.pop(number)
        self._drops.pop(number, None)
        if pending.timer is not None:
            pending.timer.cancel()
        self._late -= pending.late
        request, answer = pending.request, [Result(each) for each in results]
        if isinstance(request, ContainsRequest):
            answer = [LOOKUP_RESULTS[each] for each in results]
            failed = results.count(FAILED)
            self.counters.results["fetch"][Result.ERROR] += failed
            if pending.probe:
                self.breaker.end_probe(answered=not failed)
            elif failed:
                self.breaker.record_error()
            elif not pending.late:
                self.breaker.record_lookup(in_time=True)
            if self._note_generation(request.namespace, generation):
                answer = [Result.MISS] * len(answer)
        elif isinstance(request, DropRequest):
            self._note_generation(request.namespace, generation, own=True)
        elif isinstance(request, FetchRequest | PutRequest):
            self._moved = time.monotonic()
            self._process.note_progress()
            for _ in range(results.count(Result.ERROR)):
                self.breaker.record_error()
            if Result.OK in answer and Result.ERROR not in answer:
                self.breaker.record_success()
        self._finish(pending, answer)
        pending.released(answer)

    def _note_generation(self, namespace: str, generation: int, *, own: bool = False) -> bool:
        """Returns whether it has changed. own: by a drop of this daemon."""
        if generation < 0:
            return False
        name = without_part(namespace)
        known = self._generations.get(name, generation)
        self._generations[name] = generation
        if generation != known and not own:
            self.dropped_elsewhere(name)
        return generation != known

    # Probes

    def _probe_after(self, seconds: float) -> None:
        """The breaker has opened."""
        self._probe_timer = self._loop.call_later(seconds, self._probe_soon)

    def _probe_soon(self) -> None:
        """Probe once the breaker is half open: the timer may be early by some milliseconds."""
        if self.breaker.state == "open":
            self._probe_after(0.01)
        else:
            self._probe()

    def _probe(self) -> None:
        """Repeat the last lookup, if the breaker is half open. A process that is restarted is
        probed once it has started."""
        if self._closed or not self._started or not self.breaker.begin_probe():
            return
        namespace, keys = self._last_lookup or ("", ())
        request = ContainsRequest(next(self._numbers), namespace, keys)
        self._submit(request, _Pending(request, len(keys), nothing, probe=True), PROBE_SECONDS)

    def _refresh_regularly(self) -> None:
        self.refresh_usage()
        self._usage_timer = self._loop.call_later(USAGE_EVERY, self._refresh_regularly)
