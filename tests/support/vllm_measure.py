"""What the scripts that measure engines share: the link's rate, lines of output, medians."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any, TypeAlias

LINK = """
import statistics, time, torch
host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
device = torch.empty_like(host, device="cuda")
rates = []
for _ in range(8):
    torch.cuda.synchronize()
    began = time.perf_counter()
    device.copy_(host)
    torch.cuda.synchronize()
    rates.append(host.numel() / (time.perf_counter() - began) / 1e9)
print(statistics.median(rates[2:]))
"""
Record: TypeAlias = dict[str, Any]


def say(what: str, **figures: Any) -> None:
    def form(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    said = "  ".join(f"{name} {form(value)}" for name, value in figures.items())
    print(f"{time.strftime('%H:%M:%S')} {what:24} {said}", flush=True)


def link() -> float:
    """GB/s of one contiguous copy to the device, in a process that is gone again."""
    ran = subprocess.run([sys.executable, "-c", LINK], capture_output=True, text=True, check=True)
    return float(ran.stdout)


def spread(values: list[float]) -> Record:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "least": ordered[0], "most": ordered[-1]}


def summary(what: str, rows: list[Record], *columns: str) -> Record:
    """Median and spread of each column, by connector; printed."""
    found: Record = {}
    for name in dict.fromkeys(row["connector"] for row in rows):
        mine = [row for row in rows if row["connector"] == name]
        found[name] = {column: spread([row[column] for row in mine]) for column in columns}
        say(f"= {what} {name}", **{column: found[name][column]["median"] for column in columns})
    return found
