"""Many small clients at once: jobs per second and latency.

    python -m support.load --clients 64 --rate 10000 --seconds 20

Each client is an engine with a region of its own. It submits its part of the rate, one block per
job, whether or not earlier jobs have ended (an open loop). The clients share as many processes as
there are cores. A job is timed from when it was due, so a late submission counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, LocalDaemon, OffloadClient
from kvferry.client.tensors import shared_empty
from support.time_limits import TIMEOUT
from support.traffic_statistics import TrafficStatistics, merge_statistics, percentile

BLOCKS = 64
PAGE = 4096
# Seconds between two polls of all clients of a process; an engine polls once per step.
STEP = 2e-3


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load test.

    clients, rate (jobs per second): totals. processes: number of processes that share them.
    """

    clients: int = 64
    rate: float = 10_000.0
    seconds: float = 10.0
    processes: int = os.cpu_count() or 1
    device: str = "cpu"
    drain_seconds: float = 30.0


class LoadClient:
    """One client. Its jobs are due at fixed times."""

    def __init__(self, directory: Path, name: str, device: str, every: float) -> None:
        self.client = OffloadClient(directory, engine=name, timeout=TIMEOUT)
        self._tensor = shared_empty((BLOCKS, PAGE), device=device)
        self.client.register_kv_caches(
            {"layer": self._tensor}, num_blocks=BLOCKS, host_bytes=BLOCKS * PAGE
        )
        self._store_all()
        self._every = every
        self._specs = [
            (GPULoadStoreSpec(np.array([at])), CPULoadStoreSpec(np.array([at])))
            for at in range(BLOCKS)
        ]
        limits = self.client.daemon.limits
        # Any part of the jobs in flight may be of one direction.
        self._max_in_flight = min(limits.max_stores, limits.max_loads)
        self.in_flight: dict[int, float] = {}
        self.number = 0
        self.due = 0.0

    def _store_all(self) -> None:
        """Store each host block once, so that it can be loaded."""
        blocks = np.arange(BLOCKS)
        self.client.transfer_async(0, (GPULoadStoreSpec(blocks), CPULoadStoreSpec(blocks)))
        self.client.wait({0}, timeout=TIMEOUT)
        (stored,) = self.client.get_finished()
        if not stored.success:
            raise stored.error or RuntimeError(f"{stored} for the first store")

    def submit_due(self, now: float, statistics: TrafficStatistics) -> None:
        """Submit all jobs that are due, up to the limit of jobs in flight."""
        while self.due <= now and len(self.in_flight) < self._max_in_flight:
            spec = self._specs[self.number % BLOCKS]
            self.number += 1
            self.in_flight[self.number] = self.due
            self.client.transfer_async(self.number, spec if self.number % 2 else spec[::-1])
            statistics.counts["offered"] += 1
            self.due += self._every

    def receive_results(self, statistics: TrafficStatistics) -> None:
        """Receive results, if any job is in flight."""
        if not self.in_flight:
            return
        for result in self.client.get_finished():
            due = self.in_flight.pop(result.job_id, None)
            statistics.counts[str(result.outcome)] += 1
            if due is None or not result.success:
                statistics.add_error(f"{result} for a job due at {due}")
            else:
                statistics.add_latency(time.perf_counter() - due)

    def close(self) -> None:
        self.client.close()


def run_clients(
    pipe: Connection, directory: Path, options: LoadOptions, first: int, count: int
) -> None:
    """Run some clients for `options.seconds` after a message arrives; send their statistics."""
    every = options.clients / options.rate
    clients = [
        LoadClient(directory, f"load-{number}", options.device, every)
        for number in range(first, first + count)
    ]
    pipe.send("ready")
    pipe.recv()
    statistics, began = TrafficStatistics(f"from {first}"), time.perf_counter()
    for at, client in enumerate(clients):
        client.due = began + every * at / len(clients)
    end = began + options.seconds
    while (now := time.perf_counter()) < end:
        for client in clients:
            client.receive_results(statistics)
            client.submit_due(now, statistics)
        time.sleep(max(0.0, now + STEP - time.perf_counter()))
    deadline = end + options.drain_seconds
    while any(client.in_flight for client in clients) and time.perf_counter() < deadline:
        time.sleep(STEP)
        for client in clients:
            client.receive_results(statistics)
    statistics.counts["milliseconds"] = round(1e3 * (time.perf_counter() - began))
    for client in clients:
        if client.in_flight:
            statistics.add_error(f"{len(client.in_flight)} jobs without a result")
        client.close()
    pipe.send(statistics)


def run(directory: Path, options: LoadOptions) -> TrafficStatistics:
    """Run all clients at once. Returns their merged statistics."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    for share in np.array_split(np.arange(options.clients), options.processes):
        ours, theirs = context.Pipe()
        arguments = theirs, directory, options, int(share[0]), len(share)
        processes.append(context.Process(target=run_clients, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    parts: list[TrafficStatistics] = [pipe.recv() for pipe in pipes]
    for process, pipe in zip(processes, pipes, strict=True):
        process.join()
        pipe.close()
    total = merge_statistics(parts)
    total.counts["milliseconds"] = max(part.counts["milliseconds"] for part in parts)
    return total


def record(options: LoadOptions, total: TrafficStatistics) -> dict[str, Any]:
    """The printed and saved record."""
    return {
        "device": options.device,
        "clients": options.clients,
        "processes": options.processes,
        "cores": os.cpu_count(),
        "offered_per_second": options.rate,
        "done_per_second": round(total.counts["done"] / (total.counts["milliseconds"] / 1e3)),
        "jobs": total.counts["offered"],
        "p50_us": round(1e6 * percentile(total.latencies, 0.5)),
        "p99_us": round(1e6 * percentile(total.latencies, 0.99)),
        "errors": total.errors,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m support.load",
        description="Many small clients at once: jobs per second and latency.",
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--rate", type=float, default=10_000.0, help="jobs per second, of all clients"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help='"cpu", or a GPU by index')
    parser.add_argument("--json", type=Path, help="file to write the record to")
    args = parser.parse_args(arguments)
    device = "cpu" if args.device == "cpu" else f"cuda:{args.device}"
    options = LoadOptions(args.clients, args.rate, args.seconds, args.processes, device)
    with LocalDaemon(args.device, pool_bytes=options.clients * BLOCKS * PAGE) as daemon:
        result = record(options, run(daemon.directory, options))
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(1 if result["errors"] else 0)


if __name__ == "__main__":
    main()
