"""Plots the times of README.md's table of results, relative to vLLM without a connector.

    python tests/bench/plot_results.py

Rows with a throughput, or without a time of vLLM alone, are left out.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "tests" / "bench" / "results.svg"
SOLUTIONS = ("kvferry", "vLLM's own connector", "no connector")
COLORS = ("#6a51a3", "#9ecae1", "#bdbdbd")
# A time: "**72 ms** (71..78)", "9.06 s".
TIME = re.compile(r"\**([\d.]+) (ms|s)\b\**")
LABEL_WIDTH = 38


class Row(NamedTuple):
    """A row of the table: times as the page shows them, and in seconds; None: not measured."""

    label: str
    shown: tuple[str, ...]
    seconds: tuple[float | None, ...]


def rows_of(page: str) -> list[Row]:
    """The rows of the table whose head names vLLM 0.33, kvferry and the others."""
    _, _, table = page.partition("| vLLM 0.33 | kvferry |")
    table, _, _ = table.partition("\n\n")
    rows = []
    for line in table.splitlines()[2:]:
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        times = [TIME.match(cell) for cell in cells]
        if times[0] is None or times[-1] is None:
            continue
        rows.append(
            Row(
                re.sub(r" \(.*", "", label),
                tuple(f"{time[1]} {time[2]}" if time else "" for time in times),
                tuple(
                    float(time[1]) * (1e-3 if time[2] == "ms" else 1.0) if time else None
                    for time in times
                ),
            )
        )
    return rows


def plot(rows: list[Row], path: Path) -> None:
    # Text stays text, and equal figures give equal files.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvferry", "font.size": 10})
    figure = Figure(figsize=(8.3, 0.3 + 0.72 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.26
    for column, (name, color) in enumerate(zip(SOLUTIONS, COLORS, strict=True)):
        for place, row in enumerate(rows):
            seconds, alone = row.seconds[column], row.seconds[-1]
            if seconds is None or alone is None:
                continue
            at = place + (column - 1) * height
            label = name if place == 0 else None
            axes.barh(at, seconds / alone, height * 0.92, color=color, label=label)
            axes.text(seconds / alone + 0.01, at, row.shown[column], va="center", fontsize=9)
    labels = [textwrap.fill(row.label, LABEL_WIDTH) for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2)
    axes.set_xticks([0, 0.5, 1])
    axes.set_xlabel("time, relative to vLLM without a connector (shorter is better)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(SOLUTIONS), frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE.svg")
    plot(rows_of((ROOT / "README.md").read_text()), parser.parse_args().output)
