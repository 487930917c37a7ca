"""One block loaded while stores wait, by several trees of kvferry in turns: which one is better.

    python tests/bench/queued_alternating.py --device 0 before=../before after=.
    python tests/bench/queued_alternating.py --device clock before=../before after=.

From run to run `kvferry bench --what queued` differs by more than most changes do, and from machine
to machine by twice as much. So here each tree (a checkout, or what `git archive` makes of one) has
a daemon and an engine of its own, all of them are there at once, and each moves a few blocks at a
time while the others are idle. Name a tree twice to see what is chance.

A GPU that is a clock (clock_daemon.py) is had on any machine with two cores to spare. There a
tree's Python, its threads and sockets are compared, not what a GPU makes of it; and what gives the
GIL away still keeps one of few cores.

    us       of a tree's loads: median, 90th, 95th and 99th percentile, idle; the same behind stores
    x        the 99th percentile by that of the idle ones; of ten rounds at a time least and most
    submit   us, median of loads that were sent right behind a store; they are not among the others
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

QUANTILES = (0.5, 0.9, 0.95, 0.99)
SOME = 10
"""Rounds."""
CASES = ((2 << 20, "direct"), (32 << 10, "staged"))
"""Bytes of a page, and how it is copied: a calibration beside others would not be one."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", metavar="NAME=TREE", help="trees to compare")
    parser.add_argument("--device", default="0", help="a GPU, cpu, or clock")
    parser.add_argument("--gib", type=float, default=0.5, help="GiB of one of eight stores")
    parser.add_argument("--rounds", type=int, default=30, help="turns that each tree has")
    parser.add_argument("--trips", type=int, default=200, help="loads in a turn, of either kind")
    parser.add_argument("--work", nargs=2, metavar=("PAGE", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.device, options.gib, int(options.work[0]), options.work[1])
    elif not options.trees:
        parser.error("give a tree at least, as NAME=TREE")
    for page_bytes, mode in () if options.work else CASES:
        compare(options, page_bytes, mode)


def compare(options: argparse.Namespace, page_bytes: int, mode: str) -> None:
    with contextlib.ExitStack() as stack:
        workers: list[LoadWorker] = []
        for tree in options.trees:
            name, _, path = tree.partition("=")
            worker = LoadWorker(name, Path(path), options, page_bytes, mode)
            workers.append(stack.enter_context(worker))
        for number in range(options.rounds):
            for worker in random.sample(workers, len(workers)):
                for kind in ("idle", "behind") if number % 2 else ("behind", "idle"):
                    worker.turn(kind, options.trips)
    print(f"pages of {page_bytes >> 10} KiB, {mode}, {options.rounds} rounds of {options.trips}")
    print(f"{'us':12}{'idle':>7}{'behind':>28}{'x':>30}{'least..most':>12}{'submit':>8}")
    for worker in workers:
        worker.show()


class LoadWorker:
    """A tree, as a process of its own; its daemon is a child of that."""

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

    def __enter__(self) -> LoadWorker:
        if self._answer() != "ready":
            raise SystemExit(f"{self._name} did not come up: what it said is above")
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
        some = range(0, len(idle), SOME)
        times = [_times(idle[at : at + SOME], behind[at : at + SOME]) for at in some]
        cells = [f"{us:7.0f}" for turns in (idle, behind) for us in _quantiles(turns)]
        print(
            f"{self._name:12}" + "".join(cells),
            f"   {_times(idle, behind):5.2f}  {min(times):.2f}..{max(times):.2f}",
            f"{1e6 * float(np.median(self._after_submit)):7.0f}",
        )

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _quantiles(turns: list[Any]) -> list[float]:
    return [float(us) for us in np.quantile(np.concatenate(turns), QUANTILES)]


def _times(idle: list[Any], behind: list[Any]) -> float:
    return _quantiles(behind)[-1] / _quantiles(idle)[-1]


def work(device: str, gib: float, page_bytes: int, mode: str) -> None:
    """Do what standard input says; this process has one tree on its path."""
    from kvferry.client.cli.bench.engine import Engine, Shape
    from kvferry.client.cli.bench.plan import Plan
    from kvferry.client.cli.bench.queued import _Loads, _stores
    from kvferry.client.cli.bench.rig import open_rig

    if device == "clock":  # who polls leaves its core to others, for there are few
        cast(Any, Engine).take = _yielding(Engine.take)
    answers, sys.stdout = sys.stdout, sys.stderr
    plan = Plan(device, None, int(gib * (1 << 30)), None, 1, False, frozenset({"queued"}))
    host_bytes = plan.rig_pool_bytes
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(_daemon(device, host_bytes, mode))
        rig = stack.enter_context(open_rig(replace(plan, directory=daemon.directory)))
        engine = stack.enter_context(rig.engine(Shape.of(page_bytes), host_bytes))
        loads, stores = _Loads(engine), _stores(engine)
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

    # It stores no bytes, so there are none to be checked
    unchecked: dict[str, Any] = {"health_every_seconds": 3600, "integrity_scrub_rate": "0"}
    return ClockDaemon("cpu", pool_bytes=pool_bytes, copy_mode=mode, **unchecked)


if __name__ == "__main__":
    main()
