"""Hit rates over capacity on a real trace, through client and daemon, compared with bounds.

    python tests/bench/hit_rates.py TRACE [--clients 4] [--requests N] [--json FILE] [--plot FILE]

TRACE is JSON lines with hash_ids (see support.trace_replay). The trace is replayed with each policy
at each capacity, and every loaded block is compared with the stored one. The bounds:

    prefix LRU   a dictionary in use order, whose hits end at a request's first miss
    MIN          the optimum at this capacity: evict the block whose next use is last, or do not
                 store the new block if its next use is later (Belady 1966)
    unbounded    no block is evicted
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from support.trace_replay import ReplayOutcome, read_trace, replay

CAPACITIES = (1_000, 3_000, 10_000, 30_000, 60_000, 100_000)
POLICIES = ("lru", "arc", "s3fifo")

Trace = Sequence[Sequence[int]]


def prefix_lru(trace: Trace, capacity: int) -> float:
    """The fraction of blocks that hit in a plain LRU. A request's tail is evicted first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for blocks in trace:
        total += len(blocks)
        hits += next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / total


def belady(trace: Trace, capacity: int) -> float:
    """The largest fraction of blocks that any policy can hit, with knowledge of the future."""
    accesses = list(chain.from_iterable(trace))
    following: list[float] = [inf] * len(accesses)
    seen: dict[int, int] = {}
    for at in reversed(range(len(accesses))):
        following[at] = seen.get(accesses[at], inf)
        seen[accesses[at]] = at
    kept: dict[int, float] = {}
    latest: list[tuple[float, int]] = []
    hits = 0
    for at, block in enumerate(accesses):
        hits += block in kept
        if following[at] is inf:
            kept.pop(block, None)
            continue
        kept[block] = following[at]
        heapq.heappush(latest, (-following[at], block))
        while len(kept) > capacity:
            needed, last = heapq.heappop(latest)
            if kept.get(last) == -needed:
                del kept[last]
    return hits / len(accesses)


def main(arguments: argparse.Namespace) -> None:
    trace = read_trace(arguments.trace, arguments.requests)
    distinct = len(set(chain.from_iterable(trace)))
    capacities = [*(c for c in CAPACITIES if c < distinct), distinct]
    rows: list[dict[str, Any]] = []
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        work = progress.add_task("replaying", total=len(capacities) * len(POLICIES) * len(trace))
        for capacity in capacities:
            outcomes = {
                policy: replay(
                    trace,
                    capacity,
                    policy=policy,
                    clients=arguments.clients,
                    step=lambda: progress.advance(work),
                )
                for policy in POLICIES
            }
            bounds = prefix_lru(trace, capacity), belady(trace, capacity)
            rows.append(_row(capacity, outcomes, *bounds))
    console = Console(width=100)
    console.print(_table(rows, capacities[-1]))
    blocks, wrong = sum(map(len, trace)), sum(row["wrong"] for row in rows)
    compared = sum(row[f"{policy}_hits"] for row in rows for policy in POLICIES)
    console.print(
        f"{len(trace):,} requests, {blocks:,} blocks ({distinct:,} distinct), "
        f"{arguments.clients} clients; {compared:,} loaded blocks compared, {wrong} wrong",
        highlight=False,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.plot:
        _plot(rows, arguments.plot)
    if wrong:
        sys.exit("a loaded block differs from the stored one")


def _row(
    capacity: int, outcomes: dict[str, ReplayOutcome], lru: float, best: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"capacity": capacity, "prefix LRU": lru, "MIN": best, "wrong": 0}
    for policy, outcome in outcomes.items():
        row[policy], row[f"{policy}_hits"] = outcome.hit_rate, outcome.hits
        row["wrong"] += outcome.wrong
        row[f"{policy}_run"] = asdict(outcome)
    return row


def _table(rows: list[dict[str, Any]], unbounded: int) -> Table:
    table = Table(title="blocks hit, %", title_justify="left", box=None, padding=(0, 2))
    names = ("LRU", "ARC", "S3-FIFO", "prefix LRU", "MIN")
    for name in ("blocks", *names, "loads lost", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        rates = [*(row[policy] for policy in POLICIES), row["prefix LRU"], row["MIN"]]
        runs = [row[f"{policy}_run"] for policy in POLICIES]
        table.add_row(
            "unbounded" if row["capacity"] == unbounded else f"{row['capacity']:,}",
            *(f"{100 * rate:.2f}" for rate in rates),
            " ".join(str(run["lost"]) for run in runs),
            " ".join(f"{run['seconds']:.0f}" for run in runs),
        )
    return table


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    capacities = [row["capacity"] for row in rows]
    lines = (
        ("MIN", "MIN (best possible)", "k--"),
        ("s3fifo", "S3-FIFO", "^-"),
        ("arc", "ARC", "o-"),
        ("lru", "LRU", "s-"),
    )
    for key, label, style in lines:
        axes.plot(capacities, [100 * row[key] for row in rows], style, label=label, markersize=4)
    axes.axhline(100 * rows[-1]["MIN"], color="0.7", linewidth=1, label="unbounded")
    axes.set(xscale="log", xlabel="host blocks", ylabel="blocks hit, %", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="JSON lines with hash_ids, plain or .gz")
    parser.add_argument("--clients", type=int, default=4, help="engines at once (default: 4)")
    parser.add_argument("--requests", type=int, help="only the first N requests")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--plot", type=Path, help="plot the figures into this file (needs matplotlib)"
    )
    main(parser.parse_args())
