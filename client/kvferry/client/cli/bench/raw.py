"""The baseline: copies of one contiguous pinned buffer by plain torch, in this process.

On CUDA: `copy_(non_blocking=True)` to and from pinned memory, timed by events on the copy's own
stream. Both directions at once: two streams, from a common start to the later end. Without a GPU:
one thread per direction copies between two shared buffers with numpy, as the reference engine does
with memmove.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch

from kvferry.client.cli.bench.bench_results import DIRECTIONS, Rate
from kvferry.client.tensors import shared_empty

# (destination, source)
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
WARM_UPS = 2
_cuda: Any = torch.cuda  # streams and events have no types


class RawCopy:
    """Copies between `slab` and its own host buffers: `nbytes` per direction, disjoint halves."""

    def __init__(self, slab: torch.Tensor, nbytes: int) -> None:
        self.nbytes = nbytes
        self._samples: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        self.hosts = [_host_buffer(nbytes, pinned=slab.is_cuda).fill_(1) for _ in range(2)]
        out, back = (self.hosts[0], slab[:nbytes]), (slab[nbytes : 2 * nbytes], self.hosts[1])
        self._pairs = {"store": [out], "load": [back], "both": [out, back]}
        self._seconds: Callable[[Sequence[Pair]], float] = _CpuCopy()
        if slab.is_cuda:
            self._seconds = _CudaCopy()
        for pairs in [*self._pairs.values()] * WARM_UPS:
            self._seconds(pairs)

    def sample(self) -> None:
        """Measure one copy per direction, and both directions at once."""
        for direction in DIRECTIONS:
            self._samples[direction].append(self._seconds(self._pairs[direction]))

    def rates(self) -> dict[str, Rate]:
        return {
            direction: Rate.of(len(self._pairs[direction]) * self.nbytes, seconds)
            for direction, seconds in self._samples.items()
        }

    def block(self, direction: str, nbytes: int) -> Callable[[], float]:
        """A function that copies the first `nbytes` and returns the seconds until completion."""
        dst, src = (part[:nbytes] for part in self._pairs[direction][0])
        return _cuda_block(dst, src) if src.is_cuda or dst.is_cuda else _cpu_block(dst, src)


def _host_buffer(nbytes: int, *, pinned: bool) -> torch.Tensor:
    if pinned:
        return torch.empty(nbytes, dtype=torch.int8, pin_memory=True)
    return shared_empty((nbytes,))


class _CudaCopy:
    def __init__(self) -> None:
        self._streams = [_cuda.Stream() for _ in range(2)]
        self._begin = _cuda.Event(enable_timing=True)
        self._ends = [_cuda.Event(enable_timing=True) for _ in range(2)]

    def __call__(self, pairs: Sequence[Pair]) -> float:
        """Seconds by the device's clock."""
        _cuda.synchronize()
        used = list(zip(pairs, self._streams, self._ends, strict=False))
        self._begin.record(self._streams[0])
        for (dst, src), stream, end in used:
            stream.wait_event(self._begin)
            with _cuda.stream(stream):
                dst.copy_(src, non_blocking=True)
            end.record(stream)
        _cuda.synchronize()
        return max(float(self._begin.elapsed_time(end)) for _, _, end in used) / 1e3


class _CpuCopy:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "kvferry-bench-copy")

    def __call__(self, pairs: Sequence[Pair]) -> float:
        begin = time.perf_counter()
        for copy in [self._threads.submit(_cpu_copy, *pair) for pair in pairs]:
            copy.result()
        return time.perf_counter() - begin


def _cpu_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    np.copyto(dst.numpy(), src.numpy())


def _cuda_block(dst: torch.Tensor, src: torch.Tensor) -> Callable[[], float]:
    done = _cuda.Event()

    def copy() -> float:
        begin = time.perf_counter()
        dst.copy_(src, non_blocking=True)
        done.record()
        done.synchronize()
        return time.perf_counter() - begin

    return copy


def _cpu_block(dst: torch.Tensor, src: torch.Tensor) -> Callable[[], float]:
    def copy() -> float:
        begin = time.perf_counter()
        _cpu_copy(dst, src)
        return time.perf_counter() - begin

    return copy
