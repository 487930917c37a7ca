"""Latency of loads from the pool while a disk tier reads and writes, and while it is idle.

    python tests/bench/loads_beside_tier.py [--device 0] [--path /tmp] [--reps 5] [--seconds 4]

One session loads 16 blocks of 2 MiB at a time from the pool. Another session, in a namespace of its
own, keeps the tier busy: it stores blocks, which the tier writes, and requests evicted ones, which
the tier reads. Idle and busy phases alternate. Prints milliseconds.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import torch

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    offload_key,
)
from kvferry.client.tensors import shared_empty
from kvferry.testing.engine import until

BLOCK_BYTES, LOADED = 2 << 20, 16


def keys(numbers: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(offload_key(number.to_bytes(8, "big")) for number in numbers)


class Engine:
    """A session in a namespace of its own, with the GPU blocks of one job."""

    def __init__(self, daemon: LocalDaemon, name: str, device: str, host: int) -> None:
        with ExitStack() as stack:
            self.client = stack.enter_context(OffloadClient(daemon.directory, engine=name))
            fingerprint = Fingerprint(name, BLOCK_BYTES, key_bytes=12)
            self.num_blocks = self.client.open_namespace(
                fingerprint, cpu_bytes_to_use=host
            ).num_blocks
            tensor = shared_empty((LOADED, BLOCK_BYTES), torch.int8, device)
            tensor.zero_()
            self.client.register_kv_caches({"kv": tensor}, num_blocks=LOADED)
            self.manager = stack.enter_context(OffloadingManager(self.client))
            self._close = stack.pop_all().close
        self._jobs = count(1)

    def store(self, numbers: Sequence[int]) -> None:
        names = keys(numbers)
        self._run(GPULoadStoreSpec(range(len(names))), KeyLoadStoreSpec(names))

    def load(self, numbers: Sequence[int]) -> None:
        spec = self.manager.prepare_load(keys(numbers))
        self._run(spec, GPULoadStoreSpec(range(len(numbers))))
        self.manager.complete_load(spec.keys)

    def close(self) -> None:
        self._close()

    def _run(self, source: object, target: object) -> None:
        job = next(self._jobs)
        self.client.transfer_async(job, (source, target))  # type: ignore[arg-type]
        self.client.wait([job])
        (result,) = self.client.get_finished()
        assert result.success, result


class BusyTier:
    """A context in which the tier reads and writes all the time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._numbers = engine, count(0, LOADED)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        for _ in range(0, engine.num_blocks + 4 * LOADED, LOADED):
            first = next(self._numbers)
            engine.store(range(first, first + LOADED))

    def __enter__(self) -> None:
        self._ended.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            first = next(self._numbers)
            self._engine.store(range(first, first + LOADED))
            old = max(0, first - self._engine.num_blocks - 4 * LOADED)  # evicted by now
            self._engine.manager.prefetch(keys(range(old, old + LOADED)))
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--pool", type=float, default=8, help="GiB")
    options = parser.parse_args()
    device = "cpu" if options.device == "cpu" else f"cuda:{options.device}"
    root = Path(tempfile.mkdtemp(prefix="kvferry-loads-", dir=options.path))
    pool = int(options.pool * (1 << 30))
    tier: dict[str, Any] = {
        "tiers_disk_path": root,
        "tiers_disk_size": 4 * pool,
        "tiers_disk_write": "write_through",
    }
    try:
        with LocalDaemon(options.device, pool_bytes=pool, **tier) as daemon, ExitStack() as stack:
            loader = Engine(daemon, "loader", device, pool // 8)
            stack.callback(loader.close)
            writer = Engine(daemon, "writer", device, pool // 2)
            stack.callback(writer.close)
            measure(loader, BusyTier(writer), options)
    finally:
        shutil.rmtree(root)


def measure(loader: Engine, busy: BusyTier, options: argparse.Namespace) -> None:
    loader.store(range(LOADED))
    until(lambda: all(loader.manager.lookup(key) is Lookup.HIT for key in keys(range(LOADED))), 10)
    phase(loader, 1.0)
    ratios, rows = [], {"idle": list[float](), "busy": list[float]()}
    for _ in range(options.reps):
        idle = phase(loader, options.seconds)
        before = loader.client.status().tiers[0]
        with busy:
            times = phase(loader, options.seconds)
        after = loader.client.status().tiers[0]
        written = (after.written_bytes - before.written_bytes) / options.seconds / 1e9
        read = (after.read_bytes - before.read_bytes) / options.seconds / 1e9
        p99 = [statistics.quantiles(each, n=100)[98] for each in (idle, times)]
        rows["idle"] += idle
        rows["busy"] += times
        ratios.append(p99[1] / p99[0])
        print(
            f"p99 idle {p99[0]:.3f}  busy {p99[1]:.3f} ms: {ratios[-1]:.2f}; the tier wrote"
            f" {written:.2f} and read {read:.2f} GB/s",
            flush=True,
        )
    for name, each in rows.items():
        cuts = statistics.quantiles(each, n=100)
        print(
            f"{name}: {len(each)} loads of {LOADED} blocks, p50 {cuts[49]:.3f} p99 {cuts[98]:.3f}"
        )
    middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"p99 busy over idle: {middle:.2f} ({least:.2f} to {most:.2f})")


def phase(loader: Engine, seconds: float) -> list[float]:
    """Milliseconds of each load."""
    times, end = [], time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        loader.load(range(LOADED))
        times.append(1e3 * (time.perf_counter() - begun))
    return times


if __name__ == "__main__":
    main()
