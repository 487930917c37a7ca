"""A busy engine beside the copies: another process, which replays CUDA graphs.

    matmul   4 products of 8192 x 8192 bfloat16 matrices per step: bound by compute
    decode   64 products of 64 x 4096 by 4096 x 4096 matrices, one after the other: bound by device
             memory, with short kernels

AHEAD steps are queued at any time, as in engines with asynchronous scheduling. The result of a
window is the mean time of a step in it, in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvferry.client.session import timed_out
from kvferry.proto.errors import Code, Failed

LOOPS = ("matmul", "decode")
AHEAD = 3
READY_TIMEOUT = 120.0
_cuda: Any = torch.cuda  # graphs, streams and events have no types


class BusyEngine:
    """The engine process on GPU number `ordinal`, idle until a window begins."""

    def __init__(self, ordinal: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(child_pipe, ordinal), daemon=True)
        self._process.start()
        child_pipe.close()
        if not self._pipe.poll(READY_TIMEOUT):
            self._process.kill()
            raise timed_out("the busy engine is not ready", self._process.pid)
        self.end_window()

    def begin_window(self, loop: str, seconds: float) -> None:
        """Run a loop for this time."""
        self._pipe.send((loop, seconds))

    def window_ended(self) -> bool:
        return self._pipe.poll()

    def end_window(self) -> float:
        """Wait for the end of the window, and return milliseconds per step."""
        try:
            return float(self._pipe.recv())
        except EOFError:
            status = self._process.exitcode
            message = f"the busy engine exited with status {status}; see its output above"
            raise Failed(Code.COPY_FAILED, message, status) from None

    def run_window(self, loop: str, seconds: float) -> float:
        """Run a window to its end, and return milliseconds per step."""
        self.begin_window(loop, seconds)
        return self.end_window()

    def __enter__(self) -> BusyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.exitcode is None:
            self._process.kill()


def _serve(pipe: Connection, ordinal: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the bench reports ctrl-c
    _cuda.set_device(ordinal)
    steps = {"matmul": _matmul(), "decode": _decode()}  # keeps the tensors of the graphs alive
    graphs = {loop: _graph(step) for loop, step in steps.items()}
    pipe.send(0.0)
    while True:
        try:
            loop, seconds = pipe.recv()
        except EOFError:
            return
        pipe.send(_run_window(graphs[loop], seconds))


def _run_window(graph: Any, seconds: float) -> float:
    events: deque[Any] = deque()
    _cuda.synchronize()
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
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
