"""Two panels over fragment size: GB/s, and the engine time lost per GiB moved.

    python -m kvferry.client.cli.bench.plotting bench.json out.png

plots the file that --json wrote, as --plot does. Left: bandwidth. Right: beside. A panel without
results is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from itertools import product
from pathlib import Path

import msgspec
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kvferry.client.cli.bench.results import DIRECTIONS, Results
from kvferry.client.cli.units import size
from kvferry.proto.errors import Code, Refused

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
COLOURS = dict(zip(DIRECTIONS, ("#0072b2", "#d55e00", "#009e73"), strict=True))
NAMES = dict(zip(DIRECTIONS, ("store", "load", "both at once, sum"), strict=True))
METHODS = {
    "kvferry": ("#0072b2", "o", "kvferry"),
}
STYLES = {"matmul": "-", "decode": "--"}
LEVELS = (-5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
GREY = "0.45"


def check_plot(path: Path, what: Collection[str]) -> None:
    """Raise ValueError if a run that measures `what` cannot be plotted to `path`."""
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if _format(path) not in formats:
        raise ValueError(
            f"{path} has no known format; name a file with one of {', '.join(formats)}"
        )
    if not {"bandwidth", "beside"} & set(what):
        raise ValueError("nothing to plot; measure bandwidth, or beside on a GPU")


def plot_results(results: Results, path: Path) -> None:
    """Write a plot of 1400 x 600 pixels; the suffix selects the format.

    Raises Refused (BAD_CONFIG) if there is nothing to plot.
    """
    panels: list[Callable[[Axes, Results], None]] = []
    panels += [_plot_rates] if results.bandwidth else []
    panels += [_plot_lost_time] if results.beside else []
    if not panels:
        raise Refused(
            Code.BAD_CONFIG, f"nothing to plot in {path}; measure bandwidth or beside", str(path)
        )
    figure = Figure(figsize=(14, 6), dpi=100)
    figure.subplots_adjust(left=0.035, right=0.985, top=0.87, bottom=0.22, wspace=0.09)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, results)
        _style_axes(axes)
    about = results.about
    title = f"kvferryd {about.daemon} on {about.device}, {about.started[:10]}"
    figure.suptitle(title, x=0.035, y=0.965, ha="left", fontsize=11, color=GREY)
    figure.savefig(path, format=_format(path))


def _format(path: Path) -> str:
    return path.suffix[1:].lower() or "png"


def _plot_rates(axes: Axes, results: Results) -> None:
    pages = [fragments.page_bytes for fragments in results.bandwidth]
    for direction in DIRECTIONS:
        rates = [fragments.copies[direction].in_a_row for fragments in results.bandwidth]
        medians, colour = [rate.median for rate in rates], COLOURS[direction]
        axes.plot(
            pages, medians, "o-", color=colour, label=f"kvferry, {NAMES[direction]}", zorder=3
        )
        lows, highs = [rate.low for rate in rates], [rate.high for rate in rates]
        axes.fill_between(pages, lows, highs, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(
            results.contiguous[direction].median, color=colour, linestyle=":", linewidth=1.3
        )
    axes.plot([], [], ":", color=GREY, linewidth=1.3, label="one contiguous copy")
    axes.set_title("GB/s, jobs in a row, nothing else on the GPU", loc="left", fontsize=11)
    _sizes(axes, pages)
    axes.set_ylim(bottom=0)


def _plot_lost_time(axes: Axes, results: Results) -> None:
    """The mean of stores and loads, with a bar from one to the other."""
    for method, loop in product(METHODS, STYLES):
        rows = [row for row in results.beside if (row.method, row.loop) == (method, loop)]
        pages = sorted({row.page_bytes for row in rows})
        both = [[r.lost_ms_per_gib.median for r in rows if r.page_bytes == page] for page in pages]
        colour, marker, name = METHODS[method]
        if pages:
            axes.plot(
                pages,
                [sum(values) / len(values) for values in both],
                linestyle=STYLES[loop],
                marker=marker,
                color=colour,
                label=f"{name}, {loop}",
            )
            lows, highs = [*map(min, both)], [*map(max, both)]
            axes.vlines(pages, lows, highs, color=colour, alpha=0.3, linewidth=3)
    axes.set_title("beside a busy engine: ms lost per GiB moved", loc="left", fontsize=11)
    _sizes(axes, sorted({row.page_bytes for row in results.beside if row.method in METHODS}))
    axes.set_yscale("symlog", linthresh=1, linscale=0.8)
    lost = [row.lost_ms_per_gib.median for row in results.beside]
    low, high = min(0.0, 1.5 * min(lost)), max(2.0, 1.3 * max(lost))
    axes.set_ylim(low, high)
    axes.set_yticks([level for level in LEVELS if low <= level <= high])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _sizes(axes: Axes, pages: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(pages, [size(page) for page in pages], minor=False)
    axes.set_xlabel("fragment: one page of one tensor, at random places")


def _style_axes(axes: Axes) -> None:
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelcolor="0.25", color="0.7", labelsize=8.5)
    axes.legend(
        frameon=False,
        fontsize=8.5,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.12),
        ncols=3,
        columnspacing=1.0,
        handletextpad=0.6,
    )
    for spine in (axes.spines["left"], axes.spines["bottom"]):
        spine.set_color("0.7")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("given", type=Path, metavar="bench.json")
    parser.add_argument("drawn", type=Path, metavar="out.png")
    chosen = parser.parse_args()
    try:
        plot_results(msgspec.json.decode(chosen.given.read_bytes(), type=Results), chosen.drawn)
    except (OSError, ValueError, msgspec.MsgspecError, Refused) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
