"""Plots how many times faster than vLLM without a connector the rows of README.md's table are.

    python tests/bench/plot_results.py

Rows without a value of vLLM alone are left out. The lines are the range from the minimum to the
maximum of each value, relative to the median without a connector.
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
TITLE = "How many times faster than vLLM without a connector"
SOLUTIONS = ("kvferry", "vLLM's own connector")
COLORS = ("#6a51a3", "#9ecae1")
# A value: "**72 ms** (71..78)", "9.06 s", "**82,400 tokens/s** (82,300..82,600)", "29,700".
VALUE = re.compile(r"\**([\d.,]+) ?([a-z/]*)\** ?(?:\(([\d.,]+)\.\.([\d.,]+)\))?")
LABEL_WIDTH = 46


class Speed(NamedTuple):
    """Relative to vLLM without a connector, of the median and of both ends of the range."""

    median: float
    ends: tuple[float, float]


class Row(NamedTuple):
    """A row of the table, with one speed for each of SOLUTIONS; None: not measured."""

    label: str
    speeds: tuple[Speed | None, ...]


def rows_of(page: str) -> list[Row]:
    """The rows of the table whose head names vLLM 0.33, kvferry and the others."""
    _, _, table = page.partition("| vLLM 0.33 | kvferry |")
    table, _, _ = table.partition("\n\n")
    rows = []
    for line in table.splitlines()[2:]:
        label, *cells, alone = (cell.strip() for cell in line.strip("|").split("|"))
        if found := VALUE.match(alone):
            is_rate = "/s" in cells[0]
            speeds = (_speed(cell, _number(found[1]), found[2], is_rate) for cell in cells)
            rows.append(Row(re.sub(r" \([^)]*\)$", "", label), tuple(speeds)))
    return rows


def _speed(cell: str, alone: float, unit: str, is_rate: bool) -> Speed | None:
    found = VALUE.match(cell)
    if found is None:
        return None
    in_seconds = {"ms": 1e-3, "s": 1.0}
    scale = 1.0 if is_rate else in_seconds[found[2]] / in_seconds[unit]
    values = (_number(found[place] or found[1]) * scale for place in (1, 3, 4))
    median, low, high = (value / alone if is_rate else alone / value for value in values)
    return Speed(median, (min(low, high), max(low, high)))


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def factor(speed: Speed) -> str:
    """What the picture shows at a bar."""
    return f"{speed.median:.2f}x" if speed.median < 1 else f"{speed.median:.1f}x"


def plot(rows: list[Row], path: Path) -> None:
    # Text stays text, and equal figures give equal files.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvferry", "font.size": 10})
    figure = Figure(figsize=(8.3, 0.9 + 0.55 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.36
    for column, (name, color) in enumerate(zip(SOLUTIONS, COLORS, strict=True)):
        for place, row in enumerate(rows):
            if (speed := row.speeds[column]) is None:
                continue
            # A bar without a neighbour is in the middle.
            at = place + (column - 0.5) * height * (None not in row.speeds)
            axes.barh(at, speed.median, height * 0.9, color=color)
            axes.plot(speed.ends, (at, at), color="#3f4a52", linewidth=1.2)
            axes.text(speed.ends[1] + 0.08, at, factor(speed), va="center", fontsize=9)
        axes.barh(0, 0, color=color, label=name)
    axes.axvline(1, color="#3f4a52", linewidth=1, linestyle=(0, (4, 3)), label="no connector")
    labels = [textwrap.fill(row.label, LABEL_WIDTH) for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(speed.median for row in rows for speed in row.speeds if speed))
    axes.set_xticks(range(int(axes.get_xlim()[1]) + 1))
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(TITLE, fontsize=12, fontweight="bold")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE.svg")
    plot(rows_of((ROOT / "README.md").read_text()), parser.parse_args().output)
