"""kvferryd with a simulated GPU that only keeps time, on any machine. Uses link_time.py's driver.

    python tests/bench/clock_daemon.py [kvferryd's own options]

Everything is real except the driver: it copies nothing, and reports a copy as complete when a GPU
would have completed it. Its calls take as long as on an H200, and release the GIL if they do there.
Checksums of stored blocks are reported at once, because there are no bytes to read. Engines see a
device "cpu", whose tensors they share. For `queued_alternating.py --device clock`, which needs two
idle cores.
"""

from __future__ import annotations

import asyncio
import ctypes
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from bench import link_time
from kvferry.daemon import app
from kvferry.daemon.config import Config
from kvferry.daemon.core.layout import BlockLayout, Int64s
from kvferry.daemon.engine.base import CopyEngine, Mapping
from kvferry.daemon.engine.cuda import engine as cuda_engine
from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.daemon.persistence.block_table import BlockTable, Checksums
from kvferry.daemon.persistence.checksum_client import ChecksumClient, Purpose
from kvferry.proto.memory import Allocation, Location
from kvferry.proto.sizes import parse_bytes
from kvferry.proto.status import CalibrationPoint, CopyStatus, DeviceInfo

# Seconds of CPU per fragment of a batch.
FRAGMENT = 0.4e-6
# Seconds of the device per kernel, besides the time for its bytes.
KERNEL = 5e-6
# Device addresses are below, addresses of this process's host memory above.
HOST = 0x5000 << 32
# Bytes of the longest memset.
SPAN = 8 << 20


class Unlocked:
    """Uses CPU time without the GIL, by a memset of as many bytes as needed."""

    def __init__(self) -> None:
        self._libc, self._bytes = ctypes.CDLL(None), ctypes.create_string_buffer(SPAN)
        self._libc.memset(self._bytes, 0, SPAN)
        self._seconds = min(self._time(SPAN) for _ in range(20)) / SPAN

    def spend(self, seconds: float) -> None:
        self._libc.memset(self._bytes, 0, min(SPAN, int(seconds / self._seconds)))

    def _time(self, nbytes: int) -> float:
        begin = time.perf_counter()
        self._libc.memset(self._bytes, 0, nbytes)
        return time.perf_counter() - begin


class ClockDriver(link_time.TimedDriver):
    """The driver of link_time.py, with other times.

    The time of a kernel depends on its bytes. All fragments of a batch have one size. Batches of
    stores release the GIL.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unlocked = Unlocked()

    def allocate(self, nbytes: int) -> int:
        return next(self._numbers) << 36

    def register_host(self, *_: object) -> None: ...

    def call(self, name: str, *arguments: Any) -> None:
        if name in {"cuStreamWaitEvent", "cuMemcpyAsync"}:
            super().call(name, *arguments)

    def launch(self, function: int, grid: int, threads: int, stream: int, *of: Any) -> None:
        link_time.spend(link_time.LAUNCH)
        _, _, block_bytes, blocks = struct.unpack_from("QQQI", of[0].arrays[0])
        begin = max(self._streams[stream], time.perf_counter() + link_time.BEGIN)
        self._streams[stream] = begin + KERNEL + blocks * block_bytes / link_time.BANDWIDTH

    def optional(self, symbol: str, *, quick: bool = False) -> Callable[..., int]:
        spend = link_time.spend if quick else self._unlocked.spend

        def batch(to: int, _: int, sizes: int, number: int, *rest: Any) -> int:
            spend(link_time.BATCH + FRAGMENT * number)
            first, nbytes = (ctypes.c_int64.from_address(at).value for at in (to, sizes))
            self._copy(rest[-1], number * nbytes, first)
            return 0

        return batch

    def _copy(self, stream: int, nbytes: int, to: int) -> None:
        store = to >= HOST
        begin = max(self._streams[stream], self._link[store], time.perf_counter() + link_time.BEGIN)
        self._streams[stream] = self._link[store] = begin + nbytes / link_time.LINK


class ClockEngine(cuda_engine.CudaEngine):
    """Does not map shared tensors. Tensors that it allocates are host memory."""

    def map_tensors(
        self,
        geometry: BlockLayout,
        allocations: Sequence[Allocation],
        locations: Sequence[Location],
        descriptors: Sequence[int],
    ) -> Mapping:
        bases = (np.arange(len(locations), dtype=np.int64) << 34) + link_time.TENSOR
        return self._mapping(geometry, bases, [])

    allocate_tensors = cast(Any, ReferenceEngine.allocate_tensors)


def make_engine(config: Config) -> CopyEngine:
    always = 0 if config.copy.mode == "direct" else 1 << 40
    measured = CopyStatus("auto", CalibrationPoint(0, 1.0, 1.0), (), always, always)
    patched, driver = cast(Any, cuda_engine), ClockDriver()
    patched.driver, patched.calibrate = lambda: driver, lambda *_: measured
    patched.VirtualMemory = lambda *_: None
    staging, chunk = parse_bytes(config.copy.staging), parse_bytes(config.pool.chunk)
    engine = ClockEngine("0", cuda_engine.CudaOptions("auto", staging, chunk))
    engine.info = DeviceInfo("cpu", "cpu", "a clock", staging)
    return engine


def pretend_to_read(
    client: ChecksumClient,
    table: BlockTable,
    blocks: Int64s,
    keys: Sequence[bytes],
    purpose: Purpose,
    done: Callable[[Checksums], None],
) -> None:
    asyncio.get_running_loop().call_soon(done, np.zeros(blocks.size, np.uint64))


if __name__ == "__main__":
    cast(Any, app).make_engine = make_engine
    cast(Any, ChecksumClient).read = pretend_to_read
    app.main(sys.argv[1:])
