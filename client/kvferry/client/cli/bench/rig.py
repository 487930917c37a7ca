"""What every measurement stands on: a daemon whose pool is ready, and a slab on its device.

The slab has two halves. Transfers read blocks of one and write blocks of the other, in random
order over all of it; the host pool is used likewise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvferry.client import DaemonStatus, LocalDaemon, OffloadClient
from kvferry.client.cli.bench.engine import HOST_BLOCK, NAME, Engine, Shape, engine
from kvferry.client.cli.bench.raw import RawCopy
from kvferry.client.cli.status import locate
from kvferry.client.cli.units import size
from kvferry.client.conversation import timed_out
from kvferry.client.tensors import shared_empty
from kvferry.proto.errors import Code, Refused
from kvferry.proto.libcuda import driver
from kvferry.proto.messages import DeviceInfo

MIN_HALF = 16 << 20
POOL_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """nbytes: to move each way in one go. directory: of a running daemon, or None."""

    device: str
    directory: Path | None
    nbytes: int
    sizes: tuple[int, ...]
    reps: int
    quick: bool

    @property
    def half_bytes(self) -> int:
        """Half of the slab: whole host blocks, at least one of each size."""
        largest = max(Shape.of(page_bytes).host_block_bytes for page_bytes in self.sizes)
        return -(-max(self.nbytes, largest, MIN_HALF) // HOST_BLOCK) * HOST_BLOCK


class Rig:
    def __init__(self, directory: Path, status: DaemonStatus, half_bytes: int) -> None:
        self.directory, self.daemon = directory, status
        device = torch_device(status.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.slab = shared_empty((2 * half_bytes,), device=device)
        self.slab.view(torch.int64).random_()
        self.raw = RawCopy(self.slab, half_bytes)

    def engine(self, shape: Shape) -> contextlib.AbstractContextManager[Engine]:
        return engine(self.directory, shape, self.slab)


@contextlib.contextmanager
def open_rig(plan: Plan) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        if plan.directory is None:
            device = plan.device
            if device == "auto":
                device = "0" if torch.cuda.is_available() else "cpu"
            pool_bytes = 2 * plan.half_bytes
            daemon = stack.enter_context(LocalDaemon(device, pool_bytes=pool_bytes))
            directory = daemon.directory
        else:
            directory = locate(plan.directory)
        status = _ready(directory)
        _check_room(status, 2 * plan.half_bytes)
        yield Rig(directory, status, plan.half_bytes)


def torch_device(info: DeviceInfo) -> torch.device:
    """The daemon's device, as this process numbers it. Raises Refused (DEVICE_MISMATCH)."""
    if info.kind == "cpu":
        return torch.device("cpu")
    for ordinal in range(torch.cuda.device_count()):
        if driver().device_uuid(ordinal) == info.uuid:
            return torch.device("cuda", ordinal)
    raise Refused(
        Code.DEVICE_MISMATCH,
        "torch does not see the daemon's GPU: set CUDA_VISIBLE_DEVICES to include it, and install "
        "a torch built with CUDA",
        info.uuid,
    )


def _ready(directory: Path) -> DaemonStatus:
    """The daemon's status once all of its pool is registered: filling it takes the link."""
    with OffloadClient(directory, engine=NAME, client="kvferry bench") as client:
        deadline = time.monotonic() + POOL_TIMEOUT
        while (status := client.status()).pool.pinned_bytes < status.pool.size_bytes:
            if time.monotonic() > deadline:
                raise timed_out("the daemon did not register its pool", str(directory))
            time.sleep(0.05)
        return status


def _check_room(status: DaemonStatus, nbytes: int) -> None:
    """Refuse to push what other engines left out of the pool of a daemon in service."""
    ours = sum(e.host_blocks * e.host_block_bytes for e in status.engines if e.name == NAME)
    free = status.pool.size_bytes - status.pool.reserved_bytes + ours
    if free < nbytes:
        raise Refused(
            Code.POOL_FULL,
            f"the bench needs {size(nbytes)} of the daemon's pool, and {size(free)} are free: "
            "give a smaller --gib, or leave --directory out to measure a daemon of its own",
            str(status.pool.size_bytes),
        )
