"""The results as tables, one per measurement, 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.client.cli.bench.bench_results import (
    DIRECTIONS,
    IN_A_ROW,
    About,
    Fragments,
    Latency,
    Rate,
    Results,
)
from kvferry.client.cli.units import size


def print_results(results: Results, console: Console) -> None:
    for line in _header(results.about):
        console.print(Text(line), soft_wrap=True)
    for table in _tables(results):
        console.print(table)


def _tables(results: Results) -> Iterator[Table]:
    if results.bandwidth:
        yield _bandwidth(results)
    if results.latency:
        yield _latencies(results.latency)


def _header(about: About) -> Iterator[str]:
    uuid = "" if about.device_uuid == "cpu" else f" ({about.device_uuid})"
    driver = f", driver {about.driver}" if about.driver else ""
    cuda = f" (CUDA {about.cuda})" if about.cuda else ""
    yield f"{about.device}{uuid}{driver}; {about.cpus} CPUs, {about.cpu}"
    yield (
        f"kvferryd {about.daemon}, kvferry {about.kvferry}, torch {about.torch}{cuda}, "
        f"Python {about.python}; {about.started}"
    )
    if about.direct_from:
        directions = ", ".join(
            f"{direction}s from {_direct_range(least)}"
            for direction, least in about.direct_from.items()
        )
        yield f"copied directly: {directions}; others staged"
    yield f"$ {about.command}"


def _direct_range(page_bytes: int) -> str:
    """A fragment size; 0 and very large sizes mean that the daemon copies all in one mode."""
    if not page_bytes:
        return "0 bytes on"
    return "no size on" if page_bytes > 1 << 40 else f"{size(page_bytes)} on"


def _bandwidth(results: Results) -> Table:
    about = results.about
    caption = (
        f"{size(about.nbytes)} per direction, median of {about.reps}, and min..max. in a row: "
        f"{IN_A_ROW} copies, each submitted before the last has completed. once: one copy. on "
        "device: once, by the jobs' transfer_time. x: of the contiguous pinned copy. A sample of "
        "the bytes was compared after each copy."
    )
    table = _table("GB/s", caption)
    table.add_column("fragment")
    table.add_column("")
    for name in ("in a row", "min..max", "x", "once", "x", "on device", "x"):
        table.add_column(name, justify="right", no_wrap=True)
    for direction in DIRECTIONS:
        rate = results.contiguous[direction]
        cells = ("", _format_range(rate), "", "", "", _format_rate(rate.median), "")
        table.add_row(
            *_name_cells("contiguous", direction), *cells, end_section=direction == DIRECTIONS[-1]
        )
    for fragments in results.bandwidth:
        _add_rows(table, fragments)
    return table


def _add_rows(table: Table, fragments: Fragments) -> None:
    for direction in DIRECTIONS:
        copies = fragments.copies[direction]
        row, once, device = copies.in_a_row, copies.once, copies.on_device
        cells = [_format_rate(row.median), _format_range(row), f"{row.ratio:.2f}"]
        for rate in (once, device):
            cells += [_format_rate(rate.median), f"{rate.ratio:.2f}"]
        name_cells = _name_cells(size(fragments.page_bytes), direction)
        table.add_row(*name_cells, *cells, end_section=direction == DIRECTIONS[-1])


def _latencies(latencies: list[Latency]) -> Table:
    table = _table("microseconds")
    table.add_column("")
    for name in ("p50", "p99", "max", "samples"):
        table.add_column(name, justify="right")
    for latency in latencies:
        samples = latency.seconds and (f"{latency.high:.1f}", f"{len(latency.seconds):,}")
        table.add_row(latency.what, f"{latency.p50:.1f}", f"{latency.p99:.1f}", *samples)
    return table


def _table(title: str, caption: str | None = None) -> Table:
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _name_cells(name: str, direction: str) -> tuple[str, str]:
    """The first two cells; the name is shown in the first of its three rows only."""
    return (name if direction == DIRECTIONS[0] else "", direction)


def _format_rate(rate: float) -> str:
    return f"{rate:.2f}" if rate < 10 else f"{rate:.1f}"


def _format_range(rate: Rate) -> str:
    return f"{_format_rate(rate.low)}..{_format_rate(rate.high)}"
