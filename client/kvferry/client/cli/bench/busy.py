"""A busy engine beside the copies: a process of its own that replays CUDA graphs.

    matmul   4 products of 8192 x 8192 bfloat16 matrices a step: the multiprocessors are full
    decode   64 products of 64 x 4096 by 4096 x 4096 matrices, one after the other: device
             memory is busy, and every kernel is short

AHEAD steps are queued at any time, as engines with asynchronous scheduling do. A window lasts so
many seconds; its answer is the mean time of a step in it, in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from kvferry.client.session import timed_out
from kvferry.proto.errors import Code, Failed

LOOPS = ("matmul", "decode")
AHEAD = 3
UP_TIMEOUT = 120.0
_cuda: Any = torch.cuda  # graphs, streams and events have no types


class Busy:
    """The engine process on GPU number `ordinal`, idle until a window begins."""

    def __init__(self, ordinal: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(there, ordinal), daemon=True)
        self._process.start()
        there.close()
        if not self._here.poll(UP_TIMEOUT):
            self._process.kill()
            raise timed_out("the busy engine did not come up", self._process.pid)
        self.end()

    def begin(self, loop: str, seconds: float) -> None:
        self._here.send((loop, seconds))

    def ended(self) -> bool:
        return self._here.poll()

    def end(self) -> float:
        """The answer of the window that began last; waits for it."""
        try:
            return float(self._here.recv())
        except EOFError:
            status = self._process.exitcode
            message = f"the busy engine exited with status {status}; see its output above"
            raise Failed(Code.COPY_FAILED, message, status) from None

    def step_ms(self, loop: str, seconds: float) -> float:
        self.begin(loop, seconds)
        return self.end()

    def __enter__(self) -> Busy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._here.close()
        self._process.join(10)
        if self._process.exitcode is None:
            self._process.kill()


def _serve(pipe: Connection, ordinal: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ctrl-c is for the bench to speak of
    _cuda.set_device(ordinal)
    steps = {"matmul": _matmul(), "decode": _decode()}  # they hold what the graphs use
    graphs = {loop: _graph(step) for loop, step in steps.items()}
    pipe.send(0.0)
    while True:
        try:
            loop, seconds = pipe.recv()
        except EOFError:
            return
        pipe.send(_window(graphs[loop], seconds))


def _window(graph: Any, seconds: float) -> float:
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
