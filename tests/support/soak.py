"""Run a daemon at full speed with faults, for minutes or hours.

    python -m support.soak --minutes 60 --faults --pool 256MiB --tier 1GiB
    python -m support.soak --minutes 60 --faults --pool 256MiB --mooncake 1GiB

Engines (traffic.py) submit transfers and compare what they load. If vLLM is installed, engines with
vLLM's scheduler and sliding windows decode past their windows, and compare what attention reads
(vllm_traffic.py). With `--faults`, engines are killed, paused and replaced, daemons are killed and
restarted, namespaces are reset, and unknown clients send random bytes. With `--tier` or
`--mooncake`, engines use a tier as well: its process is killed and stopped, and half of the daemons
lose their pool (soak_tier.py). At the end the daemon's invariants must hold, and no daemon may have
grown since it was warm. Exit status: 0 if nothing is wrong, else 1. `--json` saves the record.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from kvferry.client import OffloadClient
from kvferry.proto.sizes import parse_bytes
from support.daemon_invariants import broken_invariants, check_released
from support.process_usage import ProcessUsage
from support.raw_client import RawClient
from support.restarting_daemons import RestartingDaemons
from support.soak_tier import SoakDisk, SoakMooncake, SoakTier
from support.time_limits import PROMPTLY, TIMEOUT
from support.traffic_processes import AnyOptions, TrafficProcesses, mixed_engines, vllm_engines
from support.traffic_statistics import (
    TrafficOptions,
    TrafficStatistics,
    merge_statistics,
    percentile,
)

POOL_BYTES = 64 << 20
PROGRESS_EVERY = 5.0
# Seconds for the first import of torch and vLLM, and for what vLLM finds out about a model once.
STARTING = 5 * TIMEOUT
# The part of the remaining time after which a daemon is warm.
WARM_UP = 0.1
# Their prompts have more blocks than fit, so that some come from the tier.
VLLM_ABOVE_A_TIER = {"host_bytes": 4 << 10}
MAX_GROWTH = 32 << 20
# Engines connect and disconnect meanwhile, and each needs some.
MAX_DESCRIPTORS = 64


@dataclass(frozen=True)
class SoakOptions:
    """Options of a soak test.

    seconds: duration. faults: average number per second. restarts: whether daemons are killed, too.
    kept: whether the next daemon gets the pool of the killed one. tier_bytes: the size of a tier
    below the pool; 0: none. mooncake: whether that is a Mooncake Store; else it is a disk. vllm:
    whether engines with vLLM's scheduler run, too. job_timeout: see TrafficOptions.
    """

    seconds: float
    faults: float = 0.5
    restarts: bool = True
    kept: bool = True
    tier_bytes: int = 0
    mooncake: bool = False
    vllm: bool = False
    pool_bytes: int = POOL_BYTES
    device: str = "cpu"
    seed: int = 1
    job_timeout: float = PROMPTLY


@dataclass
class SoakVerdict:
    """The result. growth: the largest growth of a daemon since it was warm."""

    statistics: TrafficStatistics
    faults: Counter[str]
    errors: list[str]
    seconds: float
    growth: dict[str, int] = field(default_factory=dict)
    tier: dict[str, int] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        counts = self.statistics.counts
        return {
            "verdict": "wrong" if self.errors else "held",
            "seconds": round(self.seconds, 1),
            "jobs": counts["jobs"],
            "vllm": {name: count for name, count in counts.items() if name.startswith("vLLM")},
            "outcomes": {
                name: counts[name] for name in ("done", "cancelled", "refused", "failed", "lost")
            },
            "blocks_compared": counts["compared"],
            "bytes_moved": counts["bytes"],
            "p50_us": round(1e6 * percentile(self.statistics.latencies, 0.5)),
            "p99_us": round(1e6 * percentile(self.statistics.latencies, 0.99)),
            "faults": dict(self.faults),
            "regions_found_again": counts["reattached"],
            "growth": self.growth,
            "tier": self.tier,
            "errors": self.errors,
        }


class Soak:
    """One run. report_progress: called with a line every few seconds."""

    def __init__(
        self, options: SoakOptions, root: Path, report_progress: Callable[[str], None]
    ) -> None:
        self.options, self._root, self._report_progress = options, root, report_progress
        self._rng = random.Random(options.seed)
        self._faults: Counter[str] = Counter()
        self._errors: list[str] = []
        self._ended: list[TrafficStatistics] = []
        self._growth: dict[str, int] = {}
        self._running = ExitStack()
        self._paused: list[tuple[float, str]] = []
        self._warm: ProcessUsage | None = None
        self._tier: SoakTier | None = None

    def run(self) -> SoakVerdict:
        with self._running:
            if self.options.tier_bytes:
                self._tier = self._create_tier(self.options.tier_bytes)
                self._running.callback(self._tier.close)
            self._daemons = self._running.enter_context(self._start_daemons())
            self._started = time.monotonic()
            self._traffic = self._running.enter_context(TrafficProcesses(self._daemons.directory))
            self._traffic.start(*self._engines())
            for process in self._traffic.processes.values():
                process.report(STARTING)
            began = time.monotonic()
            try:
                self._work(began + self.options.seconds)
                self._end()
            except (TimeoutError, EOFError, OSError, AssertionError) as error:
                self._errors.append(f"{type(error).__name__}: {error}")
                self._errors.append(f"the end of the daemon's log: {self._daemons.log()[-2000:]}")
            statistics = merge_statistics(self._ended)
            seconds = time.monotonic() - began
        errors = self._errors + statistics.errors
        if self._tier is None:
            return SoakVerdict(statistics, self._faults, errors, seconds, self._growth)
        errors += self._tier.errors
        return SoakVerdict(
            statistics, self._faults, errors, seconds, self._growth, self._tier.record()
        )

    def _create_tier(self, nbytes: int) -> SoakTier:
        if self.options.mooncake:
            return SoakMooncake(nbytes, self._rng)
        return SoakDisk(self._root / "tier", nbytes, self._rng)

    def _start_daemons(self) -> RestartingDaemons:
        o, tier = self.options, self._tier
        return RestartingDaemons(
            o.device,
            self._root,
            kept=o.kept,
            pool_bytes=o.pool_bytes,
            log_level="warning",
            **({} if tier is None else tier.daemon_options),
        )

    def _engines(self) -> list[AnyOptions]:
        o = self.options
        common: dict[str, Any] = {"device": o.device, "job_timeout": o.job_timeout}
        engines: list[AnyOptions] = []
        if o.vllm:
            engines += vllm_engines(self._rng, **({} if self._tier is None else VLLM_ABOVE_A_TIER))
        if self._tier is None:
            return engines + mixed_engines(rng=self._rng, **common)
        engines += mixed_engines(rng=self._rng, **common, prefetches=0.3)
        return engines + self._tier.engines(o.pool_bytes, **common)

    def _work(self, end: float) -> None:
        reported = time.monotonic()
        rate = self.options.faults
        next_fault = reported + (self._rng.expovariate(rate) if rate else float("inf"))
        while (now := time.monotonic()) < end:
            self._check_daemon(end)
            self._resume_due(now)
            if now > next_fault:
                self._inject_fault()
                next_fault = time.monotonic() + self._rng.expovariate(rate)
            if now > reported + PROGRESS_EVERY:
                reported = now
                self._report_progress(self._progress(end - now))
            time.sleep(0.05)

    def _progress(self, left: float) -> str:
        statistics = merge_statistics([*self._ended, *self._reports()])
        counts, faults = statistics.counts, sum(self._faults.values())
        return (
            f"{left / 60:5.1f} min left   {counts['jobs']:,} jobs   "
            f"{counts['compared']:,} blocks compared   {faults} faults   "
            f"{len(self._errors) + counts['errors']} wrong"
        )

    def _reports(self) -> list[TrafficStatistics]:
        """The statistics of the engines that are not paused."""
        paused = {name for _, name in self._paused}
        return [p.report() for name, p in self._traffic.processes.items() if name not in paused]

    # Faults

    def _inject_fault(self) -> None:
        kinds = [
            self._kill_engine,
            self._pause_engine,
            self._reset_namespace,
            self._send_random_bytes,
        ]
        if self.options.restarts:
            kinds.append(self._kill_daemon)
        if self._tier is not None:
            kinds.append(self._rng.choice((self._kill_tier, self._stop_tier)))
        inject = self._rng.choice(kinds)
        self._faults[inject.__name__.strip("_").replace("_", " ")] += 1
        inject()

    def _kill_engine(self) -> None:
        """Kill an engine, and start another one of its name. Its statistics are kept."""
        name = self._rng.choice(list(self._traffic.processes))
        self._paused = [(at, paused) for at, paused in self._paused if paused != name]
        process = self._traffic.processes[name]
        process.resume()
        self._ended.append(process.report())
        time.sleep(0.1 * self._rng.random())
        self._traffic.kill(name)
        self._traffic.start(replace(process.options, seed=self._rng.getrandbits(32)))

    def _pause_engine(self) -> None:
        name = self._rng.choice(list(self._traffic.processes))
        if all(name != paused for _, paused in self._paused):
            self._traffic.processes[name].pause()
            self._paused.append((time.monotonic() + 3 * self._rng.random(), name))

    def _resume_due(self, now: float) -> None:
        if self._tier is not None:
            self._tier.resume_due(now)
        for at, name in self._paused:
            if at <= now:
                self._traffic.processes[name].resume()
        self._paused = [(at, name) for at, name in self._paused if at > now]

    def _reset_namespace(self) -> None:
        """By a client that is no engine of the namespace."""
        engines = (p.options for p in self._traffic.processes.values())
        options = self._rng.choice(
            [o for o in engines if isinstance(o, TrafficOptions) and o.model]
        )
        with OffloadClient(self._daemons.directory, engine="resetter") as client:
            client.open_namespace(options.fingerprint, cpu_bytes_to_use=options.host_bytes)
            client.reset(timeout=TIMEOUT)

    def _send_random_bytes(self) -> None:
        raw = RawClient(self._daemons.directory)
        for _ in range(500):
            raw.send(self._rng.randbytes(self._rng.randrange(200)))
        raw.drop()

    def _kill_daemon(self) -> None:
        self._measure()
        self._daemons.kill()
        if self._tier is not None and self.options.kept and self._rng.random() < 0.5:
            self._tier.lose_pool(self._daemons)
            self._faults["lose pool"] += 1
        self._daemons.start()
        self._started, self._warm = time.monotonic(), None

    def _kill_tier(self) -> None:
        assert self._tier is not None
        self._tier.kill_process(self._daemons)

    def _stop_tier(self) -> None:
        assert self._tier is not None
        self._tier.stop_process(self._daemons)

    # Checks

    def _check_daemon(self, end: float) -> None:
        """Raise AssertionError if it has ended. Measure it once it is warm."""
        if not self._daemons.alive:
            raise AssertionError("the daemon ended")
        age, left = time.monotonic() - self._started, end - self._started
        if self._warm is None and age > max(2.0, min(60.0, WARM_UP * left)):
            self._warm = ProcessUsage.of(self._daemons.pid)
            with OffloadClient(self._daemons.directory, engine="observer") as observer:
                self._errors += broken_invariants(observer)

    def _measure(self) -> None:
        if self._tier is not None:
            self._tier.measure(self._daemons)
        if self._warm is None:
            return
        more = ProcessUsage.of(self._daemons.pid).since(self._warm)
        for name, value in (("private", more.private), ("descriptors", more.descriptors)):
            self._growth[name] = max(self._growth.get(name, value), value)
        if more.private > MAX_GROWTH or more.descriptors > MAX_DESCRIPTORS:
            self._errors.append(f"the daemon grew: {more}")

    def _end(self) -> None:
        self._resume_due(float("inf"))
        if self._tier is not None:
            self._tier.wait_on(self._daemons)
        self._measure()
        self._ended.append(self._traffic.stop())
        check_released(self._daemons.directory)
        status = self._daemons.stop()
        if status:
            self._errors.append(f"the daemon's exit status was {status}")


def soak(
    options: SoakOptions, report_progress: Callable[[str], None] = lambda line: None
) -> SoakVerdict:
    """Run in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="kvferry-soak-") as root:
        return Soak(options, Path(root), report_progress).run()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m support.soak", description="Run a daemon at full speed, with faults."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--faults", action="store_true", help="kill and pause processes, send random bytes"
    )
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument("--tier", default="0", help="size of a disk tier under the pool: 1GiB")
    tier.add_argument("--mooncake", default="0", help="size of a Mooncake Store under the pool")
    parser.add_argument("--pool", default=f"{POOL_BYTES >> 20}MiB", help="size of the pool")
    parser.add_argument("--device", default="cpu", help='"cpu", or a GPU by index')
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--json", type=Path, help="file to write the record to")
    args = parser.parse_args(arguments)
    mooncake = parse_bytes(args.mooncake, "--mooncake")
    options = SoakOptions(
        seconds=60 * args.minutes,
        faults=0.5 if args.faults else 0.0,
        tier_bytes=parse_bytes(args.tier, "--tier") or mooncake,
        mooncake=mooncake > 0,
        vllm=find_spec("vllm") is not None,
        pool_bytes=parse_bytes(args.pool, "--pool"),
        device="cpu" if args.device == "cpu" else f"cuda:{args.device}",
        seed=args.seed,
    )
    console = Console()
    console.print(f"seed {options.seed}, {args.minutes:g} minutes")
    with console.status("starting") as status:
        shown = (lambda line: status.update(line)) if console.is_terminal else console.print
        verdict = soak(options, shown)
    record = verdict.record()
    console.print_json(json.dumps(record))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if verdict.errors else 0)


if __name__ == "__main__":
    main()
