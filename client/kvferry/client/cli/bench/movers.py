"""Ways to copy without end, one like the other: `submit` a job, `take` the count of those ended.

Transfers go through a daemon. The alternatives are in this process, each on a stream of its own: a
kernel that reads and writes pinned memory (what engines do in their own process), and one
contiguous run after the other; the last also with a kernel that does nothing behind each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from kvferry.client.cli.bench.engine import Engine
from kvferry.client.cli.bench.rig import Rig

_cuda: Any = torch.cuda


class Mover(Protocol):
    # Bytes of one job.
    nbytes: int

    def submit(self) -> None: ...

    def take(self) -> int: ...


class Transfers:
    """Jobs of a registered engine: random blocks, all of them in `jobs` jobs, over and over."""

    def __init__(self, engine: Engine, way: str, jobs: int) -> None:
        random, shape = np.random.default_rng(2), engine.shape
        each = engine.num_blocks // shape.factor // jobs
        hosts = random.permutation(engine.host_blocks)[: each * jobs].reshape(jobs, -1)
        blocks = random.permutation(engine.num_blocks)[: each * jobs * shape.factor]
        specs: list[TransferSpec] = []
        for gpu_ids, host_ids in zip(blocks.reshape(jobs, -1), hosts, strict=True):
            gpu, host = GPULoadStoreSpec(gpu_ids), CPULoadStoreSpec(host_ids)
            specs.append((gpu, host) if way == "store" else (host, gpu))
        self.nbytes = each * shape.host_block_bytes
        self._engine, self._specs = engine, cycle(specs)

    def submit(self) -> None:
        self._engine.submit(next(self._specs))

    def take(self) -> int:
        return len(self._engine.take())


class Streamed:
    """What each of `launches` enqueues on the current stream, `nbytes` of it."""

    def __init__(self, launches: Sequence[Callable[[], object]], nbytes: int) -> None:
        self.nbytes, self.launches = nbytes, launches
        self._launches, self._stream = cycle(launches), _cuda.Stream()
        self._ends: deque[Any] = deque()

    def submit(self) -> None:
        end = _cuda.Event()
        with _cuda.stream(self._stream):
            next(self._launches)()
            end.record()
        self._ends.append(end)

    def take(self) -> int:
        ended = 0
        while self._ends and self._ends[0].query():
            self._ends.popleft()
            ended += 1
        return ended


def contiguous(rig: Rig, way: str, jobs: int) -> Streamed:
    host, gpu = rig.raw.hosts[0].chunk(jobs), rig.slab[: rig.raw.nbytes].chunk(jobs)
    pairs = zip(host, gpu, strict=True) if way == "store" else zip(gpu, host, strict=True)
    return Streamed([_copy(dst, src) for dst, src in pairs], host[0].numel())


def turns(rig: Rig, way: str, jobs: int) -> Mover:
    """Contiguous copies, and behind each a kernel of one thread: a turn of the GPU, no work."""
    copies, side = contiguous(rig, way, jobs), _cuda.Stream()
    flag = torch.zeros(1, device=rig.slab.device)

    def behind(copy: Callable[[], object]) -> Callable[[], None]:
        def launch() -> None:
            copy()
            side.wait_stream(_cuda.current_stream())
            with _cuda.stream(side):
                flag.add_(1)

        return launch

    return Streamed([behind(launch) for launch in copies.launches], copies.nbytes)


def _copy(dst: torch.Tensor, src: torch.Tensor) -> Callable[[], object]:
    return lambda: dst.copy_(src, non_blocking=True)


def pinned_kernel(rig: Rig, way: str, page_bytes: int, jobs: int) -> Mover:
    """Needs triton, and its first launch a C compiler: ImportError or RuntimeError where not."""
    from kvferry.client.cli.bench.pinned_kernel import launch

    random, host = np.random.default_rng(3), rig.raw.hosts[0]
    each = rig.raw.nbytes // page_bytes // jobs
    addresses = [
        torch.from_numpy(
            random.permutation(memory.numel() // page_bytes)[: each * jobs].reshape(jobs, -1)
            * page_bytes
            + memory.data_ptr()
        ).to(rig.slab.device)
        for memory in (rig.slab, host)
    ]
    sources, targets = addresses if way == "store" else addresses[::-1]
    pairs = zip(sources, targets, strict=True)
    launches = [launch(source, target, page_bytes) for source, target in pairs]
    launches[0]()
    _cuda.synchronize()
    return Streamed(launches, each * page_bytes)
