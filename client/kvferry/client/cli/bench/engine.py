"""The bench as an engine: KV tensors in some shape, transfers submitted and waited for.

The shape follows from the fragment size alone. A host block has HOST_BLOCK bytes, as in service:
pages of up to MAX_TENSORS tensors (32 layers, K and V) make one GPU block, and as many GPU blocks
as fill it make one host block; a page of HOST_BLOCK bytes or more is a host block by itself.

    page      4 KiB     16 KiB    32 KiB    256 KiB   2 MiB
    tensors   64        64        64        8         1
    factor    8         2         1         1         1        GPU blocks in a host block

All tensors are views of one slab, registered anew for each shape under the same engine name, so
that each shape takes over the last one's room in the host pool.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch

from kvferry.client import (
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadClient,
    Timeline,
    TransferResult,
    TransferSpec,
)
from kvferry.client.session import timed_out
from kvferry.proto.specs import MAX_BLOCK_IDS

HOST_BLOCK = 2 << 20
MAX_TENSORS = 64
NAME = "kvferry-bench"
TIMEOUT = 120.0
# Seconds between polls: 0, unless polling would take the daemon's core.
NAP = 0.0 if len(os.sched_getaffinity(0)) > 2 else 20e-6


@dataclass(frozen=True, slots=True)
class Shape:
    page_bytes: int
    tensors: int
    factor: int

    @classmethod
    def of(cls, page_bytes: int) -> Shape:
        tensors = max(1, min(MAX_TENSORS, HOST_BLOCK // page_bytes))
        return cls(page_bytes, tensors, max(1, HOST_BLOCK // (tensors * page_bytes)))

    @property
    def block_bytes(self) -> int:
        return self.tensors * self.page_bytes

    @property
    def host_block_bytes(self) -> int:
        return self.factor * self.block_bytes


@dataclass(frozen=True, slots=True)
class Moved:
    """wall: submitted to seen. device: the sum of its jobs' times, of the slower direction."""

    nbytes: int
    wall: float
    device: float


class Engine:
    """A registered engine. `pages`: int8, (tensors, num_blocks, page_bytes)."""

    def __init__(
        self,
        client: OffloadClient,
        timeline: Timeline,
        shape: Shape,
        pages: torch.Tensor,
        host_blocks: int,
    ) -> None:
        self.client, self.timeline, self.shape, self.pages = client, timeline, shape, pages
        self.num_blocks, self.host_blocks = pages.shape[1], host_blocks
        self._job_ids = count(1)

    def run(
        self, specs: Sequence[TransferSpec], nap: float = NAP, ahead: int | None = None
    ) -> Moved:
        """Submit all, return when the end of all was seen. Raises what one of them failed with.

        ahead: so many at once, and one more whenever one has ended; all of them where it is None.
        """
        waiting, under_way, results = deque(specs), 0, list[TransferResult]()
        begin = time.perf_counter()
        while waiting or under_way:
            while waiting and (ahead is None or under_way < ahead):
                self.submit(waiting.popleft())
                under_way += 1
            ended = self.finish(1 if waiting else under_way, nap)
            under_way -= len(ended)
            results += ended
        wall = time.perf_counter() - begin
        times: dict[tuple[str, str], float] = {}
        for result in results:
            way = result.transfer_type
            times[way] = times.get(way, 0.0) + result.transfer_time
        return Moved(sum(result.transfer_size for result in results), wall, max(times.values()))

    def fill(self) -> None:
        """Store something in every host block: no other is loaded."""
        factor = self.shape.factor
        most = min(self.num_blocks, MAX_BLOCK_IDS) // factor
        specs = list[TransferSpec]()
        for first in range(0, self.host_blocks, most):
            hosts = np.arange(first, min(first + most, self.host_blocks))
            gpu = GPULoadStoreSpec(np.arange(hosts.size * factor))
            specs.append((gpu, CPULoadStoreSpec(hosts)))
        self.run(specs, ahead=1)

    def submit(self, spec: TransferSpec, wait_for: int = 0) -> int:
        job_id = next(self._job_ids)
        self.client.transfer_async(job_id, spec, wait_for)
        return job_id

    def finish(self, jobs: int, nap: float = NAP) -> list[TransferResult]:
        """The results of so many jobs; `nap`: seconds between looks, 0 to look all the time."""
        results: list[TransferResult] = []
        deadline = time.monotonic() + TIMEOUT
        while len(results) < jobs:
            results += self.take()
            if time.monotonic() > deadline:
                raise timed_out("not all jobs ended", jobs - len(results))
            if nap and len(results) < jobs:
                time.sleep(nap)
        return results

    def take(self) -> list[TransferResult]:
        results = self.client.get_finished()
        for result in results:
            if result.error is not None:
                raise result.error
        return results

    def settle(self) -> None:
        """What torch was asked to do with the pages is done."""
        if self.pages.is_cuda:
            torch.cuda.synchronize()


@contextlib.contextmanager
def engine(
    directory: Path, shape: Shape, slab: torch.Tensor, host_bytes: int | None = None
) -> Iterator[Engine]:
    """Register all of `slab` that whole host blocks of a shape can fill.

    host_bytes: how much of the pool to take; as much as the slab has where it is not given.
    """
    num_blocks = slab.numel() // shape.host_block_bytes * shape.factor
    host_blocks = (host_bytes or slab.numel()) // shape.host_block_bytes
    pages = slab[: num_blocks * shape.block_bytes].view(shape.tensors, num_blocks, shape.page_bytes)
    with (
        contextlib.closing(Timeline.create(slab.device)) as timeline,
        OffloadClient(directory, engine=NAME, client="kvferry bench", timeout=TIMEOUT) as client,
    ):
        client.register_kv_caches(
            {f"tensor{number}": tensor for number, tensor in enumerate(pages)},
            num_blocks=num_blocks,
            block_dim=0,
            block_size_factor=shape.factor,
            host_bytes=host_blocks * shape.host_block_bytes,
            timeline=timeline,
        )
        yield Engine(client, timeline, shape, pages, host_blocks)
