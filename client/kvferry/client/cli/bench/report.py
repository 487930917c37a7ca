"""The results as two tables, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.client.cli.bench.results import WAYS, About, Fragments, Rate, Results
from kvferry.client.cli.units import size


def show(results: Results, console: Console) -> None:
    for line in _header(results.about):
        console.print(Text(line), soft_wrap=True)
    console.print(_bandwidth(results), _latencies(results), sep="\n")


def _header(about: About) -> Iterator[str]:
    uuid = "" if about.device_uuid == "cpu" else f" ({about.device_uuid})"
    driver = f", driver {about.driver}" if about.driver else ""
    cuda = f" (CUDA {about.cuda})" if about.cuda else ""
    yield f"{about.device}{uuid}{driver}; {about.cpus} CPUs, {about.cpu}"
    yield (
        f"kvferryd {about.daemon}, kvferry {about.kvferry}, torch {about.torch}{cuda}, "
        f"Python {about.python}; {about.started}"
    )
    yield f"$ {about.command}"


def _bandwidth(results: Results) -> Table:
    about = results.about
    caption = (
        f"{size(about.nbytes)} each way, median of {about.reps} and min..max; on device: by the "
        "jobs'\ntransfer_time; x: of the contiguous pinned copy the same way. A sample of the\n"
        "bytes was compared after each copy."
    )
    table = _table("GB/s", caption)
    table.add_column("fragment")
    table.add_column("")
    for name in ("end to end", "min..max", "x", "on device", "min..max", "x"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in WAYS:
        rate = results.contiguous[way]
        cells = ("", "", "", _figure(rate.median), _range(rate), "")
        table.add_row(*_begin("contiguous", way), *cells, end_section=way == WAYS[-1])
    for fragments in results.bandwidth:
        _add(table, fragments)
    return table


def _add(table: Table, fragments: Fragments) -> None:
    for way in WAYS:
        copies = fragments.copies[way]
        cells: list[str] = []
        for rate in (copies.end_to_end, copies.on_device):
            cells += [_figure(rate.median), _range(rate), f"{rate.ratio:.2f}"]
        begin = _begin(size(fragments.page_bytes), way)
        table.add_row(*begin, *cells, end_section=way == WAYS[-1])


def _latencies(results: Results) -> Table:
    table = _table("microseconds")
    table.add_column("")
    for name in ("p50", "p99", "samples"):
        table.add_column(name, justify="right")
    for latency in results.latency:
        counted = f"{len(latency.seconds):,}" if latency.seconds else ""
        table.add_row(latency.what, f"{latency.p50:.1f}", f"{latency.p99:.1f}", counted)
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


def _begin(name: str, way: str) -> tuple[str, str]:
    """The first two cells: a name stands once for its three rows."""
    return (name if way == WAYS[0] else "", way)


def _figure(rate: float) -> str:
    return f"{rate:.2f}" if rate < 10 else f"{rate:.1f}"


def _range(rate: Rate) -> str:
    return f"{_figure(rate.low)}..{_figure(rate.high)}"
