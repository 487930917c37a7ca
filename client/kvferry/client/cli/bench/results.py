"""What came out: plain structs that are the JSON file, samples and all.

Rates are in GB/s (10^9 bytes), latencies in microseconds, samples in seconds. Medians stand beside
the smallest and the largest; `ratio` is a median by that of the contiguous copy the same way.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import statistics
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from kvferry.client.cli.units import size
from kvferry.proto.status import CopyStatus
from kvferry.proto.version import kvferry_version

if TYPE_CHECKING:
    from kvferry.client import DaemonStatus
    from kvferry.client.cli.bench.plan import Plan

WAYS: tuple[str, ...] = ("store", "load", "both")
GIB = 1 << 30
REPS, QUICK_REPS = 5, 2
# How many copies are timed together.
IN_A_ROW = 4


class About(msgspec.Struct):
    command: str
    started: str
    device: str
    device_uuid: str
    driver: str
    cuda: str
    torch: str
    python: str
    kvferry: str
    daemon: str
    cpu: str
    cpus: int
    # Bytes moved per direction in one copy.
    nbytes: int
    reps: int
    # Per direction, the smallest fragment in bytes that the daemon copies directly.
    direct_from: dict[str, int] = {}


class Rate(msgspec.Struct):
    nbytes: int
    median: float
    low: float
    high: float
    seconds: tuple[float, ...]
    ratio: float = 1.0

    @classmethod
    def of(cls, nbytes: int, seconds: Sequence[float]) -> Rate:
        rates = [nbytes / s / 1e9 if s else 0.0 for s in seconds]
        return cls(nbytes, statistics.median(rates), min(rates), max(rates), tuple(seconds))


class Copies(msgspec.Struct):
    """By the wall clock, from the first submitted to the last seen: `once` what is moved in one go,
    after nothing; `in_a_row` as much several times over, the next submitted before the last has
    ended. on_device: the first by transfer_time."""

    once: Rate
    in_a_row: Rate
    on_device: Rate


class Fragments(msgspec.Struct):
    """Copies of one fragment size, by way: "store", "load", "both" at once."""

    page_bytes: int
    tensors: int
    block_size_factor: int
    host_block_bytes: int
    jobs: int
    copies: dict[str, Copies]


class Latency(msgspec.Struct):
    what: str
    p50: float
    p99: float
    high: float = 0.0
    seconds: tuple[float, ...] = ()

    @classmethod
    def of(cls, what: str, seconds: Sequence[float]) -> Latency:
        p50, p99, high = (float(q) for q in np.quantile(seconds, (0.5, 0.99, 1)) * 1e6)
        return cls(what, p50, p99, high, tuple(seconds))

    def beyond(self, other: Latency, what: str) -> Latency:
        return Latency(what, self.p50 - other.p50, self.p99 - other.p99)


class Spread(msgspec.Struct, frozen=True):
    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(statistics.median(samples), min(samples), max(samples), tuple(samples))


NONE = Spread(0.0, 0.0, 0.0, ())


class Beside(msgspec.Struct):
    """Copies beside a busy engine's loop. page_bytes 0: one contiguous run.

    how: "kvferry", "kvferry, MPS", or an alternative: "batched DMA" (a daemon that copies
        directly), "pinned kernel" (over pinned memory, in this process), "contiguous".
    alone: GB/s with nothing beside; rate: GB/s beside the engine, ratio its part of the contiguous
    copy. alone_ms, with_ms: the engine's step, alone in the windows around and with copies.
    """

    how: str
    way: str
    loop: str
    page_bytes: int
    alone: float
    rate: Spread = NONE
    ratio: float = 0.0
    alone_ms: Spread = NONE
    with_ms: Spread = NONE
    lost_ms_per_gib: Spread = NONE


class Queued(msgspec.Struct):
    """One block of 2 MiB loaded, idle and with so many bytes of stores queued.

    after_submit: of those with stores queued the ones that were sent right behind another store,
    which is planned first; `behind` are the others. None where there were not both.
    """

    page_bytes: int
    queued_bytes: int
    idle: Latency
    behind: Latency
    after_submit: Latency | None = None

    @property
    def rows(self) -> list[tuple[str, Latency]]:
        rows = [("idle", self.idle), (f"{size(self.queued_bytes)} queued", self.behind)]
        if self.after_submit is not None:
            rows.append(("behind a submit", self.after_submit))
        return rows


class Start(msgspec.Struct):
    """Seconds from a daemon's start, and device memory in bytes (staging: as it declares).

    pinned_seconds: one cudaHostAlloc of as much; on the CPU, as much memory touched.
    """

    pool_bytes: int
    socket: Spread
    greeted: Spread
    first_store: Spread
    registered: float
    pinned_seconds: float
    device_bytes: int
    staging_bytes: int
    context_bytes: int


class Results(msgspec.Struct):
    about: About
    contiguous: dict[str, Rate] = {}
    bandwidth: list[Fragments] = []
    latency: list[Latency] = []
    beside: list[Beside] = []
    queued: list[Queued] = []
    start: Start | None = None
    notes: list[str] = []

    def finish(self) -> None:
        """Everything is measured: set the ratios."""
        for fragments in self.bandwidth:
            for way, copies in fragments.copies.items():
                for rate in (copies.once, copies.in_a_row, copies.on_device):
                    rate.ratio = rate.median / self.contiguous[way].median
        for row in self.beside:
            row.ratio = row.rate.median / self.contiguous[row.way].median


def about(daemon: DaemonStatus, plan: Plan, arguments: Sequence[str], started: datetime) -> About:
    device = daemon.device
    return About(
        shlex.join(["kvferry", *arguments]),
        started.isoformat(timespec="seconds"),
        device.name,
        device.uuid,
        "" if device.kind == "cpu" else _driver(),
        str(torch.version.cuda or ""),
        str(torch.__version__),
        platform.python_version(),
        kvferry_version(),
        daemon.version,
        _cpu(),
        os.cpu_count() or 0,
        plan.half_bytes,
        plan.times(REPS, QUICK_REPS),
        _direct_from(daemon.copying),
    )


def _direct_from(found: CopyStatus | None) -> dict[str, int]:
    return {"store": found.direct_from_store, "load": found.direct_from_load} if found else {}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _driver() -> str:
    """The release of the kernel's driver, "580.159.04"; "" where the system does not tell."""
    for place in (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version")):
        text = place.read_text() if place.exists() else ""
        if release := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text):
            return release[0]
    return ""
