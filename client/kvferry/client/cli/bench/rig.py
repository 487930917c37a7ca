"""The rig of all measurements: a daemon whose pool is registered, and a buffer on its device.

The buffer (`slab`) has two halves. Transfers read blocks of one half and write blocks of the other,
in random order; the same holds for the host pool.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from kvferry.client import DaemonStatus, LocalDaemon, OffloadClient
from kvferry.client.cli.bench.bench_engine import NAME, BenchEngine, Shape, register_engine
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.raw import RawCopy
from kvferry.client.cli.status import locate_daemon
from kvferry.client.cli.units import size
from kvferry.client.tensors import shared_empty
from kvferry.client.wire import timed_out
from kvferry.cuda.driver import driver
from kvferry.proto.errors import Code, Refused
from kvferry.proto.status import DeviceInfo

POOL_TIMEOUT = 300.0


class BenchRig:
    def __init__(self, directory: Path, status: DaemonStatus, half_bytes: int) -> None:
        self.directory, self.daemon = directory, status
        device = torch_device(status.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.slab = shared_empty((2 * half_bytes,), device=device)
        self.slab.view(torch.int64).random_()
        self.raw = RawCopy(self.slab, half_bytes)

    @contextlib.contextmanager
    def engine(self, shape: Shape) -> Iterator[BenchEngine]:
        """An engine that has stored into each of its host blocks."""
        with register_engine(self.directory, shape, self.slab) as engine:
            engine.fill()
            yield engine


@contextlib.contextmanager
def open_rig(plan: Plan) -> Iterator[BenchRig]:
    with contextlib.ExitStack() as stack:
        if plan.directory is None:
            daemon = LocalDaemon(device_of(plan), pool_bytes=plan.rig_pool_bytes)
            directory = stack.enter_context(daemon).directory
        else:
            directory = locate_daemon(plan.directory)
        status = wait_pool_registered(directory)
        _check_room(status, plan.rig_pool_bytes)
        yield BenchRig(directory, status, plan.half_bytes)


def device_of(plan: Plan) -> str:
    """The --device of a daemon that the bench starts."""
    if plan.device.lower() == "cpu":
        return "cpu"
    if plan.device != "auto":
        return plan.device
    return "0" if torch.cuda.is_available() else "cpu"


def torch_device(info: DeviceInfo) -> torch.device:
    """The daemon's device in this process's numbering. Raises Refused (DEVICE_MISMATCH)."""
    if info.kind == "cpu":
        return torch.device("cpu")
    for ordinal in range(torch.cuda.device_count()):
        if driver().device_uuid(ordinal) == info.uuid:
            return torch.device("cuda", ordinal)
    raise Refused(
        Code.DEVICE_MISMATCH,
        f"torch does not see the daemon's GPU {info.uuid}; set CUDA_VISIBLE_DEVICES to include it, "
        "and install a torch built with CUDA",
        info.uuid,
    )


def wait_pool_registered(directory: Path) -> DaemonStatus:
    """The daemon's status once all of its pool is registered, which would disturb measurements."""
    with OffloadClient(directory, engine=NAME, client="kvferry bench") as client:
        deadline = time.monotonic() + POOL_TIMEOUT
        while (status := client.status()).pool.pinned_bytes < status.pool.size_bytes:
            if time.monotonic() > deadline:
                raise timed_out("the daemon has not registered its pool", str(directory))
            time.sleep(0.02)
        return status


def _check_room(status: DaemonStatus, nbytes: int) -> None:
    """Raise Refused (POOL_FULL) if the bench would evict blocks of other engines."""
    ours = sum(e.host_blocks * e.host_block_bytes for e in status.engines if e.name == NAME)
    free = status.pool.size_bytes - status.pool.reserved_bytes + ours
    if free < nbytes:
        raise Refused(
            Code.POOL_FULL,
            f"the bench needs {size(nbytes)} of the daemon's pool, but {size(free)} are free; "
            "give a smaller --gib, or leave --directory out to start a daemon",
            size(nbytes),
        )
