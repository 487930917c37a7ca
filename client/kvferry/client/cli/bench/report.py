"""The results as tables, one for each thing measured, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.client.cli.bench.results import (
    IN_A_ROW,
    WAYS,
    About,
    Beside,
    Fragments,
    Latency,
    Rate,
    Results,
    Start,
)
from kvferry.client.cli.units import size


def show(results: Results, console: Console) -> None:
    for line in _header(results.about):
        console.print(Text(line), soft_wrap=True)
    for table in _tables(results):
        console.print(table)
    for note in results.notes:
        console.print(Text(note), soft_wrap=True)


def _tables(results: Results) -> Iterator[Table]:
    if results.start is not None:
        yield _start(results.start)
    if results.bandwidth:
        yield _bandwidth(results)
    if results.latency:
        yield _latencies(results.latency)
    if results.queued:
        yield _queued(results)
    for loop in dict.fromkeys(row.loop for row in results.beside):
        yield _beside(results, loop)


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
        ways = ", ".join(f"{way}s from {_from(least)}" for way, least in about.direct_from.items())
        yield f"copied directly: {ways}; others staged"
    yield f"$ {about.command}"


def _from(page_bytes: int) -> str:
    """A fragment size, or what stands for none: a daemon can be told to copy all in one way."""
    if not page_bytes:
        return "0 bytes on"
    return "no size on" if page_bytes > 1 << 40 else f"{size(page_bytes)} on"


def _bandwidth(results: Results) -> Table:
    about = results.about
    caption = (
        f"{size(about.nbytes)} each way, median of {about.reps}, and min..max; in a row: "
        f"{IN_A_ROW} times over, the next submitted before the last has ended; once: after "
        "nothing; both until the end is seen; on device: once, by the jobs' transfer_time; x: of "
        "the contiguous pinned copy the same way. A sample of the bytes was compared after each."
    )
    table = _table("GB/s", caption)
    table.add_column("fragment")
    table.add_column("")
    for name in ("in a row", "min..max", "x", "once", "x", "on device", "x"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in WAYS:
        rate = results.contiguous[way]
        cells = ("", _range(rate), "", "", "", _figure(rate.median), "")
        table.add_row(*_begin("contiguous", way), *cells, end_section=way == WAYS[-1])
    for fragments in results.bandwidth:
        _add(table, fragments)
    return table


def _add(table: Table, fragments: Fragments) -> None:
    for way in WAYS:
        copies = fragments.copies[way]
        row, once, device = copies.in_a_row, copies.once, copies.on_device
        cells = [_figure(row.median), _range(row), f"{row.ratio:.2f}"]
        for rate in (once, device):
            cells += [_figure(rate.median), f"{rate.ratio:.2f}"]
        begin = _begin(size(fragments.page_bytes), way)
        table.add_row(*begin, *cells, end_section=way == WAYS[-1])


def _latencies(latencies: list[Latency]) -> Table:
    table = _table("microseconds")
    table.add_column("")
    for name in ("p50", "p99", "max", "samples"):
        table.add_column(name, justify="right")
    for latency in latencies:
        counted = latency.seconds and (f"{latency.high:.1f}", f"{len(latency.seconds):,}")
        table.add_row(latency.what, f"{latency.p50:.1f}", f"{latency.p99:.1f}", *counted)
    return table


def _queued(results: Results) -> Table:
    """Microseconds, and how many times the idle ones they are."""
    caption = (
        "2 MiB loaded, submitted to seen; x: of the same, idle. Queued: stores, submitted again "
        "as they end. Behind a submit: loads that were sent right behind one of these."
    )
    table = _table("microseconds, behind stores", caption)
    table.add_column("")
    for name in ("p50", "x", "p99", "x", "max", "samples"):
        table.add_column(name, justify="right")
    for queued in results.queued:
        name, idle = f"pages of {size(queued.page_bytes)}", queued.idle
        for what, latency in queued.rows:
            cells = [f"{latency.p50:.1f}", f"{latency.p50 / idle.p50:.2f}"]
            cells += [f"{latency.p99:.1f}", f"{latency.p99 / idle.p99:.2f}", f"{latency.high:.1f}"]
            table.add_row(f"{name}, {what}", *cells, f"{len(latency.seconds):,}")
        table.add_section()
    return table


def _start(start: Start) -> Table:
    table = _table(f"start of a daemon, pool of {size(start.pool_bytes)}")
    for name in ("", "median", "min..max"):
        table.add_column(name, justify="right" if name else "left")
    moments = {
        "socket there": start.socket,
        "client greeted": start.greeted,
        "first store of one block seen": start.first_store,
    }
    for name, spread in moments.items():
        table.add_row(name, f"{spread.median:.2f} s", f"{spread.low:.2f}..{spread.high:.2f}")
    table.add_row("all of the pool registered", f"{start.registered:.2f} s", end_section=True)
    gpu = start.context_bytes > 0
    other = "cudaHostAlloc of as much" if gpu else "as much memory, touched by one thread"
    table.add_row(other, f"{start.pinned_seconds:.2f} s")
    table.add_row("registered, of that", f"{start.registered / start.pinned_seconds:.2f} x")
    if gpu:
        over = start.device_bytes - start.staging_bytes
        table.add_section()
        table.add_row("device memory, without staging", size(over))
        table.add_row("declared staging", size(start.staging_bytes))
        table.add_row("a bare CUDA context", size(start.context_bytes))
        beyond = over - start.context_bytes
        table.add_row("beyond a bare context", f"{beyond / (1 << 20):.1f} MiB")
    return table


def _beside(results: Results, loop: str) -> Table:
    rows = [row for row in results.beside if row.loop == loop]
    caption = (
        "x: GB/s beside the engine, of the contiguous copy alone; step: the engine's,\n"
        "with copies by without; ms/GiB: engine time lost per GiB moved, median and\n"
        "min..max; drift: of the engine's step alone, in the windows around."
    )
    table = _table(f"beside an engine, {loop}", caption)
    for name in ("fragment", "", "alone", "beside", "x", "step", "ms/GiB", "min..max", "drift"):
        table.add_column(name, justify="left" if len(table.columns) < 2 else "right", no_wrap=True)
    how = ""
    for row in rows:
        if row.how != how:
            how = row.how
            table.add_section()
            table.add_row(Text(how, "bold"))
        table.add_row(*_beside_cells(row))
    return table


def _beside_cells(row: Beside) -> Iterator[str]:
    yield from _begin(size(row.page_bytes) if row.page_bytes else "whole", row.way)
    lost, alone = row.lost_ms_per_gib, row.alone_ms
    yield from (_figure(row.alone), _figure(row.rate.median), f"{row.ratio:.2f}")
    yield f"{row.with_ms.median / alone.median:.3f}"
    yield from (f"{lost.median:.2f}", f"{lost.low:.2f}..{lost.high:.2f}")
    yield f"{(alone.high / alone.low - 1) * 100:.1f}%"


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
