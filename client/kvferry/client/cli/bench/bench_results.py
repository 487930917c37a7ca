"""Results: the structs of the JSON file, with all samples.

Rates are in GB/s (10^9 bytes), latencies in microseconds, samples in seconds. Each median comes
with the minimum and maximum; `ratio` is the median divided by that of the contiguous copy in the
same direction.
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

from kvferry.proto.status import CopyStatus
from kvferry.proto.version import kvferry_version

if TYPE_CHECKING:
    from kvferry.client import DaemonStatus
    from kvferry.client.cli.bench.plan import Plan

DIRECTIONS: tuple[str, ...] = ("store", "load", "both")
GIB = 1 << 30
REPS, QUICK_REPS = 5, 2
# Copies that are timed together.
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
    """Rates by the wall clock, from the first submit to the last result.

    once: one copy, with nothing in flight before it. in_a_row: IN_A_ROW copies, each submitted
    before the one before it has completed. on_device: `once`, by the jobs' transfer_time.
    """

    once: Rate
    in_a_row: Rate
    on_device: Rate


class Fragments(msgspec.Struct):
    """Copies of one fragment size, by direction: "store", "load", or "both" at once."""

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

    def minus(self, other: Latency, what: str) -> Latency:
        return Latency(what, self.p50 - other.p50, self.p99 - other.p99)


class Results(msgspec.Struct):
    about: About
    contiguous: dict[str, Rate] = {}
    bandwidth: list[Fragments] = []
    latency: list[Latency] = []

    def set_ratios(self) -> None:
        """Set all ratios to the contiguous copy, which is measured until the end."""
        for fragments in self.bandwidth:
            for direction, copies in fragments.copies.items():
                for rate in (copies.once, copies.in_a_row, copies.on_device):
                    rate.ratio = rate.median / self.contiguous[direction].median


def describe_run(
    daemon: DaemonStatus, plan: Plan, arguments: Sequence[str], started: datetime
) -> About:
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
        direct_thresholds(daemon.copying),
    )


def direct_thresholds(status: CopyStatus | None) -> dict[str, int]:
    return {"store": status.direct_from_store, "load": status.direct_from_load} if status else {}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _driver() -> str:
    """The release of the kernel driver, e.g. "580.159.04"; "" if it is not known."""
    for place in (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version")):
        text = place.read_text() if place.exists() else ""
        if release := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text):
            return release[0]
    return ""
