"""The process of a tier: runs its blocking code beside the daemon.

It maps the host pool and serves the daemon's requests (messages.py). The main thread answers
lookups and drops, in order; I/O threads fetch and put, in order of arrival, fetches first. One more
thread settles epochs and calls `maintain`. This process compares each fetched block with its
checksum. It ends when its socket is closed or the daemon dies.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
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
    SharedTier,
    Tier,
    TierUsage,
    block_checksum,
    missing_names,
)
from kvferry.daemon.tiers.block_memory import view_memory
from kvferry.daemon.tiers.messages import (
    FAILED,
    MAX_NAMED_STORES,
    Answer,
    ContainsRequest,
    DropRequest,
    FetchRequest,
    LogLine,
    PutRequest,
    SettleRequest,
    Started,
    TierArguments,
    TierRequest,
    UsageRequest,
    decode_request,
    encode,
)
from kvferry.daemon.tiers.pool_lock import lock_pool
from kvferry.proto.errors import Code, KVFerryError, Refused

# Added to the daemon's nice value: transfers of the GPU are more urgent.
NICER = 5
# Seconds between two calls of `maintain`.
MAINTAIN_EVERY = 1.0

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
    # Parts in progress, by store.
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
            self.running[job.request.blocks.store] += 1
            return job, part

    def end(self, store: str) -> None:
        with self.changed:
            self.running[store] -= 1
            self.changed.notify_all()

    def remove_store(self, store: str) -> list[tuple[_Job, slice]]:
        """Remove the parts of a store, and wait for those in progress."""
        with self.changed:
            removed = [
                each
                for each in (*self.fetches, *self.puts)
                if each[0].request.blocks.store == store
            ]
            for queue in (self.fetches, self.puts):
                kept = [each for each in queue if each not in removed]
                queue.clear()
                queue.extend(kept)
            while self.running[store]:
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
        # SettleRequests, which may wait for the network; None: the end.
        self._settles = SimpleQueue[tuple[int, Mapping[str, int]] | None]()
        self._usage = TierUsage()
        self._threads = [
            threading.Thread(target=self._move, daemon=True) for _ in range(tier.io_threads)
        ]
        self._maintainer = threading.Thread(target=self._maintain, daemon=True)

    def run(self, stores: Sequence[str]) -> None:
        """Serve until the daemon disconnects. stores: those that the tier has."""
        self._daemon.send(READY, encode(Started(self._refresh_usage(), stores)))
        for thread in (*self._threads, self._maintainer):
            thread.start()
        while (request := self._daemon.receive()) is not None:
            self._handle(request[0], decode_request(request[1]))
        self._settles.put(None)
        self._queue.close()
        for thread in (*self._threads, self._maintainer):
            thread.join()
        self._tier.close()

    def _handle(self, number: int, request: TierRequest) -> None:
        match request:
            case FetchRequest() | PutRequest():
                self._start(number, request)
            case UsageRequest(used):
                try:
                    self._tier.note_used(frozenset(used))
                except Exception as error:
                    self._report_exception("note_used", error)
                self._daemon.send(number, encode(self._refresh_usage()))
            case SettleRequest(epochs):
                self._settles.put((number, epochs))
            case ContainsRequest(store, keys):
                try:
                    present = self._tier.contains(store, keys)
                    _check_results("contains", present, keys)
                    found = Answer(bytes(map(bool, present)))
                except Exception as error:
                    self._report_exception("contains", error)
                    found = Answer(bytes([FAILED]) * len(keys))
                self._daemon.send(number, encode(found))
            case DropRequest(store, keys):
                if keys is None:
                    for job, part in self._queue.remove_store(store):
                        self._end_part(job, part, [Result.MISS] * (part.stop - part.start))
                try:
                    self._tier.drop(store, keys)
                except Exception as error:  # the blocks take room, but nobody asks for them
                    self._report_exception("drop", error)
                self._daemon.send(number, encode(Answer(b"")))

    def _settle(self, epochs: Mapping[str, int]) -> bytes:
        """The reply: the epochs that the tier has settled; none if it failed."""
        assert isinstance(self._tier, SharedTier)
        try:
            found = self._tier.settle(epochs)
            return encode({name: int(epoch) for name, epoch in found.items() if name in epochs})
        except Exception as error:
            self._report_exception("settle", error)
            return encode({})

    def _refresh_usage(self) -> TierUsage:
        """The usage; the one before if the tier cannot tell it now."""
        try:
            self._usage = self._tier.usage()
        except Exception as error:
            self._report_exception("usage", error)
        return self._usage

    def _start(self, number: int, request: FetchRequest | PutRequest) -> None:
        count = len(request.blocks.keys)
        offsets, checksums = array("q", request.blocks.offsets), array("Q")
        if isinstance(request, PutRequest):
            checksums.frombytes(request.checksums)
        job = _Job(number, request, offsets, checksums, bytearray(count), count)
        step = max(1, self._tier.call_bytes // request.blocks.nbytes)
        parts = [slice(at, min(at + step, count)) for at in range(0, count, step)]
        self._queue.add(job, parts)

    # I/O threads

    def _move(self) -> None:
        while (taken := self._queue.take()) is not None:
            job, part = taken
            request, named = job.request, job.request.blocks
            addresses = [self._address + offset for offset in job.offsets[part]]
            blocks = Blocks(named.store, named.keys[part], addresses, named.nbytes, named.model)
            results: Sequence[Result]
            try:
                if isinstance(request, FetchRequest):
                    results = self._fetch(blocks, request.deadline)
                else:
                    results = self._tier.put(blocks, job.checksums[part])
                    _check_results("put", results, blocks.keys)
                    results = [Result(each) for each in results]
            except Exception as error:
                self._report_exception(type(request).__name__, error)
                results = [Result.ERROR] * len(addresses)
            self._queue.end(named.store)
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
                result = Result.CORRUPT
            if result is Result.CORRUPT:
                self._tier.drop(blocks.store, [key])
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
        due = time.monotonic()
        while True:
            if time.monotonic() >= due:
                try:
                    self._tier.maintain()
                except Exception as error:
                    self._report_exception("maintain", error)
                due = time.monotonic() + MAINTAIN_EVERY
            try:
                settle = self._settles.get(timeout=max(0.0, due - time.monotonic()))
            except Empty:
                continue
            if settle is None:
                return
            self._daemon.send(settle[0], self._settle(settle[1]))

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
        check_tier(tier, given)
        stores = tuple(map(str, tier.stores()))[:MAX_NAMED_STORES]
    except Exception as error:  # a module may be anybody's
        fields = {"reason": _reason_of(error), "module": given.module}
        daemon.send(NOTICE, encode(LogLine("error", "tier cannot be opened", fields, fatal=True)))
        os._exit(2)
    TierWorker(tier, pool.address, daemon).run(stores)
    os._exit(0)


def check_tier(tier: object, given: TierArguments) -> None:
    """Raise Refused if the tier that a module has opened lacks something."""
    kind = SharedTier if given.is_shared else Tier
    if missing := missing_names(tier, kind):
        what, names = f"{type(tier).__name__} of {given.module}", ", ".join(missing)
        text = f"{what} lacks {names}; see {kind.__name__} in {kind.__module__}"
        raise Refused(Code.BAD_CONFIG, text, names)


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
