"""Copies that continue during a window: submit a job, count the completed ones.

Transfers are jobs of a daemon. Streamed copies run in this process, on their own CUDA stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from kvferry.client.cli.bench.engine import BenchEngine
from kvferry.client.cli.bench.rig import BenchRig

_cuda: Any = torch.cuda


class BenchMover(Protocol):
    # Bytes of one job.
    nbytes: int

    def submit(self) -> None: ...

    def count_completed(self) -> int: ...


class JobMover:
    """Jobs of a registered engine: `jobs` jobs with all blocks, in random order, repeated."""

    def __init__(self, engine: BenchEngine, direction: str, jobs: int) -> None:
        random, shape = np.random.default_rng(2), engine.shape
        each = engine.num_blocks // shape.factor // jobs
        hosts = random.permutation(engine.host_blocks)[: each * jobs].reshape(jobs, -1)
        blocks = random.permutation(engine.num_blocks)[: each * jobs * shape.factor]
        specs: list[TransferSpec] = []
        for gpu_ids, host_ids in zip(blocks.reshape(jobs, -1), hosts, strict=True):
            gpu, host = GPULoadStoreSpec(gpu_ids), CPULoadStoreSpec(host_ids)
            specs.append((gpu, host) if direction == "store" else (host, gpu))
        self.nbytes = each * shape.host_block_bytes
        self._engine, self._specs = engine, cycle(specs)

    def submit(self) -> None:
        self._engine.submit(next(self._specs))

    def count_completed(self) -> int:
        return len(self._engine.fetch_results())


class StreamMover:
    """Jobs of `nbytes` each: calls of `launches`, which enqueue a copy on the current stream."""

    def __init__(self, launches: Sequence[Callable[[], object]], nbytes: int) -> None:
        self.nbytes = nbytes
        self._launches, self._stream = cycle(launches), _cuda.Stream()
        self._ends: deque[Any] = deque()

    def submit(self) -> None:
        end = _cuda.Event()
        with _cuda.stream(self._stream):
            next(self._launches)()
            end.record()
        self._ends.append(end)

    def count_completed(self) -> int:
        ended = 0
        while self._ends and self._ends[0].query():
            self._ends.popleft()
            ended += 1
        return ended


def contiguous(rig: BenchRig, direction: str, jobs: int) -> StreamMover:
    """A contiguous copy between the rig's buffers, in `jobs` parts."""
    host, gpu = rig.raw.hosts[0].chunk(jobs), rig.slab[: rig.raw.nbytes].chunk(jobs)
    pairs = zip(host, gpu, strict=True) if direction == "store" else zip(gpu, host, strict=True)
    return StreamMover([_copy(dst, src) for dst, src in pairs], host[0].numel())


def _copy(dst: torch.Tensor, src: torch.Tensor) -> Callable[[], object]:
    return lambda: dst.copy_(src, non_blocking=True)
