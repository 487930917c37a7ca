"""Start of a daemon: seconds until it serves and until its pool is registered; device memory used.

    python tests/bench/startup.py --device 0 --pool-gib 64 --starts 3

Each start is timed until the socket exists, until a client is connected, until the first store of
one block has completed (connecting and registering the engine included), and until the whole pool
is registered. Then a new process allocates the same amount of pinned memory in one call
(cudaHostAlloc; on the CPU it touches the memory). A virtual machine receives its own memory at the
first touch, so before all measurements another process touches the same amount.

Device memory is the difference of the free memory that the driver reports. The staging buffer that
the daemon declares is shown separately. A new process that has only created a CUDA context is the
comparison.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import subprocess
import sys
import time
from ctypes import byref, c_void_p

import numpy as np
import torch

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, LocalDaemon, OffloadClient
from kvferry.client.cli.bench.bench_engine import HOST_BLOCK, NAME, Shape, register_engine
from kvferry.client.cli.bench.rig import torch_device, wait_pool_registered
from kvferry.client.cli.units import size
from kvferry.client.tensors import shared_empty
from kvferry.cuda.driver import driver
from kvferry.proto.status import DaemonStatus

MOMENTS = ("socket exists", "client connected", "first store of one block", "pool registered")
TIMEOUT = 300.0
SHAPE = Shape.of(4096)
# <sys/mman.h>: MADV_POPULATE_WRITE.
POPULATE_WRITE = 23


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="0", help="cpu, a GPU's index or its UUID")
    parser.add_argument("--pool-gib", type=float, default=64.0, help="GiB of host pool")
    parser.add_argument("--starts", type=int, default=3, help="starts to measure")
    parser.add_argument(
        "--bare", nargs=3, metavar=("MODE", "ORDINAL", "BYTES"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.bare:
        run_bare(options.bare[0], int(options.bare[1]), int(options.bare[2]))
    else:
        measure(options.device, int(options.pool_gib * (1 << 30)), options.starts)


def measure(daemon_device: str, nbytes: int, starts: int) -> None:
    with LocalDaemon(daemon_device, pool_bytes=HOST_BLOCK) as daemon:
        device = torch_device(wait_pool_registered(daemon.directory).device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # creates this process's context
    bare_process("touch", device, nbytes)
    times = []
    for _ in range(starts):
        seconds, status, device_bytes = start_daemon(daemon_device, device, nbytes)
        times.append(seconds)
    print(f"start of a daemon, pool of {size(nbytes)}: seconds, median and min..max")
    for name, column in zip(MOMENTS, zip(*times, strict=True), strict=True):
        print(f"{name:32}{statistics.median(column):8.2f}   {min(column):.2f}..{max(column):.2f}")
    allocation = "touch" if device.type == "cpu" else "hostalloc"
    print(f"{'one allocation of as much':32}{bare_process(allocation, device, nbytes):8.2f}")
    if device.type == "cuda":
        context = bare_process("context", device, 0)
        staging = status.device.staging_bytes
        print(f"device memory: {size(device_bytes)}, of that {size(staging)} staging")
        print(f"a bare CUDA context: {size(context)}")


def start_daemon(
    daemon_device: str, device: torch.device, nbytes: int
) -> tuple[list[float], DaemonStatus, int]:
    """Seconds until each of MOMENTS, the daemon's status, and device memory in bytes."""
    slab, free = shared_empty((2 * HOST_BLOCK,), device=device), free_bytes(device)
    store = GPULoadStoreSpec(np.arange(SHAPE.factor)), CPULoadStoreSpec([0])
    start, seconds = time.perf_counter(), []
    with LocalDaemon(daemon_device, pool_bytes=nbytes, timeout=TIMEOUT) as daemon:
        seconds.append(time.perf_counter() - start)
        with OffloadClient(daemon.directory, engine=NAME, timeout=TIMEOUT):
            seconds.append(time.perf_counter() - start)
            with register_engine(daemon.directory, SHAPE, slab) as engine:
                engine.run([store], poll_interval=0)
                seconds.append(time.perf_counter() - start)
                status = wait_pool_registered(daemon.directory)
                seconds.append(time.perf_counter() - start)
                return seconds, status, free - free_bytes(device)


def free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def bare_process(mode: str, device: torch.device, nbytes: int) -> float:
    """Seconds that a new process measured; for "context", its device memory in bytes."""
    command = [sys.executable, __file__, "--bare", mode, str(device.index or 0), str(nbytes)]
    free = free_bytes(device)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        seconds = float(process.stdout.readline())
        used = free - free_bytes(device)
        process.communicate("")
    return used if mode == "context" else seconds


def run_bare(mode: str, ordinal: int, nbytes: int) -> None:
    """Run one mode, print its seconds, and wait for the end of standard input."""
    if mode != "touch":
        driver().retain_context(ordinal)
    start = time.perf_counter()
    if mode == "touch":
        mmap.mmap(-1, nbytes).madvise(POPULATE_WRITE)
    elif mode == "hostalloc":
        driver().call("cuMemHostAlloc", byref(c_void_p()), nbytes, 1)
    print(time.perf_counter() - start, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
