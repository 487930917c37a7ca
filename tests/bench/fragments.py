"""Bandwidth of scattered fragments by how they are enqueued, without a daemon, in GB/s.

    python tests/bench/fragments.py

Fragments are at random addresses in 4 GiB of device memory and 4 GiB of memory such as the host
pool's. Chunks have 32 MiB, and four of them are in flight. 2 GiB are copied five times, by the
clock of this process: median, least and most.

    batch      a chunk is one cuMemcpyBatchAsync (as in kvferry)
    2 streams  two halves of a chunk, on two streams
    singly     a chunk is one cuMemcpyAsync per fragment
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.cuda.driver import Driver, Event, driver
from kvferry.daemon.core.layout import CopyBatch
from kvferry.daemon.engine.cuda.dma import Dma
from kvferry.daemon.memory.shared_memory import MappedFiles
from kvferry.proto.specs import Direction

MEMORY, CHUNK, MOVED, PIECE = 4 << 30, 1 << 30, 2 << 30, 32 << 20
SIZES = tuple(1 << power for power in range(15, 23))
IN_FLIGHT, ROUNDS = 4, 5

Enqueue = Callable[[Direction, CopyBatch], list[Event]]


class FragmentsFixture:
    """Memory on both sides, and two streams."""

    def __init__(self, cuda: Driver) -> None:
        self.cuda = cuda
        self.random = np.random.default_rng(0)
        cuda.call("cuCtxSetCurrent", cuda.retain_context(0))
        self.host = MappedFiles("kvferry-bench", MEMORY, CHUNK)
        for start in range(0, MEMORY, CHUNK):
            self.host.populate(start, CHUNK)
            cuda.register_host(self.host.address + start, CHUNK)
        self.device = cuda.allocate(MEMORY)
        self.streams = [cuda.create_stream() for _ in range(2)]
        self.dma = Dma(cuda, self.host.address, CHUNK)

    def batch(self, direction: Direction, piece: CopyBatch) -> list[Event]:
        return [self._on(self.streams[0], direction, piece)]

    def two_streams(self, direction: Direction, piece: CopyBatch) -> list[Event]:
        halves = [slice(start, None, 2) for start in range(min(2, piece.size.size))]
        return [
            self._on(
                stream,
                direction,
                CopyBatch.from_rows(*(column[half] for column in _columns(piece))),
            )
            for stream, half in zip(self.streams, halves, strict=False)
        ]

    def singly(self, direction: Direction, piece: CopyBatch) -> list[Event]:
        stream, store = self.streams[0], direction is Direction.STORE
        for gpu, host, size in piece.rows():
            dst, src = (host, gpu) if store else (gpu, host)
            self.cuda.call("cuMemcpyAsync", dst, src, size, stream)
        return [self.cuda.record(stream)]

    def speed(self, direction: Direction, size: int, enqueue: Enqueue) -> float:
        """Bytes per second of MOVED bytes in fragments of one size."""
        gpu, host = (self.random.permutation(MEMORY // size)[: MOVED // size] for _ in range(2))
        gpu, host = gpu * size + self.device, host * size + self.host.address
        sizes, in_flight = np.full(gpu.size, size), deque[list[Event]]()
        began, step = time.perf_counter(), PIECE // size
        for start in range(0, gpu.size, step):
            part = slice(start, start + step)
            in_flight.append(
                enqueue(direction, CopyBatch.from_rows(gpu[part], host[part], sizes[part]))
            )
            if len(in_flight) == IN_FLIGHT:
                self._wait(in_flight.popleft())
        for ends in in_flight:
            self._wait(ends)
        return MOVED / (time.perf_counter() - began)

    def _on(self, stream: int, direction: Direction, piece: CopyBatch) -> Event:
        self.dma.enqueue(direction, piece, stream)
        return self.cuda.record(stream)

    def _wait(self, ends: list[Event]) -> None:
        while not all(map(self.cuda.reached, ends)):
            pass


def _columns(piece: CopyBatch) -> tuple[Any, Any, Any]:
    return piece.gpu, piece.host, piece.size


def main() -> None:
    fixture = FragmentsFixture(driver())
    methods: dict[str, Enqueue] = {
        "batch": fixture.batch,
        "2 streams": fixture.two_streams,
        "singly": fixture.singly,
    }
    unsplit = {each: rates(fixture, each, PIECE, fixture.singly) for each in Direction}
    print(f"{'':24}" + "".join(f"{each:>24}" for each in Direction))
    print(
        f"{'whole chunks of 32 MiB':24}"
        + "".join(format_rates(unsplit[each]) for each in Direction)
    )
    for size in SIZES:
        for name, enqueue in methods.items():
            cells = [format_rates(rates(fixture, each, size, enqueue)) for each in Direction]
            print(f"{size >> 10:>8} KiB  {name:10}" + "".join(cells), flush=True)


def rates(
    fixture: FragmentsFixture, direction: Direction, size: int, enqueue: Enqueue
) -> list[float]:
    return sorted(fixture.speed(direction, size, enqueue) / 1e9 for _ in range(ROUNDS))


def format_rates(samples: list[float]) -> str:
    return f"{statistics.median(samples):10.1f}   {samples[0]:.1f}..{samples[-1]:.1f}"


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
