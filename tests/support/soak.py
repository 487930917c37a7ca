"""Hours at full speed, with faults: does it still hold?

    python -m support.soak --minutes 60 --faults --pool 256MiB --tier 1GiB

Engines (traffic.py) work a daemon and compare what they load; with `--faults` they are killed,
stopped for a while and replaced, daemons are killed and started anew, strangers send junk. With
`--tier`, engines use a disk tier as well; its process is killed and stopped, and half of the
daemons lose their pool (soak_tier.py). In the end the books must be in order, and the daemon may
hold no more than when it was young. Exit status 0 where nothing is wrong, 1 where anything is;
`--json` writes down what was verified.
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
from pathlib import Path
from typing import Any

from rich.console import Console

from kvferry.client import OffloadClient
from kvferry.proto.sizes import parse_bytes
from support.daemon_invariants import broken_invariants, check_all_gone
from support.process_usage import ProcessUsage
from support.raw_client import RawClient
from support.restarting_daemons import RestartingDaemons
from support.soak_tier import SoakTier
from support.traffic_processes import TrafficProcesses, mixed_engines
from support.traffic_statistics import TrafficStatistics, percentile, together

POOL_BYTES = 64 << 20
TELL_EVERY = 5.0
YOUNG = 0.1
"""The part of a daemon's time after which it counts as warm."""
MAX_GROWTH = 32 << 20
MAX_DESCRIPTORS = 64
"""Engines come and go meanwhile, and each takes some."""


@dataclass(frozen=True)
class SoakOptions:
    """seconds: how long. faults: how many a second, on average; 0 for none. restarts: whether
    daemons are among what is killed. kept: whether the next has what the one before stored.
    tier_bytes: the size of a disk tier under the pool; 0: none.
    """

    seconds: float
    faults: float = 0.5
    restarts: bool = True
    kept: bool = True
    tier_bytes: int = 0
    pool_bytes: int = POOL_BYTES
    device: str = "cpu"
    seed: int = 1
    patience: float = 20.0


@dataclass
class SoakVerdict:
    """What was seen. growth: the most that one daemon grew by, once warm."""

    tally: TrafficStatistics
    faults: Counter[str]
    complaints: list[str]
    seconds: float
    growth: dict[str, int] = field(default_factory=dict)
    tier: dict[str, int] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        counts = self.tally.counts
        return {
            "verdict": "wrong" if self.complaints else "held",
            "seconds": round(self.seconds, 1),
            "jobs": counts["jobs"],
            "outcomes": {
                name: counts[name] for name in ("done", "cancelled", "refused", "failed", "lost")
            },
            "blocks_compared": counts["compared"],
            "bytes_moved": counts["bytes"],
            "p50_us": round(1e6 * percentile(self.tally.seconds, 0.5)),
            "p99_us": round(1e6 * percentile(self.tally.seconds, 0.99)),
            "faults": dict(self.faults),
            "regions_found_again": counts["reattached"],
            "growth": self.growth,
            "tier": self.tier,
            "complaints": self.complaints,
        }


class Soak:
    """One run. Use `run`; `tell` is called with a line of progress now and then."""

    def __init__(self, options: SoakOptions, place: Path, tell: Callable[[str], None]) -> None:
        self.options, self._place, self._tell = options, place, tell
        self._dice = random.Random(options.seed)
        self._faults: Counter[str] = Counter()
        self._complaints: list[str] = []
        self._tallies: list[TrafficStatistics] = []
        self._growth: dict[str, int] = {}
        self._running = ExitStack()
        self._thaw: list[tuple[float, str]] = []
        self._young: ProcessUsage | None = None
        self._tier: SoakTier | None = None

    def run(self) -> SoakVerdict:
        began = time.monotonic()
        with self._running:
            if self.options.tier_bytes:
                self._tier = SoakTier(self._place / "tier", self.options.tier_bytes, self._dice)
                self._running.callback(self._tier.close)
            self._daemons = self._running.enter_context(self._start_daemons())
            self._born = time.monotonic()
            self._crew = self._running.enter_context(TrafficProcesses(self._daemons.directory))
            self._crew.start(*self._engines())
            try:
                self._work(began + self.options.seconds)
                self._end()
            except (TimeoutError, EOFError, OSError, AssertionError) as error:
                self._complaints.append(f"{type(error).__name__}: {error}")
                self._complaints.append(f"the daemon's last words: {self._daemons.log()[-2000:]}")
            tally = together(self._tallies)
            took = time.monotonic() - began
        complaints = self._complaints + tally.complaints
        if self._tier is None:
            return SoakVerdict(tally, self._faults, complaints, took, self._growth)
        complaints += self._tier.complaints
        return SoakVerdict(tally, self._faults, complaints, took, self._growth, self._tier.record())

    def _start_daemons(self) -> RestartingDaemons:
        o, tier = self.options, self._tier
        return RestartingDaemons(
            o.device,
            self._place,
            kept=o.kept,
            pool_bytes=o.pool_bytes,
            log_level="warning",
            **({} if tier is None else tier.daemon_options),
        )

    def _engines(self) -> list[Any]:
        o = self.options
        common: dict[str, Any] = {"device": o.device, "patience": o.patience}
        if self._tier is None:
            return mixed_engines(dice=self._dice, **common)
        few = mixed_engines(dice=self._dice, **common, prefetches=0.3)
        return few + self._tier.engines(o.pool_bytes, **common)

    def _work(self, end: float) -> None:
        told = time.monotonic()
        rate = self.options.faults
        next_fault = told + (self._dice.expovariate(rate) if rate else float("inf"))
        while (now := time.monotonic()) < end:
            self._look_at_daemon(end)
            self._let_go_on(now)
            if now > next_fault:
                self._do_harm()
                next_fault = time.monotonic() + self._dice.expovariate(rate)
            if now > told + TELL_EVERY:
                told = now
                self._tell(self._progress(end - now))
            time.sleep(0.05)

    def _progress(self, left: float) -> str:
        tally = together([*self._tallies, *self._reports()])
        wrong = len(self._complaints) + tally.counts["complaints"]
        return (
            f"{left / 60:5.1f} min left   {tally.counts['jobs']:,} jobs   "
            f"{tally.counts['compared']:,} blocks compared   {sum(self._faults.values())} faults   "
            f"{wrong} wrong"
        )

    def _reports(self) -> list[TrafficStatistics]:
        """Of those engines that can answer now."""
        frozen = {name for _, name in self._thaw}
        return [m.report() for name, m in self._crew.members.items() if name not in frozen]

    # Faults

    def _do_harm(self) -> None:
        kinds = [self._kill_engine, self._freeze_engine, self._send_junk]
        if self.options.restarts:
            kinds.append(self._kill_daemon)
        if self._tier is not None:
            kinds.append(self._dice.choice((self._kill_tier, self._stop_tier)))
        harm = self._dice.choice(kinds)
        self._faults[harm.__name__.strip("_").replace("_", " ")] += 1
        harm()

    def _kill_engine(self) -> None:
        """What it has seen goes with it, but for what it told now."""
        name = self._dice.choice(list(self._crew.members))
        self._thaw = [(at, frozen) for at, frozen in self._thaw if frozen != name]
        member = self._crew.members[name]
        member.thaw()
        self._tallies.append(member.report())
        time.sleep(0.1 * self._dice.random())
        self._crew.kill(name)
        self._crew.start(replace(member.options, seed=self._dice.getrandbits(32)))

    def _freeze_engine(self) -> None:
        name = self._dice.choice(list(self._crew.members))
        if all(name != frozen for _, frozen in self._thaw):
            self._crew.members[name].freeze()
            self._thaw.append((time.monotonic() + 3 * self._dice.random(), name))

    def _let_go_on(self, now: float) -> None:
        if self._tier is not None:
            self._tier.let_go_on(now)
        for at, name in self._thaw:
            if at <= now:
                self._crew.members[name].thaw()
        self._thaw = [(at, name) for at, name in self._thaw if at > now]

    def _send_junk(self) -> None:
        raw = RawClient(self._daemons.directory)
        for _ in range(500):
            raw.send(self._dice.randbytes(self._dice.randrange(200)))
        raw.drop()

    def _kill_daemon(self) -> None:
        self._measure()
        self._daemons.kill()
        if self._tier is not None and self.options.kept and self._dice.random() < 0.5:
            self._tier.lose_pool(self._daemons)
            self._faults["lose pool"] += 1
        self._daemons.start()
        self._born, self._young = time.monotonic(), None

    def _kill_tier(self) -> None:
        assert self._tier is not None
        self._tier.kill_process(self._daemons)

    def _stop_tier(self) -> None:
        assert self._tier is not None
        self._tier.stop_process(self._daemons)

    # Looking

    def _look_at_daemon(self, end: float) -> None:
        """It runs; and what it is like when it is warm is remembered."""
        if not self._daemons.alive:
            raise AssertionError("the daemon ended")
        age, whole = time.monotonic() - self._born, end - self._born
        if self._young is None and age > max(2.0, min(60.0, YOUNG * whole)):
            self._young = ProcessUsage.of(self._daemons.pid)
            with OffloadClient(self._daemons.directory, engine="observer") as observer:
                self._complaints += broken_invariants(observer)

    def _measure(self) -> None:
        if self._tier is not None:
            self._tier.measure(self._daemons)
        if self._young is None:
            return
        more = ProcessUsage.of(self._daemons.pid).since(self._young)
        for name, value in (("private", more.private), ("descriptors", more.descriptors)):
            self._growth[name] = max(self._growth.get(name, value), value)
        if more.private > MAX_GROWTH or more.descriptors > MAX_DESCRIPTORS:
            self._complaints.append(f"the daemon grew: {more}")

    def _end(self) -> None:
        self._let_go_on(float("inf"))
        if self._tier is not None:
            self._tier.wait_on(self._daemons)
        self._measure()
        self._tallies.append(self._crew.dismiss())
        check_all_gone(self._daemons.directory)
        status = self._daemons.stop()
        if status:
            self._complaints.append(f"the daemon's exit status was {status}")


def soak(options: SoakOptions, tell: Callable[[str], None] = lambda line: None) -> SoakVerdict:
    """Run, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="kvferry-soak-") as place:
        return Soak(options, Path(place), tell).run()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m support.soak", description="Work a daemon hard, and break things."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", action="store_true", help="kill, stop and disturb")
    parser.add_argument("--tier", default="0", help="size of a disk tier under the pool: 1GiB")
    parser.add_argument("--pool", default=f"{POOL_BYTES >> 20}MiB", help="size of the pool")
    parser.add_argument("--device", default="cpu", help='"cpu", or a GPU by index')
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--json", type=Path, help="file to write the record to")
    given = parser.parse_args(arguments)
    options = SoakOptions(
        seconds=60 * given.minutes,
        faults=0.5 if given.faults else 0.0,
        tier_bytes=parse_bytes(given.tier, "--tier"),
        pool_bytes=parse_bytes(given.pool, "--pool"),
        device="cpu" if given.device == "cpu" else f"cuda:{given.device}",
        seed=given.seed,
    )
    console = Console()
    console.print(f"seed {options.seed}, {given.minutes:g} minutes")
    with console.status("starting") as status:
        shown = (lambda line: status.update(line)) if console.is_terminal else console.print
        verdict = soak(options, shown)
    record = verdict.record()
    console.print_json(json.dumps(record))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if verdict.complaints else 0)


if __name__ == "__main__":
    main()
