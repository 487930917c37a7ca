"""Latency of loading one block while stores are queued, for several source trees of kvferry.

    python tests/bench/queued_alternating.py --device 0 before=../before after=.
    python tests/bench/queued_alternating.py --device clock before=../before after=.

QUEUED_JOBS stores have half of the GPU blocks each and are submitted again when they complete, so
that their number is constant. The loaded block has 2 MiB. It is timed from submit to result, idle
and with the stores queued. A load that is sent right after a store waits until the store is
planned, as any message waits for the previous one. These loads are reported separately.

Two runs differ by more than most changes do. So each tree (a checkout, or a `git archive` of one)
has its own daemon and engine, all of them run at the same time, and each moves a few blocks at a
time while the others are idle. Name a tree twice to see the noise.

A GPU that only keeps time (clock_daemon.py) works on any machine with two idle cores. It compares
the Python code, threads and sockets of the trees, not the work of a GPU. Code that releases the GIL
still uses one of the few cores.

    us       loads of a tree: median, 90th, 95th and 99th percentile, idle; the same with stores
    x        the 99th percentile over that of the idle ones; least and most of groups of ten rounds
    submit   us, median of loads that are sent right after a store, which the others do not include
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from kvferry.client import TransferSpec
    from kvferry.client.cli.bench.engine import BenchEngine

QUANTILES = (0.5, 0.9, 0.95, 0.99)
# Rounds per group, for the range of the 99th percentile.
GROUP = 10
# Bytes of a page, and the copy mode. A calibration beside other daemons would be wrong.
CASES = ((2 << 20, "direct"), (32 << 10, "staged"))
QUEUED_JOBS = 8
WARM_UPS = 20
TIMEOUT = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", metavar="NAME=TREE", help="trees to compare")
    parser.add_argument("--device", default="0", help="a GPU, cpu, or clock")
    parser.add_argument("--gib", type=float, default=0.5, help="GiB of one of eight stores")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each tree")
    parser.add_argument("--trips", type=int, default=200, help="loads of each kind in a round")
    parser.add_argument("--work", nargs=2, metavar=("PAGE", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.device, options.gib, int(options.work[0]), options.work[1])
    elif not options.trees:
        parser.error("give at least one tree, as NAME=TREE")
    for page_bytes, mode in () if options.work else CASES:
        compare(options, page_bytes, mode)


def compare(options: argparse.Namespace, page_bytes: int, mode: str) -> None:
    with contextlib.ExitStack() as stack:
        workers: list[TreeWorker] = []
        for tree in options.trees:
            name, _, path = tree.partition("=")
            worker = TreeWorker(name, Path(path), options, page_bytes, mode)
            workers.append(stack.enter_context(worker))
        for number in range(options.rounds):
            for worker in random.sample(workers, len(workers)):
                for kind in ("idle", "behind") if number % 2 else ("behind", "idle"):
                    worker.turn(kind, options.trips)
    print(f"pages of {page_bytes >> 10} KiB, {mode}, {options.rounds} rounds of {options.trips}")
    print(f"{'us':12}{'idle':>7}{'behind':>28}{'x':>30}{'least..most':>12}{'submit':>8}")
    for worker in workers:
        worker.show()


class TreeWorker:
    """The process of a tree. Its daemon is a child of that process."""

    def __init__(
        self, name: str, tree: Path, options: argparse.Namespace, page_bytes: int, mode: str
    ) -> None:
        self._name = name
        self._seen: dict[str, list[list[float]]] = {"idle": [], "behind": []}
        self._after_submit: list[float] = []
        path = [str(tree.resolve() / part) for part in ("proto", "client", "daemon")]
        work = ("--device", options.device, "--gib", str(options.gib))
        self._process = subprocess.Popen(
            [sys.executable, __file__, *work, "--work", str(page_bytes), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])},
        )

    def __enter__(self) -> TreeWorker:
        if self._answer() != "ready":
            raise SystemExit(f"{self._name} is not ready; see its output above")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def turn(self, kind: str, trips: int) -> None:
        assert self._process.stdin is not None
        print(kind, trips, file=self._process.stdin, flush=True)
        seconds, after_submit = json.loads(self._answer())
        self._seen[kind].append(seconds)
        self._after_submit += after_submit

    def show(self) -> None:
        idle, behind = ([np.array(turn) * 1e6 for turn in self._seen[k]] for k in self._seen)
        starts = range(0, len(idle), GROUP)
        times = [_ratio(idle[at : at + GROUP], behind[at : at + GROUP]) for at in starts]
        cells = [f"{us:7.0f}" for turns in (idle, behind) for us in _quantiles(turns)]
        print(
            f"{self._name:12}" + "".join(cells),
            f"   {_ratio(idle, behind):5.2f}  {min(times):.2f}..{max(times):.2f}",
            f"{1e6 * float(np.median(self._after_submit)):7.0f}",
        )

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _quantiles(turns: list[Any]) -> list[float]:
    return [float(us) for us in np.quantile(np.concatenate(turns), QUANTILES)]


def _ratio(idle: list[Any], behind: list[Any]) -> float:
    return _quantiles(behind)[-1] / _quantiles(idle)[-1]


def work(device: str, gib: float, page_bytes: int, mode: str) -> None:
    """Run the commands from standard input. This process has one tree on its path."""
    from kvferry.client.cli.bench.engine import BenchEngine, Shape
    from kvferry.client.cli.bench.plan import Plan
    from kvferry.client.cli.bench.rig import open_rig

    if device == "clock":  # there are few cores, so polling must yield
        cast(Any, BenchEngine).fetch_results = _yielding(BenchEngine.fetch_results)
    answers, sys.stdout = sys.stdout, sys.stderr
    plan = Plan(device, None, int(gib * (1 << 30)), None, 1, False)
    host_bytes = (QUEUED_JOBS + 1) * plan.half_bytes
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(_daemon(device, host_bytes, mode))
        rig = stack.enter_context(open_rig(replace(plan, directory=daemon.directory)))
        engine = stack.enter_context(rig.engine(Shape.of(page_bytes), host_bytes))
        loads, stores = QueuedLoads(engine), queued_stores(engine)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            kind, trips = line.split()
            if kind == "behind":
                loads.queue(stores)
                seconds = loads.trips_behind(int(trips))
                loads.drain()
            else:
                seconds = loads.trips(int(trips)), []
            print(json.dumps(seconds), file=answers, flush=True)


class QueuedLoads:
    """Loads of one block, from the last part of the host blocks to the last half of the GPU's."""

    def __init__(self, engine: BenchEngine) -> None:
        self._engine, self._random = engine, np.random.default_rng(4)
        self._stores: dict[int, TransferSpec] = {}
        # Whether stores were submitted since the last load.
        self._submitted = False

    def queue(self, stores: list[TransferSpec]) -> None:
        for spec in stores:
            self._stores[self._engine.submit(spec)] = spec
            self._submitted = True

    def trips(self, times: int) -> list[float]:
        return [self._trip(self._spec()) for _ in range(times + WARM_UPS)][WARM_UPS:]

    def trips_behind(self, times: int) -> tuple[list[float], list[float]]:
        """Seconds of loads that were not sent right after a store, and of those that were.

        If all were sent right after a store, all are in the first list.
        """
        others, after_submit = list[float](), list[float]()
        self.trips(0)
        for _ in range(times):
            submitted = self._submitted
            seconds = self._trip(self._spec())
            (after_submit if submitted else others).append(seconds)
        return (others, after_submit) if others else (after_submit, [])

    def drain(self) -> None:
        self._engine.wait_results(len(self._stores))
        self._stores.clear()

    def _spec(self) -> TransferSpec:
        from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec

        engine, factor = self._engine, self._engine.shape.factor
        spare = engine.host_blocks * QUEUED_JOBS // (QUEUED_JOBS + 1)
        host = self._random.integers(spare, engine.host_blocks, size=1)
        first = self._random.integers(engine.num_blocks // 2, engine.num_blocks - factor)
        return CPULoadStoreSpec(host), GPULoadStoreSpec(np.arange(first, first + factor))

    def _trip(self, spec: TransferSpec) -> float:
        """Seconds of one load. Stores that complete meanwhile are submitted again afterwards."""
        self._submitted = False
        begin = time.perf_counter()
        load, completed = self._engine.submit(spec), list[int]()
        while load not in completed:
            completed += [result.job_id for result in self._engine.fetch_results()]
            if time.perf_counter() > begin + TIMEOUT:
                raise SystemExit(f"load {load} did not complete within {TIMEOUT:g} s")
        seconds = time.perf_counter() - begin
        completed.remove(load)
        self.queue([self._stores.pop(job_id) for job_id in completed])
        return seconds


def queued_stores(engine: BenchEngine) -> list[TransferSpec]:
    """Stores of the first half of the GPU blocks, each in another order, to other host blocks."""
    from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec
    from kvferry.proto.specs import MAX_BLOCK_IDS

    random, factor = np.random.default_rng(5), engine.shape.factor
    each = min(engine.host_blocks // (QUEUED_JOBS + 1), MAX_BLOCK_IDS // factor)
    hosts = random.permutation(each * QUEUED_JOBS).reshape(QUEUED_JOBS, each)
    blocks = [random.permutation(engine.num_blocks // 2)[: each * factor] for _ in hosts]
    return [(GPULoadStoreSpec(b), CPULoadStoreSpec(h)) for b, h in zip(blocks, hosts, strict=True)]


def _yielding(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def yield_and_take(engine: Any) -> Any:
        os.sched_yield()
        return take(engine)

    return yield_and_take


def _daemon(device: str, pool_bytes: int, mode: str) -> Any:
    from kvferry.client import LocalDaemon

    if device != "clock":
        return LocalDaemon(device, pool_bytes=pool_bytes, copy_mode=mode)

    class ClockDaemon(LocalDaemon):
        def _start(self, timeout: float) -> None:
            self.command[1:3] = [str(Path(__file__).with_name("clock_daemon.py"))]
            super()._start(timeout)

    # This daemon stores no bytes, so there is nothing to check.
    unchecked: dict[str, Any] = {"health_every_seconds": 3600, "integrity_scrub_rate": "0"}
    return ClockDaemon("cpu", pool_bytes=pool_bytes, copy_mode=mode, **unchecked)


if __name__ == "__main__":
    main()
