"""A trace of real requests, replayed through clients, a daemon and its engine.

A trace has the form of Mooncake's published traces: JSON lines, and each request has `hash_ids`,
one per block of its prompt. An id stands for the block's tokens and all tokens before them. Time is
compressed: a client starts the next request as soon as the last one is done. Like a scheduler, it
looks up its blocks until the first miss, loads that prefix, computes the rest (here: writes the
content that belongs to the id), and stores the missing blocks. Every loaded block is compared with
the content that belongs to its id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    Refused,
    TensorLayout,
    TensorRef,
    TransferResult,
    TransferSpec,
    offload_key,
)
from support.time_limits import TIMEOUT

# Bytes of a block: enough to distinguish blocks.
PAGE = 512
# Factor between ids and contents.
MULTIPLIER = np.int64(0x9E3779B97F4A7C15 - (1 << 64))

# Yields when it has to wait. `next` continues it.
Steps: TypeAlias = Generator[None, None, Any]


@dataclass
class ReplayOutcome:
    """Counts of a replayed trace.

    blocks: of all requests. hits: those loaded. lost: loads refused, as a key was evicted.
    """

    policy: str
    capacity: int
    clients: int
    requests: int = 0
    blocks: int = 0
    hits: int = 0
    stored: int = 0
    wrong: int = 0
    lost: int = 0
    stores_refused: int = 0
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def replay(
    trace: Sequence[Sequence[int]],
    capacity: int,
    *,
    policy: str = "lru",
    clients: int = 4,
    step: Callable[[], None] = lambda: None,
) -> ReplayOutcome:
    """Replay a trace in a namespace of `capacity` blocks. Calls `step` after each request."""
    outcome = ReplayOutcome(policy, capacity, clients)
    begin = time.perf_counter()
    with LocalDaemon("cpu", pool_bytes=capacity * PAGE + (1 << 20)) as daemon, ExitStack() as stack:
        longest = max(map(len, trace))
        engines = [
            stack.enter_context(_Engine(f"engine-{number}", daemon.directory, longest, outcome))
            for number in range(clients)
        ]
        requests, busy = iter(trace), list[_Engine]()
        idle = list(engines)
        while True:
            while idle and (request := next(requests, None)) is not None:
                engine = idle.pop()
                engine.begin(request)
                busy.append(engine)
            if not busy:
                break
            for engine in tuple(busy):
                if engine.advance():
                    busy.remove(engine)
                    idle.append(engine)
                    step()
    outcome.seconds = time.perf_counter() - begin
    return outcome


class _Engine:
    """One client, its tensors, and its current request."""

    def __init__(self, name: str, directory: Path, blocks: int, outcome: ReplayOutcome) -> None:
        self._outcome = outcome
        self._client = OffloadClient(directory, engine=name, client=name)
        fingerprint = Fingerprint(model="replay", host_block_bytes=PAGE, key_bytes=12)
        self._client.open_namespace(
            fingerprint,
            cpu_bytes_to_use=outcome.capacity * PAGE,
            eviction_policy=outcome.policy,
        )
        layout = KVLayout((TensorLayout(blocks, PAGE, PAGE),), ((TensorRef(0, PAGE),),))
        (pages,) = self._client.allocate_kv_caches(layout).tensors
        self._pages = pages.view(torch.int64).numpy()
        self._manager = OffloadingManager(self._client)
        self._jobs = count()
        self._steps: Steps = _nothing()
        self._results: list[TransferResult] = []

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.shutdown()
        self._client.close()

    def begin(self, ids: Sequence[int]) -> None:
        self._steps = self._serve(ids)

    def advance(self) -> bool:
        """Continue the request as far as possible without waiting. Returns whether it is done."""
        self._results += self._client.get_finished()
        return next(self._steps, True) is True

    def _serve(self, ids: Sequence[int]) -> Steps:
        """A request from its lookup to its store."""
        manager, outcome = self._manager, self._outcome
        keys = [offload_key(each.to_bytes(8, "big")) for each in ids]
        found = yield from self._pin_prefix(keys)
        if found:
            spec = KeyLoadStoreSpec(keys[:found])
            result = yield from self._transfer((spec, GPULoadStoreSpec(np.arange(found))))
            manager.complete_load(spec.keys)
            if result.success:
                same = (self._pages[:found] == _contents(ids[:found])).all(axis=1)
                outcome.wrong += int((~same).sum())
            else:
                outcome.lost, found = outcome.lost + 1, 0
        manager.touch(keys)
        self._pages[found : len(ids)] = _contents(ids[found:])
        output = manager.prepare_store(keys)
        if output is not None and output.keys_to_store:
            block_of = {key: block for block, key in enumerate(keys)}
            blocks = np.array([block_of[key] for key in output.keys_to_store])
            result = yield from self._transfer((GPULoadStoreSpec(blocks), output.store_spec))
            manager.complete_store(output.keys_to_store, result.success)
            outcome.stored += result.transfer_size // PAGE
            outcome.stores_refused += not result.success
        outcome.requests += 1
        outcome.blocks += len(ids)
        outcome.hits += found

    def _pin_prefix(self, keys: Sequence[bytes]) -> Steps:
        """Pin the blocks up to the first miss. Returns how many."""
        while True:
            found = yield from self._find_prefix(keys)
            try:
                if found:
                    self._manager.prepare_load(keys[:found])
                return found
            except Refused:  # a key has just been evicted: look up again
                yield

    def _find_prefix(self, keys: Sequence[bytes]) -> Steps:
        """Count the blocks up to the first miss. Waits for pending blocks."""
        found = 0
        for key in keys:
            deadline = time.monotonic() + TIMEOUT
            while (state := self._manager.lookup(key)) in (Lookup.HIT_PENDING, Lookup.RETRY):
                assert time.monotonic() < deadline, "a key stays pending"
                yield
            if state is not Lookup.HIT:
                break
            found += 1
        return found

    def _transfer(self, spec: TransferSpec) -> Steps:
        job_id, deadline = next(self._jobs), time.monotonic() + TIMEOUT
        self._client.transfer_async(job_id, spec)
        while not any(result.job_id == job_id for result in self._results):
            assert time.monotonic() < deadline, "a job does not end"
            yield
        (result,) = (result for result in self._results if result.job_id == job_id)
        self._results.remove(result)
        return result


def _contents(ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The contents that belong to the ids, as an array (blocks, words)."""
    return np.array(ids, dtype=np.int64)[:, None] * MULTIPLIER + np.arange(PAGE // 8)


def _nothing() -> Steps:
    yield from ()
