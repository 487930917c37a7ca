"""Options of an engine that generates traffic (traffic.py), and its results. Imports no torch."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.packing import packed_bytes

if TYPE_CHECKING:
    from support.traffic import Traffic

MAX_ERRORS = 20
MAX_SAMPLES = 20_000
WORD = 8


@dataclass(frozen=True)
class TrafficOptions:
    """An engine with `gpu_blocks` GPU blocks, each of two pages of `page` bytes that mark it.

    owner: a number that marks its blocks. host_blocks: of its region or namespace. model: names the
    namespace that it opens, with `keys` keys in use; None: it has a region of its own. depth:
    maximum of jobs in flight. job_timeout: seconds within which each job must end. step_pause:
    seconds between two steps. cancels, resets, disconnects: probability of each per step.
    prefetches: probability that keys are prefetched before they are looked up. may_fail: whether
    copies may fail, because the device was configured so. reconnect: whether its client reconnects
    by itself. packed: each byte is a bfloat16 value on the GPU, and host blocks are packed.
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
    job_timeout: float = 5.0
    step_pause: float = 0.0
    cancels: float = 0.01
    resets: float = 0.002
    disconnects: float = 0.0
    prefetches: float = 0.0
    may_fail: bool = False
    reconnect: bool = False
    packed: bool = False

    @property
    def block_bytes(self) -> int:
        return 2 * self.page

    @property
    def block_words(self) -> int:
        return self.block_bytes // WORD

    @property
    def host_bytes(self) -> int:
        return self.host_blocks * self.host_block_bytes

    @property
    def host_block_bytes(self) -> int:
        nbytes = self.block_bytes * self.factor
        return packed_bytes(2 * nbytes) if self.packed else nbytes

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the namespace."""
        return Fingerprint(self.model or "", self.host_block_bytes)

    def create_traffic(self, directory: Path) -> Traffic:
        from support.traffic import Traffic

        return Traffic(directory, self)


@dataclass
class TrafficStatistics:
    """Events, errors and latencies of the traffic.

    counts: events by name. errors: descriptions of errors. latencies: a sample of the seconds from
    a job's submission to its result.
    """

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def add_error(self, description: str) -> None:
        self.counts["errors"] += 1
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(f"{self.name}: {description}")

    def add_latency(self, seconds: float) -> None:
        """Keep a uniform sample of all latencies (Vitter's algorithm R)."""
        self.counts["timed"] += 1
        if len(self.latencies) < MAX_SAMPLES:
            self.latencies.append(seconds)
        elif (at := random.randrange(self.counts["timed"])) < MAX_SAMPLES:
            self.latencies[at] = seconds


def merge_statistics(parts: Iterable[TrafficStatistics], name: str = "all") -> TrafficStatistics:
    """The statistics of several engines as one."""
    total = TrafficStatistics(name)
    for part in parts:
        total.counts += part.counts
        total.errors += part.errors
        total.latencies += part.latencies
    return total


def percentile(seconds: Iterable[float], share: float) -> float:
    """0.0 if there are no samples."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(total: TrafficStatistics) -> str:
    """One line of JSON."""
    seconds = {f"p{share * 100:g}": percentile(total.latencies, share) for share in (0.5, 0.99, 1)}
    return json.dumps({"counts": total.counts, "seconds": seconds, "errors": total.errors})
