"""What an engine under test is like, and what it has seen. Imports no torch."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_COMPLAINTS = 20
SAMPLES = 20_000
WORD = 8


@dataclass(frozen=True)
class TrafficOptions:
    """An engine of `gpu_blocks` GPU blocks, of two pages of `page` bytes each.

    owner: what marks its blocks. host_blocks: how many it takes, or its namespace has. model: of
    the namespace that it opens, with `keys` keys in use; None: host blocks of its own. depth: jobs
    under way. patience: seconds that a job may take. pause: seconds after each step. cancels,
    resets, leaves: how likely each is after a step. prefetches: how likely keys are prefetched
    before they are looked up. may_fail: whether the device was told to.
    reconnect: whether its client comes back to a new daemon by itself.
    """

    name: str
    owner: int
    seed: int = 1
    device: str = "cpu"
    gpu_blocks: int = 96
    page: int = 1024
    factor: int = 2
    host_blocks: int = 64
    model: str | None = None
    keys: int = 160
    depth: int = 16
    patience: float = 5.0
    pause: float = 0.0
    cancels: float = 0.01
    resets: float = 0.002
    leaves: float = 0.0
    prefetches: float = 0.0
    may_fail: bool = False
    reconnect: bool = False

    @property
    def block_bytes(self) -> int:
        return 2 * self.page

    @property
    def block_words(self) -> int:
        return self.block_bytes // WORD

    @property
    def host_bytes(self) -> int:
        return self.host_blocks * self.factor * self.block_bytes


@dataclass
class TrafficStatistics:
    """counts: of whatever happened, by name. complaints: what must not have. seconds: a sample of
    how long jobs took, from submitted until seen."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def complain(self, what: str) -> None:
        self.counts["complaints"] += 1
        if len(self.complaints) < MOST_COMPLAINTS:
            self.complaints.append(f"{self.name}: {what}")

    def took(self, seconds: float) -> None:
        """A sample of all, each as likely to stay (Vitter's algorithm R)."""
        self.counts["timed"] += 1
        if len(self.seconds) < SAMPLES:
            self.seconds.append(seconds)
        elif (at := random.randrange(self.counts["timed"])) < SAMPLES:
            self.seconds[at] = seconds


def together(tallies: Iterable[TrafficStatistics], name: str = "all") -> TrafficStatistics:
    """What several have seen, as one."""
    total = TrafficStatistics(name)
    for tally in tallies:
        total.counts += tally.counts
        total.complaints += tally.complaints
        total.seconds += tally.seconds
    return total


def percentile(seconds: Iterable[float], share: float) -> float:
    """0.0 of none."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(tally: TrafficStatistics) -> str:
    """One line of JSON."""
    took = {f"p{share * 100:g}": percentile(tally.seconds, share) for share in (0.5, 0.99, 1.0)}
    return json.dumps({"counts": tally.counts, "seconds": took, "complaints": tally.complaints})
