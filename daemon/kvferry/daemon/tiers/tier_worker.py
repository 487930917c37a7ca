"""The process of a tier: runs its blocking code beside the daemon.

It maps the host pool and serves the daemon's requests (messages.py). The main thread answers
lookups and drops, in order; I/O threads fetch and put, in order of arrival, fetches first. What is
fetched is compared with its checksum here. The process ends when its socket is closed or the daemon
dies.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from kvferry.daemon.daemon_connection import (
    NOTICE,
    READY,
    DaemonConnection,
    connect_to_daemon,
)
from kvferry.daemon.memory.shared_memory import MappedFiles
from kvferry.daemon.tiers.base import (
    Blocks,
    Result,
    Tier,
    TierUsage,
    block_checksum,
    is_part_of,
)
from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.daemon.tiers.messages import (
    FAILED,
    Answer,
    ContainsRequest,
    DropRequest,
    FetchRequest,
    LogLine,
    PutRequest,
    Started,
    TierArguments,
    TierRequest,
    UsageAnswer,
    UsageRequest,
    decode_request,
    encode,
)
from kvferry.daemon.tiers.pool_lock import lock_pool
from kvferry.proto.errors import KVFerryError

# Added to the daemon's nice value: transfers of the GPU are more urgent.
NICER = 5
# Seconds between two calls of `maintain`.
MAINTAIN_EVERY = 1.0
# Threads of a tier that does not say how many it wants, and bytes that one call of it moves.
IO_THREADS, CALL_BYTES = 4, 4 << 20

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _Job:
    """A fetch or a put that is not answered yet. number: of the request."""

    number: int
    request: FetchRequest | PutRequest
    offsets: array[int]
    checksums: array[int]
    results: bytearray
    left: int


@dataclass(eq=False, slots=True)
class _Queue:
    """Parts of jobs for the I/O threads."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    fetches: deque[tuple[_Job, slice]] = field(default_factory=deque)
    puts: deque[tuple[_Job, slice]] = field(default_factory=deque)
    # Parts in progress, by namespace.
    running: Counter[str] = field(default_factory=Counter)
    closed: bool = False

    def add(self, job: _Job, parts: Sequence[slice]) -> None:
        with self.changed:
            queue = self.fetches if isinstance(job.request, FetchRequest) else self.puts
            queue.extend((job, part) for part in parts)
            self.changed.notify(len(parts))

    def take(self) -> tuple[_Job, slice] | None:
        """The next part; None once closed."""
        with self.changed:
            while not (self.fetches or self.puts or self.closed):
                self.changed.wait()
            if self.closed:
                return None
            job, part = (self.fetches or self.puts).popleft()
            self.running[job.request.blocks.namespace] += 1
            return job, part

    def end(self, namespace: str) -> None:
        with self.changed:
            self.running[namespace] -= 1
            self.changed.notify_all()

    def remove_namespace(self, namespace: str) -> list[tuple[_Job, slice]]:
        """Remove a namespace's parts, and wait for those in progress."""
        with self.changed:
            removed = [
                each
                for each in (*self.fetches, *self.puts)
                if is_part_of(each[0].request.blocks.namespace, namespace)
            ]
            for queue in (self.fetches, self.puts):
                kept = [each for each in queue if each not in removed]
                queue.clear()
                queue.extend(kept)
            while any(self.running[name] for name in self.running if is_part_of(name, namespace)):
                self.changed.wait()
        return removed

    def close(self) -> None:
        """End the I/O threads once they have ended the parts in progress."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class TierWorker:
    """Serves requests about one tier. address: of the host pool in this process."""

    def __init__(self, tier: Tier, address: int, daemon: DaemonConnection) -> None:
        self._tier, self._address, self._daemon = tier, address, daemon
        self._queue = _Queue()
        self._jobs = threading.Lock()
        self._ending = threading.Event()
        self._usage = TierUsage()
        self._call_bytes = getattr(tier, "call_bytes", CALL_BYTES)
        self._unequal = getattr(tier, "unequal", Result.CORRUPT)
        count = getattr(tier, "io_threads", IO_THREADS)
        self._threads = [threading.Thread(target=self._move, daemon=True) for _ in range(count)]
        self._maintainer = threading.Thread(target=self._maintain, daemon=True)

    def run(self) -> None:
        """Serve until the daemon disconnects."""
        self._daemon.send(READY, encode(Started(self._refresh_usage())))
        for thread in (*self._threads, self._maintainer):
            thread.start()
        while (request := self._daemon.receive()) is not None:
            self._handle(request[0], decode_request(request[1]))
        self._ending.set()
        self._queue.close()
        for thread in (*self._threads, self._maintainer):
            thread.join()
        self._tier.close()

    def _handle(self, number: int, request: TierRequest) -> None:
        match request:
            case FetchRequest() | PutRequest():
                self._start(number, request)
            case UsageRequest(namespaces):
                generations = {name: self._generation_of(name) for name in namespaces}
                if note_used := getattr(self._tier, "note_used", None):
                    note_used(frozenset(filter(None, namespaces.values())))
                answer = UsageAnswer(self._refresh_usage(), generations)
                self._daemon.send(number, encode(answer))
            case ContainsRequest(namespace, keys):
                try:
                    present = self._tier.contains(namespace, keys)
                    _check_results("contains", present, keys)
                    generation = self._generation_of(namespace)
                    found = Answer(bytes(map(bool, present)), generation)
                except Exception as error:
                    self._report_exception("contains", error)
                    found = Answer(bytes([FAILED]) * len(keys))
                self._daemon.send(number, encode(found))
            case DropRequest(namespace, keys):
                if keys is None:
                    for job, part in self._queue.remove_namespace(namespace):
                        self._end_part(job, part, [Result.MISS] * (part.stop - part.start))
                try:
                    self._tier.drop(namespace, keys)
                except Exception as error:
                    self._end_after_drop(namespace, error)
                else:
                    dropped = Answer(b"", self._generation_of(namespace))
                    self._daemon.send(number, encode(dropped))

    def _generation_of(self, namespace: str) -> int:
        ask = getattr(self._tier, "generation", None)
        if ask is None:
            return -1
        return int(ask(namespace))

    def _refresh_usage(self) -> TierUsage:
        """The usage; the one before if the tier cannot say it now."""
        try:
            self._usage = self._tier.usage()
        except Exception as error:
            self._report_exception("usage", error)
        return self._usage

    def _end_after_drop(self, namespace: str, error: Exception) -> None:
        """A drop has failed, and its keys must not be found again: send no answer from now on."""
        log.warning(
            "drop failed; it is repeated when the tier's process has restarted",
            namespace=namespace,
            reason=_reason_of(error),
        )
        self._daemon.close()

    def _start(self, number: int, request: FetchRequest | PutRequest) -> None:
        count = len(request.blocks.keys)
        offsets, checksums = array("q", request.blocks.offsets), array("Q")
        if isinstance(request, PutRequest):
            checksums.frombytes(request.checksums)
        job = _Job(number, request, offsets, checksums, bytearray(count), count)
        step = max(1, self._call_bytes // request.blocks.nbytes)
        parts = [slice(at, min(at + step, count)) for at in range(0, count, step)]
        self._queue.add(job, parts)

    # I/O threads

    def _move(self) -> None:
        while (taken := self._queue.take()) is not None:
            job, part = taken
            request, named = job.request, job.request.blocks
            addresses = [self._address + offset for offset in job.offsets[part]]
            blocks = Blocks(named.namespace, named.keys[part], addresses, named.nbytes)
            results: Sequence[Result]
            try:
                if isinstance(request, FetchRequest):
                    results = self._fetch(blocks, request.deadline)
                else:
                    blocks = blocks._replace(generation=request.generation, model=named.model)
                    results = self._tier.put(blocks, job.checksums[part])
                    _check_results("put", results, blocks.keys)
                    results = [Result(each) for each in results]
            except Exception as error:
                self._report_exception(type(request).__name__, error)
                results = [Result.ERROR] * len(addresses)
            self._queue.end(named.namespace)
            self._end_part(job, part, results)

    def _fetch(self, blocks: Blocks, deadline: float) -> list[Result]:
        if time.monotonic() >= deadline:
            return [Result.LATE] * len(blocks.keys)
        fetched = self._tier.fetch(blocks, deadline)
        _check_results("fetch", fetched, blocks.keys)
        results = []
        for key, address, found in zip(blocks.keys, blocks.addresses, fetched, strict=True):
            result = Result(found.result)
            if result is Result.OK and found.checksum != block_checksum(
                key, view_memory(address, blocks.nbytes)
            ):
                result = self._unequal
                self._tier.drop(blocks.namespace, [key])
            results.append(result)
        return results

    def _end_part(self, job: _Job, part: slice, results: Sequence[Result]) -> None:
        with self._jobs:
            job.results[part] = bytes(results)
            job.left -= len(results)
            complete = job.left == 0
        if complete:
            self._daemon.send(job.number, encode(Answer(bytes(job.results))))

    def _maintain(self) -> None:
        while True:
            try:
                self._tier.maintain()
            except Exception as error:
                self._report_exception("maintain", error)
            if self._ending.wait(MAINTAIN_EVERY):
                return

    def _report_exception(self, what: str, error: Exception) -> None:
        log.error("tier failed", operation=what, error=_reason_of(error))


def log_to(daemon: DaemonConnection) -> None:
    """Send this process's log to the daemon."""

    def send(_: Any, level: str, fields: Any) -> Any:
        event = str(fields.pop("event"))
        text = {key: str(value)[:2000] for key, value in fields.items()}
        daemon.send(NOTICE, encode(LogLine(level, event, text)))
        raise structlog.DropEvent

    structlog.configure(processors=[send])


def main() -> None:
    daemon, arguments = connect_to_daemon(NICER)
    given = msgspec.json.decode(arguments[0], type=TierArguments)
    log_to(daemon)
    lock_pool(given.chunks[0])
    pool = MappedFiles("", given.pool_bytes, given.chunk_bytes, given.chunks)
    for descriptor in given.chunks:
        os.close(descriptor)
    try:
        tier: Tier = importlib.import_module(given.module).open_tier(given.options, pool)
    except Exception as error:  # a module may be anybody's
        fields = {"reason": _reason_of(error), "module": given.module}
        daemon.send(NOTICE, encode(LogLine("error", "tier cannot be opened", fields, fatal=True)))
        os._exit(2)
    TierWorker(tier, pool.address, daemon).run()
    os._exit(0)


def _check_results(call: str, results: Sequence[object], keys: Sequence[bytes]) -> None:
    """Raise ValueError unless a tier has returned one result for each key."""
    if len(results) != len(keys):
        message = f"{call} has returned {len(results)} results for {len(keys)} keys"
        raise ValueError(f"{message}; return one for each key, in their order")


def _reason_of(error: Exception) -> str:
    """The text of an error, for an operator; its traceback if the tier's code is at fault.
    Called while the error is handled."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; install it in the environment of kvferryd"
    known = isinstance(error, KVFerryError | OSError | ImportError | msgspec.ValidationError)
    return str(error) if known else traceback.format_exc(limit=-4)


if __name__ == "__main__":
    main()
