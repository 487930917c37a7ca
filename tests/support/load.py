"""Many small clients at once: how many jobs a second, and how long one takes.

    python -m support.load --clients 64 --rate 10000 --seconds 20

Each client is an engine with a region of its own and offers its part of the rate, one block a job,
whether or not the ones before are done (an open loop). Clients share processes, as many as there
are cores. A job is timed from when it was due: that it came late to be sent counts, too. With
`--echo` no daemon is asked, but a bare socket that sends all back (echo.py): what lies below.
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
from support.traffic_statistics import TrafficStatistics, percentile, together
from support.zeromq_echo import ZeroMQEcho, echoing

BLOCKS = 64
PAGE = 4096
STEP = 2e-3
"""Seconds between two looks of a process at all its clients, as an engine looks once a step."""


@dataclass(frozen=True)
class LoadOptions:
    """clients and rate: of all together. processes: among how many they are shared."""

    clients: int = 64
    rate: float = 10_000.0
    seconds: float = 10.0
    processes: int = os.cpu_count() or 1
    device: str = "cpu"
    echo: bool = False
    patience: float = 30.0


class Offering:
    """One client: the next job is due at a fixed time."""

    def __init__(self, directory: Path, name: str, device: str, every: float) -> None:
        self.client = OffloadClient(directory, engine=name, timeout=60)
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
        self._most = min(limits.max_stores, limits.max_loads)
        """As if all went one way."""
        self.under_way: dict[int, float] = {}
        self.number = 0
        self.due = 0.0

    def _store_all(self) -> None:
        """So that there is something to load in each host block."""
        blocks = np.arange(BLOCKS)
        self.client.transfer_async(0, (GPULoadStoreSpec(blocks), CPULoadStoreSpec(blocks)))
        self.client.wait({0}, timeout=60)
        (stored,) = self.client.get_finished()
        if not stored.success:
            raise stored.error or RuntimeError(f"{stored} for the first store")

    def offer(self, now: float, tally: TrafficStatistics) -> None:
        """Submit everything that is due, as far as the daemon takes it."""
        while self.due <= now and len(self.under_way) < self._most:
            spec = self._specs[self.number % BLOCKS]
            self.number += 1
            self.under_way[self.number] = self.due
            self.client.transfer_async(self.number, spec if self.number % 2 else spec[::-1])
            tally.counts["offered"] += 1
            self.due += self._every

    def take(self, tally: TrafficStatistics) -> None:
        """Take in outcomes; each has its job. Whoever waits for none does not look."""
        if not self.under_way:
            return
        for result in self.client.get_finished():
            due = self.under_way.pop(result.job_id, None)
            tally.counts[str(result.outcome)] += 1
            if due is None or not result.success:
                tally.complain(f"{result} for a job due at {due}")
            else:
                tally.took(time.perf_counter() - due)

    def close(self) -> None:
        self.client.close()


def serve(pipe: Connection, directory: Path, options: LoadOptions, first: int, count: int) -> None:
    """Offer for some seconds from when told to, and send the tally."""
    every = options.clients / options.rate
    offerings: Sequence[Offering | ZeroMQEcho] = (
        [ZeroMQEcho(directory, every) for _ in range(count)]
        if options.echo
        else [
            Offering(directory, f"load-{number}", options.device, every)
            for number in range(first, first + count)
        ]
    )
    pipe.send("ready")
    pipe.recv()
    tally, began = TrafficStatistics(f"from {first}"), time.perf_counter()
    for at, offering in enumerate(offerings):
        offering.due = began + every * at / len(offerings)
    end = began + options.seconds
    while (now := time.perf_counter()) < end:
        for offering in offerings:
            offering.take(tally)
            offering.offer(now, tally)
        time.sleep(max(0.0, now + STEP - time.perf_counter()))
    deadline = end + options.patience
    while any(one.under_way for one in offerings) and time.perf_counter() < deadline:
        time.sleep(STEP)
        for offering in offerings:
            offering.take(tally)
    tally.counts["milliseconds"] = round(1e3 * (time.perf_counter() - began))
    for offering in offerings:
        if offering.under_way:
            tally.complain(f"{len(offering.under_way)} jobs without an outcome")
        offering.close()
    pipe.send(tally)


def run(directory: Path, options: LoadOptions) -> TrafficStatistics:
    """All clients at once; what they saw together."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    for share in np.array_split(np.arange(options.clients), options.processes):
        ours, theirs = context.Pipe()
        arguments = theirs, directory, options, int(share[0]), len(share)
        processes.append(context.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    tallies: list[TrafficStatistics] = [pipe.recv() for pipe in pipes]
    for process, pipe in zip(processes, pipes, strict=True):
        process.join()
        pipe.close()
    total = together(tallies)
    total.counts["milliseconds"] = max(tally.counts["milliseconds"] for tally in tallies)
    return total


def record(options: LoadOptions, total: TrafficStatistics) -> dict[str, Any]:
    """What is printed, and written down."""
    return {
        "device": "echo" if options.echo else options.device,
        "clients": options.clients,
        "processes": options.processes,
        "cores": os.cpu_count(),
        "offered_per_second": options.rate,
        "done_per_second": round(total.counts["done"] / (total.counts["milliseconds"] / 1e3)),
        "jobs": total.counts["offered"],
        "p50_us": round(1e6 * percentile(total.seconds, 0.5)),
        "p99_us": round(1e6 * percentile(total.seconds, 0.99)),
        "complaints": total.complaints,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m support.load",
        description="Many small clients at once: how many jobs a second, and how long one takes.",
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rate", type=float, default=10_000.0, help="jobs a second, of all")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help='"cpu", or a GPU by index')
    parser.add_argument("--echo", action="store_true", help="ZeroMQ alone, without a daemon")
    parser.add_argument("--json", type=Path, help="file to write the record to")
    given = parser.parse_args(arguments)
    device = "cpu" if given.device == "cpu" else f"cuda:{given.device}"
    options = LoadOptions(
        given.clients, given.rate, given.seconds, given.processes, device, given.echo
    )
    if options.echo:
        with echoing() as directory:
            found = record(options, run(directory, options))
    else:
        with LocalDaemon(given.device, pool_bytes=options.clients * BLOCKS * PAGE) as daemon:
            found = record(options, run(daemon.directory, options))
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(1 if found["complaints"] else 0)


if __name__ == "__main__":
    main()
