"""GB/s over fragment size, end to end, with the contiguous copy as the line to reach."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvferry.client.cli.bench.results import WAYS, Results
from kvferry.client.cli.units import size

COLOURS = dict(zip(WAYS, ("#0072b2", "#d55e00", "#009e73"), strict=True))
NAMES = dict(zip(WAYS, ("store", "load", "both at once, sum"), strict=True))


def draw(results: Results, path: Path) -> None:
    """A PNG of 1200 by 700 (the format follows the name)."""
    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for way in WAYS:
        _line(axes, results, way)
    _scales(axes, [fragments.page_bytes for fragments in results.bandwidth])
    about = results.about
    axes.set_title(f"kvferryd {about.daemon} on {about.device}, {about.started[:10]}", loc="left")
    figure.savefig(path, format=path.suffix[1:].lower() or "png")


def _line(axes: Axes, results: Results, way: str) -> None:
    colour, pages = COLOURS[way], [fragments.page_bytes for fragments in results.bandwidth]
    rates = [fragments.copies[way].end_to_end for fragments in results.bandwidth]
    axes.plot(pages, [rate.median for rate in rates], "o-", color=colour, label=NAMES[way])
    lows, highs = [rate.low for rate in rates], [rate.high for rate in rates]
    axes.fill_between(pages, lows, highs, color=colour, alpha=0.15, linewidth=0)
    contiguous = results.contiguous[way].median
    axes.axhline(contiguous, color=colour, linestyle="--", linewidth=1.2)


def _scales(axes: Axes, pages: list[int]) -> None:
    axes.plot([], [], "--", color="grey", linewidth=1.2, label="contiguous pinned copy")
    axes.set_xscale("log", base=2)
    axes.set_xticks(pages, [size(page) for page in pages], minor=False)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="fragment: one page of one tensor, at random places", ylabel="GB/s, end to end")
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
