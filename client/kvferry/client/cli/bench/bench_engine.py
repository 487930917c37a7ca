"""The bench as an engine: KV tensors of some shape, and transfers of their blocks.

The shape follows from the fragment size alone. A host block has HOST_BLOCK bytes, as in
production. A GPU block is one page of each of up to MAX_TENSORS tensors (32 layers, K and V), and a
host block consists of as many GPU blocks as fit. A page of HOST_BLOCK bytes or more is a host block
by itself.

    page      4 KiB     16 KiB    32 KiB    256 KiB   2 MiB
    tensors   64        64        64        8         1
    factor    8         2         1         1         1        GPU blocks in a host block

All tensors are views of one buffer on the device. It is registered again for each shape under the
same engine name, so that each shape gets the region of the host pool that the last one had.
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
from kvferry.client.wire import timed_out
from kvferry.proto.specs import MAX_BLOCK_IDS

HOST_BLOCK = 2 << 20
MAX_TENSORS = 64
NAME = "kvferry-bench"
TIMEOUT = 120.0
# Seconds between polls: 0, unless polling would occupy a core that the daemon needs.
POLL_INTERVAL = 0.0 if len(os.sched_getaffinity(0)) > 2 else 20e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of KV caches. tensors: pages per GPU block. factor: GPU blocks per host block."""

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
class TimedTransfers:
    """The bytes and times of a set of transfers.

    wall: seconds from the first submit to the last result. device: the sum of the jobs'
    transfer_time; of the slower direction if there are two.
    """

    nbytes: int
    wall: float
    device: float


class BenchEngine:
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
        self,
        specs: Sequence[TransferSpec],
        poll_interval: float = POLL_INTERVAL,
        ahead: int | None = None,
    ) -> TimedTransfers:
        """Submit all specs, return when all have completed. Raises the error of a failed job.

        ahead: jobs in flight at most; None for all at once.
        """
        waiting, in_flight, results = deque(specs), 0, list[TransferResult]()
        begin = time.perf_counter()
        while waiting or in_flight:
            while waiting and (ahead is None or in_flight < ahead):
                self.submit(waiting.popleft())
                in_flight += 1
            ended = self.wait_results(1 if waiting else in_flight, poll_interval)
            in_flight -= len(ended)
            results += ended
        wall = time.perf_counter() - begin
        times: dict[tuple[str, str], float] = {}
        for result in results:
            direction = result.transfer_type
            times[direction] = times.get(direction, 0.0) + result.transfer_time
        return TimedTransfers(
            sum(result.transfer_size for result in results), wall, max(times.values())
        )

    def fill(self) -> None:
        """Store into every host block: only defined blocks can be loaded."""
        factor = self.shape.factor
        step = min(self.num_blocks, MAX_BLOCK_IDS) // factor
        specs = list[TransferSpec]()
        for first in range(0, self.host_blocks, step):
            hosts = np.arange(first, min(first + step, self.host_blocks))
            gpu = GPULoadStoreSpec(np.arange(hosts.size * factor))
            specs.append((gpu, CPULoadStoreSpec(hosts)))
        self.run(specs, ahead=1)

    def submit(self, spec: TransferSpec, wait_for: int = 0) -> int:
        job_id = next(self._job_ids)
        self.client.transfer_async(job_id, spec, wait_for)
        return job_id

    def wait_results(self, jobs: int, poll_interval: float = POLL_INTERVAL) -> list[TransferResult]:
        """The results of `jobs` jobs. poll_interval: seconds; 0 polls continuously."""
        results: list[TransferResult] = []
        deadline = time.monotonic() + TIMEOUT
        while len(results) < jobs:
            results += self.fetch_results()
            if time.monotonic() > deadline:
                raise timed_out(f"{jobs - len(results)} jobs did not complete", jobs)
            if poll_interval and len(results) < jobs:
                time.sleep(poll_interval)
        return results

    def fetch_results(self) -> list[TransferResult]:
        """Results that arrived. Raises the error of a failed job."""
        results = self.client.get_finished()
        for result in results:
            if result.error is not None:
                raise result.error
        return results

    def synchronize(self) -> None:
        """Wait until torch's work on the pages has completed."""
        if self.pages.is_cuda:
            torch.cuda.synchronize()


@contextlib.contextmanager
def register_engine(directory: Path, shape: Shape, slab: torch.Tensor) -> Iterator[BenchEngine]:
    """Register the part of `slab` that consists of whole host blocks of a shape, and as many host
    blocks."""
    num_blocks = slab.numel() // shape.host_block_bytes * shape.factor
    host_blocks = slab.numel() // shape.host_block_bytes
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
        yield BenchEngine(client, timeline, shape, pages, host_blocks)
