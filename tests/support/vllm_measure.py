"""Functions of the scripts that measure engines: the link's rate, alternation, output, medians."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvferry.client import OffloadClient
from kvferry.proto.status import TierStatus
from support.time_limits import TIMEOUT
from support.vllm_process import VLLM, make_prompts

LINK = """
import statistics, sys, time, torch
torch.cuda.set_device(int(sys.argv[1]))
host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
device = torch.empty_like(host, device="cuda")
rates = []
for _ in range(40):
    torch.cuda.synchronize()
    began = time.perf_counter()
    device.copy_(host)
    torch.cuda.synchronize()
    rates.append(host.numel() / (time.perf_counter() - began) / 1e9)
print(statistics.median(rates[2:]))
"""
# Seconds to wait for a tier to write the blocks of the pool.
WRITE_SECONDS = 2 * TIMEOUT
Record: TypeAlias = dict[str, Any]


def choose_figures(
    parser: argparse.ArgumentParser, figures: Mapping[str, object]
) -> tuple[Any, list[str]]:
    """Parse the command line. Returns the arguments, and which of `figures` they name."""
    parser.add_argument("what", help=f"figures, comma-separated: {', '.join(figures)}")
    chosen = parser.parse_args()
    names = chosen.what.split(",")
    if unknown := set(names) - figures.keys():
        parser.error(f"unknown figures: {', '.join(sorted(unknown))}; choose from {[*figures]}")
    return chosen, names


def print_figures(what: str, **figures: Any) -> None:
    def form(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    text = "  ".join(f"{name} {form(value)}" for name, value in figures.items())
    print(f"{time.strftime('%H:%M:%S')} {what:24} {text}", flush=True)


def print_set(what: str, set_gib: float, tier_gib: float, tier: str = "host memory") -> None:
    """Print whether the KV of a figure's prompts fits into a tier: figures depend on it."""
    fits = "fits" if set_gib <= tier_gib else "does not fit"
    print_figures(f"{what}: set", gib=set_gib, tier=f"{tier_gib:.1f} GiB of {tier}", it=fits)


def measure_link(device: int = 0) -> float:
    """GB/s of one contiguous copy to a GPU, measured in a process of its own."""
    command = [sys.executable, "-c", LINK, str(device)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout)


def spread(values: list[float]) -> Record:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "least": ordered[0], "most": ordered[-1]}


def summary(what: str, rows: list[Record], *columns: str) -> Record:
    """Median and spread of each column, by connector. Prints the medians."""
    found: Record = {}
    for name in dict.fromkeys(row["connector"] for row in rows):
        selected = [row for row in rows if row["connector"] == name]
        found[name] = {column: spread([row[column] for row in selected]) for column in columns}
        print_figures(
            f"= {what} {name}", **{column: found[name][column]["median"] for column in columns}
        )
    return found


# Engines


def alternate(
    engines: Mapping[str, VLLM], what: str, reps: int, measure: Callable[[VLLM], Record]
) -> list[Record]:
    """Rows of `measure`, by each engine in turn."""
    rows = list[Record]()
    for number in range(reps):
        for name, engine in engines.items():
            engine.settle()
            row = measure(engine)
            print_figures(f"{what} {name}", round=number, **row)
            rows.append({"connector": name, **row})
    return rows


def ask_in_a_row(engine: VLLM, seed: int, tokens: int) -> float:
    """Milliseconds to the first token of new prompts, sent one after another."""
    times = [1e3 * engine.timed([prompt])[0] for prompt in make_prompts(3, seed, tokens)]
    return statistics.median(times[1:])


def ask_at_once(engine: VLLM, seed: int) -> float:
    """Tokens per second of 32 new prompts at once, with 64 generated tokens each."""
    count, tokens, generated = 32, 2048, 64
    seconds, _ = engine.timed(make_prompts(count, seed, tokens), generated)
    return count * (tokens + generated) / seconds


# Tiers


def tier_of(directory: str) -> TierStatus:
    """The only tier of a daemon beside its siblings."""
    with OffloadClient(directory, engine="observer") as client:
        *_, tier = client.status().tiers
        return tier


def wait_written(directory: str) -> None:
    """Wait until a daemon's tier has written nothing for a second."""
    deadline, before = time.monotonic() + WRITE_SECONDS, -1
    while (written := tier_of(directory).written) != before and time.monotonic() < deadline:
        before = written
        time.sleep(1.0)
