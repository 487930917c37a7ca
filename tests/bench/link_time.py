"""Link time that the device worker does not use: the CUDA engine with a driver that keeps time.

    python tests/bench/link_time.py [--slow 2]

The driver copies nothing. A fragment takes its time on a link of 56.1 GB/s, a kernel 0.13 ms, one
after another on their streams, and an event is reached at its time. The rest of a job's time is
overhead of the worker and the engine: sleeps, Python, late submissions. The client, sockets, the
event loop, and a GPU's pauses between fragments are not included.

Beside another process that always has kernels to run, the kernels of staged copies run after that
process's time slice (SLICE), as measured on an H200. A kernel that is submitted too late waits for
another slice.

    row      milliseconds per job of 1 GiB, eight in a row, two in flight: median, least and most
    once     of one job after 20 ms of idle time, median
    beside   as row, beside such a process; and how many time slices of the GPU each job took

--slow: the worker's time for a chunk is so many times as long, as on a slow CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import queue
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from kvferry.cuda.driver import Event
from kvferry.daemon.core.actions import CopyPlan, Report, StartTransfer, TransferCompleted
from kvferry.daemon.core.layout import BlockLayout
from kvferry.daemon.device.transfer_queues import RegistrationQueues
from kvferry.daemon.device.worker import DeviceWorker
from kvferry.daemon.engine.cuda import engine as cuda_engine
from kvferry.daemon.engine.cuda.engine import CudaEngine, CudaOptions
from kvferry.daemon.memory.pool import HostPool
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import Direction, GPULoadStoreSpec, KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import CalibrationPoint, CopyStatus
from support.region_records_model import NO_BLOCKS

# Bytes per second of the link, each way.
LINK = 56.1e9
# Seconds from a call until the device begins; seconds of a kernel.
BEGIN, KERNEL = 6e-6, 130e-6
# Seconds of CPU that the driver's calls take.
COPY, BATCH, LAUNCH = 4e-6, 15e-6, 8e-6
# Seconds of the other process's time slice; of a switch between processes; and bytes per second
# that a kernel moves.
SLICE, SWITCH, BANDWIDTH = 2.13e-3, 0.15e-3, 2e12
HOST_BLOCK, JOB_BLOCKS, HOST_BLOCKS, TENSORS = 2 << 20, 512, 2048, 64
ROW, AHEAD, ROUNDS, REST = 8, 2, 9, 0.02
POOL, TENSOR = 1 << 30, 1 << 42
CASES = (("staged", 32), ("staged", 1), ("direct", 2048))

clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--slow", type=float, default=1.0, help="factor of the worker's time (default: 1)"
    )
    factor = parser.parse_args().slow
    for owner, name in ((DeviceWorker, "_submit_head"), (DeviceWorker, "_poll")):
        setattr(owner, name, slow_down(getattr(owner, name), factor))
    print(f"{'':24}{'link':>6}{'row':>7}{'least..most':>14}{'once':>7}", end="")
    print(f"{'beside':>8}{'least..most':>14}{'turns':>6}")
    for mode, kib in CASES:
        fixtures = (
            LinkTimeFixture(mode, kib << 10, TimedDriver),
            LinkTimeFixture(mode, kib << 10, SharedDriver),
        )
        for direction in Direction:
            alone, beside = (
                [fixture.round(direction) for _ in range(ROUNDS)] for fixture in fixtures
            )
            link = 1e3 * JOB_BLOCKS * HOST_BLOCK / LINK
            name = f"{mode}, {kib} KiB, {direction}"
            print(f"{name:24}{link:6.2f}{spread(r.row for r in alone)}", end="")
            print(f"{statistics.median(r.once for r in alone):7.2f} ", end="")
            print(f"{spread(r.row for r in beside)}", end="")
            print(f"{statistics.median(r.turns for r in beside):6.1f}", flush=True)


def spread(numbers: Iterator[float]) -> str:
    values = [*numbers]
    return f"{statistics.median(values):7.2f}{f'{min(values):.2f}..{max(values):.2f}':>14}"


def slow_down(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        begin = clock()
        try:
            return function(*arguments)
        finally:
            spend((factor - 1) * (clock() - begin))

    return slow if factor > 1 else function


class TimedDriver:
    """For each stream, and for each direction of the link, keeps the time when it becomes idle."""

    version = 13000

    def __init__(self) -> None:
        # Time slices of the GPU that this process used beside another process.
        self.turns = 0
        self._numbers = count(1)
        self._streams: dict[int, float] = {}
        self._link = {True: 0.0, False: 0.0}
        self._events: dict[int, float] = {}
        self._spare: list[int] = []

    def device_count(self) -> int:
        return 1

    def device_uuid(self, ordinal: int) -> str:
        return "GPU-time"

    def pci_address(self, ordinal: int) -> str:
        return "0000:00:00.0"

    def device_name(self, ordinal: int) -> str:
        return "a clock"

    def retain_context(self, ordinal: int) -> int:
        return 1

    def allocate(self, nbytes: int) -> int:
        return next(self._numbers) << 44

    def copy_to_device(self, *_: object) -> None: ...

    def load_module(self, image: bytes) -> int:
        return 1

    def module_function(self, module: int, name: str) -> int:
        return 1

    def create_stream(self, *, urgent: bool = False) -> int:
        stream = next(self._numbers)
        self._streams[stream] = 0.0
        return stream

    def record(self, stream: int) -> Event:
        handle = self._spare.pop() if self._spare else next(self._numbers)
        self._events[handle] = max(self._streams[stream], clock())
        return Event(handle, self._spare)

    def reached(self, event: Event) -> bool:
        return clock() >= self._events[event.handle]

    def elapsed_seconds(self, start: Event, end: Event) -> float:
        return self._events[end.handle] - self._events[start.handle]

    def launch(self, function: int, grid: int, threads: int, stream: int, *_: object) -> None:
        spend(LAUNCH)
        self._streams[stream] = max(self._streams[stream], clock() + BEGIN) + KERNEL

    def call(self, name: str, *arguments: Any) -> None:
        if name == "cuStreamWaitEvent":
            stream, event, _ = arguments
            self._streams[stream] = max(self._streams[stream], self._events[event])
        elif name == "cuMemcpyAsync":
            to, _, nbytes, stream = arguments
            spend(COPY)
            self._copy(stream, nbytes, to)

    def optional(self, symbol: str, *, quick: bool = False) -> Any:
        def batch(to: int, _: int, sizes: int, number: int, *rest: Any) -> int:
            spend(BATCH)
            where = ctypes.c_int64.from_address(to).value
            for nbytes in (ctypes.c_int64 * number).from_address(sizes):
                self._copy(rest[-1], nbytes, where)
            return 0

        return batch

    def _copy(self, stream: int, nbytes: int, to: int) -> None:
        store = to < TENSOR
        begin = max(self._streams[stream], self._link[store], clock() + BEGIN)
        self._streams[stream] = self._link[store] = begin + nbytes / LINK


class SharedDriver(TimedDriver):
    """A TimedDriver whose GPU another process uses for SLICE between two time slices of this one.

    Kernels that are launched before the end of a time slice run in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kernels: set[int] = set()
        # End of the last time slice, or begin of the next one if kernels wait for it.
        self._slice_end = 0.0

    def record(self, stream: int) -> Event:
        if stream in self._kernels:
            self._streams[stream] = self._begin(stream)
        return super().record(stream)

    def launch(self, function: int, grid: int, threads: int, stream: int, *of: Any) -> None:
        spend(LAUNCH)
        self._kernels.add(stream)
        _, _, block_bytes, blocks = struct.unpack_from("QQQI", of[0].arrays[0])
        end = self._begin(stream) + BEGIN + blocks * block_bytes / BANDWIDTH
        self._streams[stream] = self._slice_end = end

    def _begin(self, stream: int) -> float:
        ready = max(self._streams[stream], clock())
        if ready > self._slice_end:
            slices = max(1, math.ceil((ready - self._slice_end - SWITCH) / SLICE))
            self._slice_end += SWITCH + slices * SLICE
            self.turns += 1
        return self._slice_end


class Round(NamedTuple):
    """Milliseconds of a job in a row and of a single job; time slices of the GPU per job."""

    row: float
    once: float
    turns: float


class LinkTimeFixture:
    """A device worker with such an engine, and plans of jobs for it."""

    def __init__(self, mode: str, page: int, driver: Callable[[], TimedDriver]) -> None:
        always = 0 if mode == "direct" else 1 << 40
        measured = CopyStatus("auto", CalibrationPoint(0, 1.0, 1.0), (), always, always)
        patched = cast(Any, cuda_engine)
        self._driver = driver()
        patched.driver, patched.calibrate = lambda: self._driver, lambda *_: measured
        patched.VirtualMemory = lambda *_: None
        engine = CudaEngine("0", CudaOptions("auto", 256 << 20, 1 << 30))
        tensors = max(1, min(TENSORS, HOST_BLOCK // page))
        self._factor = max(1, HOST_BLOCK // (tensors * page))
        self._blocks = 2 * JOB_BLOCKS * self._factor
        layout = KVLayout(
            (TensorLayout(self._blocks, page, page),) * tensors,
            (tuple(TensorRef(number, page) for number in range(tensors)),),
            self._factor,
        )
        self._geometry = BlockLayout(LayoutArrays.from_layout(layout), 0, HOST_BLOCKS)
        self._reports: queue.SimpleQueue[list[Report]] = queue.SimpleQueue()
        pool = cast(HostPool, SimpleNamespace(address=POOL, ready_bytes=1 << 60))
        self._worker = DeviceWorker(engine, pool, self._reports.put, lambda error: os._exit(1))
        self._worker.start()
        bases = (np.arange(tensors, dtype=np.int64) << 34) + TENSOR
        self._worker._registrations[1] = RegistrationQueues(
            engine._mapping(self._geometry, bases, []), None
        )
        self._serials, self._random = count(1), np.random.default_rng(0)

    def round(self, direction: Direction) -> Round:
        plans, turns = [self._plan(direction) for _ in range(ROW + 1)], self._driver.turns
        time.sleep(REST)
        row = self._seconds(plans[:-1], AHEAD) / ROW
        turns = self._driver.turns - turns
        time.sleep(REST)
        return Round(1e3 * row, 1e3 * self._seconds(plans[-1:], 1), turns / ROW)

    def _seconds(self, plans: list[CopyPlan], ahead: int) -> float:
        waiting, in_flight, begin = iter(plans), 0, clock()
        for plan in (*plans[:ahead],):
            next(waiting)
            self._start(plan)
            in_flight += 1
        while in_flight:
            for _ in self._ends():
                in_flight -= 1
                if (plan := next(waiting, cast(Any, None))) is not None:
                    self._start(plan)
                    in_flight += 1
        return clock() - begin

    def _start(self, plan: CopyPlan) -> None:
        self._worker.post_command(StartTransfer(plan, "bench", plan.serial, NO_BLOCKS))

    def _ends(self) -> Iterator[TransferCompleted]:
        return (each for each in self._reports.get() if isinstance(each, TransferCompleted))

    def _plan(self, direction: Direction) -> CopyPlan:
        geometry, random = self._geometry, self._random
        gpu = GPULoadStoreSpec(random.permutation(self._blocks)[: JOB_BLOCKS * self._factor])
        hosts = random.permutation(HOST_BLOCKS)[:JOB_BLOCKS]
        runs = geometry.resolve(direction, gpu, hosts).extents
        end = geometry.end_offset(runs)
        return CopyPlan(
            next(self._serials), 1, direction, runs, geometry.count_bytes(runs), 0, 0, end
        )


def spend(seconds: float) -> None:
    end = clock() + seconds
    while clock() < end:
        pass


if __name__ == "__main__":
    main()
    os._exit(0)  # workers end with the process
