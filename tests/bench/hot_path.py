"""Python time of one job, phase by phase: microseconds, p50 and p99.

    python tests/bench/hot_path.py [jobs, default 300]

submit   in the client: ClientSession.submit
plan     in the daemon's event loop: decode_client_message and Core.handle
start    in the device worker: from receiving the command to the call of CopyEngine.submit

Stores and loads alternate, with one block of 2 MiB and with 2,048 blocks of 4 KiB, in random order.
*awake*: the phases run one after another. *asleep*: before each phase its thread sleeps for 1 ms
and other memory replaces the CPU's caches, as for a single job on an idle machine. Sockets and
wake-ups are not included: the client, the core, and a device worker with the reference engine all
run in this process.
"""

from __future__ import annotations

import argparse
import queue
import time
from itertools import count, cycle, islice
from typing import Any

import numpy as np

from kvferry.client.session import ClientSession
from kvferry.daemon.core.actions import MapTensors, Report, StartTransfer
from kvferry.daemon.core.core import Core
from kvferry.daemon.core.identity import DaemonIdentity
from kvferry.daemon.core.layout import Extent
from kvferry.daemon.device.mappings import MapCommand
from kvferry.daemon.device.worker import Command, DeviceWorker
from kvferry.daemon.engine.base import Mapping
from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.daemon.memory.pool import HostPool
from kvferry.proto.codec import decode_client_message
from kvferry.proto.messages import PROTOCOL, AllocateKVCaches, Hello, Submit
from kvferry.proto.specs import (
    CPULoadStoreSpec,
    Direction,
    GPULoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from kvferry.proto.status import Limits

# Blocks of a job, bytes of a block, blocks to choose from.
CASES = {"1 block": (1, 2 << 20, 64), "2,048 blocks": (2048, 4096, 8192)}
PHASES = ("submit", "plan", "start")
WARM_UPS, ASLEEP = 20, 1e-3
OTHERS = np.zeros(4 << 20, dtype=np.uint8)
CACHE_LINE = 64
SESSION = "bench"

clock = time.perf_counter


def main(jobs: int) -> None:
    print(f"{'us':28}{'awake':>9}{'':9}{'asleep':>9}")
    print(f"{'':28}{'p50':>9}{'p99':>9}{'p50':>9}{'p99':>9}")
    for name, case in CASES.items():
        fixture = HotPathFixture(*case)
        columns = [
            np.quantile(fixture.run(jobs, asleep), (0.5, 0.99), 0) for asleep in (False, True)
        ]
        fixture.close()
        for phase, figures in zip(PHASES, np.concatenate(columns).T * 1e6, strict=True):
            print(f"{name:20}{phase:8}" + "".join(f"{figure:9.1f}" for figure in figures))


class NoCopyEngine(ReferenceEngine):
    """Records when a chunk is submitted."""

    submitted = 0.0

    def submit(self, direction: Direction, mapping: Mapping, run: Extent) -> Any:
        self.submitted = clock()
        return super().submit(direction, mapping, run)


class StampedWorker(DeviceWorker):
    """Records when it receives a command."""

    asleep = False
    received = 0.0

    def _handle(self, command: Command) -> None:
        if self.asleep:
            sleep()
        self.received = clock()
        super()._handle(command)


class HotPathFixture:
    """A client, a core and a device worker, and one registration of one tensor."""

    def __init__(self, blocks: int, block_bytes: int, num_blocks: int) -> None:
        self.blocks, self.num_blocks = blocks, num_blocks
        self.random, self.job_ids = np.random.default_rng(0), count(1)
        self.reports: queue.SimpleQueue[list[Report]] = queue.SimpleQueue()
        self.engine = NoCopyEngine()
        self.pool = HostPool(num_blocks * block_bytes, num_blocks * block_bytes)
        self.pool.ready_bytes = self.pool.nbytes
        self.worker = StampedWorker(self.engine, self.pool, self.reports.put, print)
        self.worker.start()
        self.client = ClientSession(SESSION, SESSION)
        limits = Limits(1 << 25, 1 << 20, 64)
        identity = DaemonIdentity("", "", 0, self.engine.info, limits, 0.0)
        self.core = Core(identity, self.pool.nbytes)
        self.core.open_session(SESSION, Hello(PROTOCOL, PROTOCOL, SESSION, SESSION))
        tensor, ref = TensorLayout(num_blocks, block_bytes, block_bytes), TensorRef(0, block_bytes)
        request = AllocateKVCaches(1, KVLayout((tensor,), ((ref,),)))
        (action,) = (
            a for a in self.core.handle(SESSION, request, 0.0) if isinstance(a, MapTensors)
        )
        self.worker.post_command(MapCommand(action, (), None))
        self.core.report(self.report())
        every = np.arange(num_blocks)  # blocks must be stored before they can be loaded
        (start,) = self.core.handle(
            SESSION, Submit(0, GPULoadStoreSpec(every), CPULoadStoreSpec(every)), 0.0
        )
        assert isinstance(start, StartTransfer)
        self.worker.post_command(start)
        self.core.report(self.report())

    def run(self, jobs: int, asleep: bool) -> list[tuple[float, float, float]]:
        """Seconds of each phase, job by job."""
        self.worker.asleep = asleep
        directions = islice(cycle(Direction), WARM_UPS + jobs)
        return [self.job(direction, asleep) for direction in directions][WARM_UPS:]

    def job(self, direction: Direction, asleep: bool) -> tuple[float, float, float]:
        gpu = GPULoadStoreSpec(self.random.permutation(self.num_blocks)[: self.blocks])
        host = CPULoadStoreSpec(self.random.permutation(self.num_blocks)[: self.blocks])
        spec = (gpu, host) if direction is Direction.STORE else (host, gpu)
        job_id = next(self.job_ids)
        if asleep:
            sleep()
        began = clock()
        (data,) = self.client.submit(job_id, spec, 0)
        submit = clock() - began
        if asleep:
            sleep()
        began = clock()
        (start,) = self.core.handle(SESSION, decode_client_message(data), began)
        plan = clock() - began
        assert isinstance(start, StartTransfer)
        self.worker.post_command(start)
        self.core.report(self.report())
        return submit, plan, self.engine.submitted - self.worker.received

    def report(self) -> Report:
        (report,) = self.reports.get()
        return report

    def close(self) -> None:
        self.worker.close()
        self.pool.close(self.engine)


def sleep() -> None:
    time.sleep(ASLEEP)
    OTHERS[::CACHE_LINE] += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", type=int, nargs="?", default=300)
    main(parser.parse_args().jobs)
