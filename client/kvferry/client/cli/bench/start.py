"""A daemon's start: from its process on until it serves, and until its whole pool is registered.

`reps` starts are timed until the first store of one block was seen, connecting and registering
the engine included; the last of them also until every byte is registered. Then a fresh process
allocates as much pinned memory in one call. A virtual machine gets its own memory page by page, as
it is touched for the first time: so a process of its own touches as much before all of them.

Device memory is what the driver says is free before and behind the start, less the staging buffer
that the daemon declares; beside it a fresh process that has made a context and nothing else.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from kvferry.client import (
    CPULoadStoreSpec,
    DaemonStatus,
    GPULoadStoreSpec,
    OffloadClient,
)
from kvferry.client.cli.bench import bare
from kvferry.client.cli.bench.engine import HOST_BLOCK, NAME, Shape, engine
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.results import Spread, Start
from kvferry.client.cli.bench.rig import own_daemon, ready, torch_device
from kvferry.client.cli.units import size
from kvferry.client.tensors import shared_empty
from kvferry.proto.errors import Code, Failed

STARTS, QUICK_STARTS = 3, 1
GPU_POOL, CPU_POOL, QUICK_POOL = 64 << 30, 1 << 30, 1 << 28
PART_OF_MEMORY = 0.7
TIMEOUT = 300.0
SHAPE = Shape.of(4096)


def steps(plan: Plan) -> int:
    """How often `measure` calls `step`."""
    return plan.times(STARTS, QUICK_STARTS) + 3


def measure(plan: Plan, step: Callable[[str], None]) -> tuple[Start, DaemonStatus]:
    device, starts = _device(plan), plan.times(STARTS, QUICK_STARTS)
    nbytes = _pool_bytes(plan, device)
    step("touch the machine's memory")
    _bare_seconds("touch", device, nbytes)
    times: list[tuple[float, ...]] = []
    for number in range(1, starts + 1):
        step(f"start a daemon, {size(nbytes)}")
        seconds, status, taken = _start(device, plan, nbytes, whole=number == starts)
        times.append(seconds)
    up, greeted, served, _ = (Spread.of(column) for column in zip(*times, strict=True))
    step("a bare context")
    context = _context_bytes(device)
    step("as much pinned memory in one call")
    pinned = _bare_seconds("touch" if device.type == "cpu" else "hostalloc", device, nbytes)
    staging = status.device.staging_bytes
    whole = times[-1][-1]
    return Start(nbytes, up, greeted, served, whole, pinned, taken, staging, context), status


def _start(
    device: torch.device, plan: Plan, nbytes: int, *, whole: bool
) -> tuple[tuple[float, ...], DaemonStatus, int]:
    """Seconds until socket, greeting, first store and the `whole` pool; status; device memory."""
    slab, free = shared_empty((2 * HOST_BLOCK,), device=device), _free_bytes(device)
    store = GPULoadStoreSpec(np.arange(SHAPE.factor)), CPULoadStoreSpec([0])
    marks = [time.perf_counter()]
    with own_daemon(plan, nbytes, timeout=TIMEOUT) as daemon:
        marks.append(time.perf_counter())
        with OffloadClient(daemon.directory, engine=NAME, timeout=TIMEOUT) as client:
            marks.append(time.perf_counter())
            with engine(daemon.directory, SHAPE, slab) as registered:
                registered.run([store], nap=0)
                marks.append(time.perf_counter())
                status = ready(daemon.directory) if whole else client.status()
                marks.append(time.perf_counter())
                return tuple(m - marks[0] for m in marks[1:]), status, free - _free_bytes(device)


def _device(plan: Plan) -> torch.device:
    """The daemon's device as torch numbers it here, its context made."""
    with own_daemon(plan, HOST_BLOCK) as daemon:
        device = torch_device(ready(daemon.directory).device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    return device


def _pool_bytes(plan: Plan, device: torch.device) -> int:
    if plan.pool_bytes is not None:
        return plan.pool_bytes
    usual = GPU_POOL if device.type == "cuda" else CPU_POOL
    return min(plan.pick(None, usual, QUICK_POOL), int(_available() * PART_OF_MEMORY) >> 21 << 21)


def _available() -> int:
    """Bytes that can be had now: the machine's, or what the control group leaves of them."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and limit.read_text().strip() != "max":
        return min(available << 10, int(limit.read_text()) - int(used.read_text()))
    return available << 10


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def _context_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    free = _free_bytes(device)
    with _bare("context", device) as process:
        assert process.stdout is not None
        up = process.stdout.readline()
        taken = free - _free_bytes(device)
        process.communicate("")
    if up.strip() != "up":
        raise Failed(
            Code.DRIVER,
            "cannot create a bare CUDA context; see the output above",
            process.returncode,
        )
    return taken


def _bare_seconds(mode: str, device: torch.device, nbytes: int) -> float:
    with _bare(mode, device, nbytes) as process:
        said, _ = process.communicate("", TIMEOUT)
    if process.returncode:
        raise Failed(
            Code.DRIVER,
            f"cannot allocate {nbytes} bytes of pinned memory; give a smaller --pool-gib",
            nbytes,
        )
    return float(said)


@contextlib.contextmanager
def _bare(mode: str, device: torch.device, nbytes: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that hears of no ctrl-c, and goes when this one is interrupted."""
    command = [sys.executable, "-P", str(bare.__file__), mode, str(device.index or 0), str(nbytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
