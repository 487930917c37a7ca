"""Copies beside a busy engine: their rate, and the engine time that they cost. Needs a GPU.

    python tests/bench/beside.py [--device 0] [--sizes 1KiB,4KiB,256KiB] [--windows 3]

The engine is another process, which replays CUDA graphs with AHEAD steps queued, as engines with
asynchronous scheduling have:

    matmul   4 products of 8192 x 8192 bfloat16 matrices per step: bound by compute
    decode   64 products of 64 x 4096 by 4096 x 4096 matrices, one after the other: bound by device
             memory, with short kernels

For each fragment size, loop and direction, windows of WINDOW seconds alternate: the engine alone,
the engine with copies (IN_FLIGHT jobs in flight from before the window until after it), the engine
alone... From the time of a step with copies, and the mean of the windows before and after:

    ms/GiB   (1 - alone / with) x window / GiB moved in it: median, least and most
    x        GB/s between the ends of the first and the last job of a window, over that of the
             contiguous copy with nothing beside
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from kvferry.client.cli.bench.bench_engine import TIMEOUT, BenchEngine, Shape
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.rig import BenchRig, open_rig
from kvferry.client.cli.units import size
from kvferry.proto.sizes import parse_bytes

WINDOW = 0.2
IN_FLIGHT, JOBS = 2, 2
AHEAD = 3
LOOPS, DIRECTIONS = ("matmul", "decode"), ("store", "load")
_cuda: Any = torch.cuda  # graphs, streams and events have no types


class BusyEngine:
    """The engine process on GPU number `ordinal`, idle until a window begins."""

    def __init__(self, ordinal: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(child_pipe, ordinal), daemon=True)
        self._process.start()
        child_pipe.close()
        self.end_window()

    def begin_window(self, loop: str) -> None:
        self._pipe.send(loop)

    def window_ended(self) -> bool:
        return self._pipe.poll()

    def end_window(self) -> float:
        """Wait for the end of the window, and return milliseconds per step."""
        if not self._pipe.poll(TIMEOUT):
            raise TimeoutError(f"the busy engine did not answer within {TIMEOUT:.0f} s")
        return float(self._pipe.recv())

    def run_window(self, loop: str) -> float:
        self.begin_window(loop)
        return self.end_window()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.exitcode is None:
            self._process.kill()


def _serve(pipe: Connection, ordinal: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _cuda.set_device(ordinal)
    steps = {"matmul": _matmul(), "decode": _decode()}  # keeps the tensors of the graphs alive
    graphs = {loop: _graph(step) for loop, step in steps.items()}
    pipe.send(0.0)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_run_window(graphs[pipe.recv()]))


def _run_window(graph: Any) -> float:
    events: deque[Any] = deque()
    _cuda.synchronize()
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < WINDOW:
        graph.replay()
        steps += 1
        events.append(_cuda.Event())
        events[-1].record()
        if len(events) >= AHEAD:
            events.popleft().synchronize()
    _cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def _graph(step: Callable[[], None]) -> Any:
    stream, graph = _cuda.Stream(), _cuda.CUDAGraph()
    with _cuda.stream(stream):
        step()
        step()
    _cuda.synchronize()
    with _cuda.graph(graph):
        step()
    graph.replay()
    _cuda.synchronize()
    return graph


def _matmul() -> Callable[[], None]:
    a, b, out = (_random(8192, 8192) for _ in range(3))

    def step() -> None:
        for _ in range(4):
            torch.mm(a, b, out=out)

    return step


def _decode() -> Callable[[], None]:
    tokens, weights = _random(64, 4096), [_random(4096, 4096) for _ in range(64)]

    def step() -> None:
        x = tokens
        for weight in weights:
            x = x @ weight

    return step


def _random(rows: int, columns: int) -> torch.Tensor:
    numbers = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return numbers.mul_(columns**-0.5)


class RepeatedJobs:
    """JOBS jobs of all blocks, in random order, repeated: IN_FLIGHT of them are in flight."""

    def __init__(self, engine: BenchEngine, direction: str) -> None:
        random, shape = np.random.default_rng(2), engine.shape
        each = engine.num_blocks // shape.factor // JOBS
        hosts = random.permutation(engine.host_blocks)[: each * JOBS].reshape(JOBS, -1)
        blocks = random.permutation(engine.num_blocks)[: each * JOBS * shape.factor]
        specs: list[TransferSpec] = []
        for gpu_ids, host_ids in zip(blocks.reshape(JOBS, -1), hosts, strict=True):
            gpu, host = GPULoadStoreSpec(gpu_ids), CPULoadStoreSpec(host_ids)
            specs.append((gpu, host) if direction == "store" else (host, gpu))
        self.nbytes = each * shape.host_block_bytes
        self._engine, self._specs = engine, cycle(specs)

    @contextlib.contextmanager
    def running(self) -> Iterator[Callable[[], list[float]]]:
        """The function replaces completed jobs, and returns when they ended."""

        def replace_completed() -> list[float]:
            ended = [time.perf_counter()] * len(self._engine.fetch_results())
            for _ in ended:
                self._engine.submit(next(self._specs))
            return ended

        for _ in range(IN_FLIGHT):
            self._engine.submit(next(self._specs))
        yield replace_completed
        self._engine.wait_results(IN_FLIGHT)


def window(busy: BusyEngine, loop: str, jobs: RepeatedJobs) -> tuple[float, float]:
    """(GB/s of the copies, milliseconds per step of the engine)."""
    with jobs.running() as replace_completed:
        while not replace_completed():
            pass
        busy.begin_window(loop)
        ends = list[float]()
        while not busy.window_ended() or len(ends) < 2:
            ends += replace_completed()
        step_ms = busy.end_window()
    return jobs.nbytes * (len(ends) - 1) / (ends[-1] - ends[0]) / 1e9, step_ms


def measure(busy: BusyEngine, rig: BenchRig, page_bytes: int, windows: int) -> None:
    with rig.engine(Shape.of(page_bytes)) as engine:
        for loop in LOOPS:
            for direction in DIRECTIONS:
                jobs = RepeatedJobs(engine, direction)
                alone, rates, lost = [busy.run_window(loop)], list[float](), list[float]()
                for _ in range(windows):
                    rate, step_ms = window(busy, loop, jobs)
                    alone.append(busy.run_window(loop))
                    rates.append(rate)
                    share = 1 - (alone[-2] + alone[-1]) / 2 / step_ms
                    lost.append(share / (rate * 1e9) * (1 << 30) * 1e3)
                x = statistics.median(rates) / rig.raw.rates()[direction].median
                print(
                    f"{size(page_bytes):>8}  {loop}  {direction:<5}  x {x:.2f}  ms/GiB "
                    f"{statistics.median(lost):.2f} ({min(lost):.2f}..{max(lost):.2f})"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="0")
    parser.add_argument("--sizes", default="1KiB,4KiB,32KiB,256KiB,2MiB")
    parser.add_argument("--windows", type=int, default=3)
    chosen = parser.parse_args()
    sizes = [parse_bytes(text) for text in chosen.sizes.split(",")]
    with (
        open_rig(Plan(chosen.device, None, 1 << 30, tuple(sizes), None, quick=False)) as rig,
        contextlib.closing(BusyEngine(rig.slab.device.index or 0)) as busy,
    ):
        rig.raw.sample()
        for page_bytes in sizes:
            measure(busy, rig, page_bytes, chosen.windows)
            rig.raw.sample()


if __name__ == "__main__":
    main()
