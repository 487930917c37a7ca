"""Two panels over fragment size: GB/s, and the engine's time lost per GiB moved.

    python -m kvferry.client.cli.bench.plotting bench.json out.png

draws what a run with --json has kept, as --plot does. A panel stands where its figures are there:
bandwidth on the left (with the alternatives of `beside`, alone), `beside` on the right.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from itertools import product
from pathlib import Path

import msgspec
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kvferry.client.cli.bench.results import WAYS, Beside, Results
from kvferry.client.cli.units import size
from kvferry.proto.errors import Code, Refused

# Okabe and Ito's, which colour-blind readers tell apart.
COLOURS = dict(zip(WAYS, ("#0072b2", "#d55e00", "#009e73"), strict=True))
NAMES = dict(zip(WAYS, ("store", "load", "both at once, sum"), strict=True))
HOWS = {
    "kvferry": ("#0072b2", "o", "kvferry"),
    "kvferry, MPS": ("#009e73", "D", "kvferry under MPS"),
    "batched DMA": ("#e69f00", "s", "batched DMA only"),
    "pinned kernel": ("#cc79a7", "^", "pinned-memory kernel"),
}
STYLES = {"matmul": "-", "decode": "--"}
LEVELS = (-5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
GREY = "0.45"


def check(path: Path, what: Collection[str]) -> None:
    """Raise ValueError where a run that measures `what` cannot be drawn there."""
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if _format(path) not in formats:
        raise ValueError(
            f"{path} has no known format; name a file with one of {', '.join(formats)}"
        )
    if not {"bandwidth", "beside"} & set(what):
        raise ValueError("nothing to plot; measure bandwidth, or beside on a GPU")


def draw(results: Results, path: Path) -> None:
    """A PNG of 1400 by 600 (the format follows the name). Raises Refused where nothing is there."""
    panels: list[Callable[[Axes, Results], None]] = []
    panels += [_rates] if results.bandwidth else []
    panels += [_lost] if results.beside else []
    if not panels:
        raise Refused(
            Code.BAD_CONFIG, f"nothing to plot in {path}; measure bandwidth or beside", str(path)
        )
    figure = Figure(figsize=(14, 6), dpi=100)
    figure.subplots_adjust(left=0.035, right=0.985, top=0.87, bottom=0.22, wspace=0.09)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, results)
        _tidy(axes)
    about = results.about
    title = f"kvferryd {about.daemon} on {about.device}, {about.started[:10]}"
    figure.suptitle(title, x=0.035, y=0.965, ha="left", fontsize=11, color=GREY)
    figure.savefig(path, format=_format(path))


def _format(path: Path) -> str:
    return path.suffix[1:].lower() or "png"


def _rates(axes: Axes, results: Results) -> None:
    pages = [fragments.page_bytes for fragments in results.bandwidth]
    for way in WAYS:
        rates = [fragments.copies[way].in_a_row for fragments in results.bandwidth]
        medians, colour = [rate.median for rate in rates], COLOURS[way]
        axes.plot(pages, medians, "o-", color=colour, label=f"kvferry, {NAMES[way]}", zorder=3)
        lows, highs = [rate.low for rate in rates], [rate.high for rate in rates]
        axes.fill_between(pages, lows, highs, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(results.contiguous[way].median, color=colour, linestyle=":", linewidth=1.3)
    axes.plot([], [], ":", color=GREY, linewidth=1.3, label="one contiguous copy")
    for how in ("batched DMA", "pinned kernel"):
        for way in WAYS[:2]:
            _alternative(axes, results.beside, how, way)
    axes.set_title("GB/s, jobs in a row, nothing else on the GPU", loc="left", fontsize=11)
    _sizes(axes, pages)
    axes.set_ylim(bottom=0)


def _alternative(axes: Axes, rows: Iterable[Beside], how: str, way: str) -> None:
    """By how in its shape, by way in its colour."""
    points = {row.page_bytes: row.alone for row in rows if (row.how, row.way) == (how, way)}
    _, marker, name = HOWS[how]
    if points:
        axes.plot(
            sorted(points),
            [points[page] for page in sorted(points)],
            linestyle="",
            marker=marker,
            markersize=8,
            markerfacecolor="none",
            color=COLOURS[way],
            label=f"{name}, {way}",
        )


def _lost(axes: Axes, results: Results) -> None:
    """The mean of storing and loading, with a bar from the one to the other."""
    for how, loop in product(HOWS, STYLES):
        rows = [row for row in results.beside if (row.how, row.loop) == (how, loop)]
        pages = sorted({row.page_bytes for row in rows})
        both = [[r.lost_ms_per_gib.median for r in rows if r.page_bytes == page] for page in pages]
        colour, marker, name = HOWS[how]
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
    axes.set_title("a busy engine beside: ms it loses per GiB moved", loc="left", fontsize=11)
    _sizes(axes, sorted({row.page_bytes for row in results.beside if row.how in HOWS}))
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


def _tidy(axes: Axes) -> None:
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
        draw(msgspec.json.decode(chosen.given.read_bytes(), type=Results), chosen.drawn)
    except (OSError, ValueError, msgspec.MsgspecError, Refused) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
