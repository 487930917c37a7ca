"""Streams: a launch returns at once, and kernels run later, in order.

A CPU has no streams, so `CpuStream` is a thread that runs launched closures one after another. A
closure after them signals the timeline. So a copy that does not wait for the kernels fails on a CPU
as it does on a GPU.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvferry.client import Timeline


class ComputeStream(Protocol):
    device: torch.device

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run `kernel` after all earlier launches. Returns at once."""

    def sleep(self, seconds: float) -> None:
        """Launch a kernel that takes `seconds`."""

    def signal(self, timeline: Timeline) -> int:
        """Advance a timeline after all earlier launches. Returns the value that it will reach."""

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        """An int64 tensor for kernels of this stream. Does not wait for earlier kernels."""

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class CpuStream:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._kernels: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._signalled = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="cpu-stream", daemon=True)
        self._thread.start()

    def launch(self, kernel: Callable[[], None]) -> None:
        self._kernels.put(kernel)

    def sleep(self, seconds: float) -> None:
        self.launch(lambda: time.sleep(seconds))

    def signal(self, timeline: Timeline) -> int:
        value = self._signalled = max(self._signalled, timeline.last) + 1
        self.launch(lambda: self._advance(timeline, value))
        return value

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64)

    def synchronize(self) -> None:
        """Wait for all launches. Raises the first error of a kernel."""
        reached = threading.Event()
        self.launch(reached.set)
        reached.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._kernels.put(None)
        self._thread.join()

    def _advance(self, timeline: Timeline, value: int) -> None:
        timeline.signal(value=value)

    def _run(self) -> None:
        while (kernel := self._kernels.get()) is not None:
            try:
                kernel()
            except Exception as error:
                self._error = self._error or error


class CudaStream:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        torch.cuda.set_device(self.device)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._cycles_per_second = self._calibrate()

    def launch(self, kernel: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            kernel()

    def sleep(self, seconds: float) -> None:
        cycles = int(seconds * self._cycles_per_second)
        self.launch(lambda: _spin(cycles))

    def signal(self, timeline: Timeline) -> int:
        return timeline.signal(self.stream)

    def upload(self, numbers: Sequence[int]) -> torch.Tensor:
        """Uploads on the default stream, which does not wait for this one."""
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        tensor.record_stream(self.stream)
        return tensor

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        self.synchronize()

    def _calibrate(self) -> float:
        cycles = 20_000_000
        for _ in range(2):
            began = time.perf_counter()
            self.launch(lambda: _spin(cycles))
            self.synchronize()
        return cycles / (time.perf_counter() - began)


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def make_stream(device: str) -> ComputeStream:
    return CudaStream(device) if device.startswith("cuda") else CpuStream()
