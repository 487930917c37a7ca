"""Panels of `kvferry top`: one per daemon, rendered from its DaemonHistory alone.

link         GB/s per direction now; the bar is relative to one large contiguous copy
queue        jobs in flight, and how long the oldest waits for the daemon, or for its engine
pool         reserved, registered and free, not registered yet
tiers        state, bytes used and hit rate
namespaces   with their hit rate since the last sample; then engines, and errors

Each row also shows the numbers whose declaration says so (proto/status_numbers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvferry.client.cli.status import format_verified
from kvferry.client.cli.tier_rows import sibling_row, tier_row
from kvferry.client.cli.units import (
    duration,
    format_number,
    numbers,
    printable,
    short_duration,
    size,
)
from kvferry.client.cli.watcher import DaemonHistory, Rates, StatusSample
from kvferry.proto.specs import Part
from kvferry.proto.status import DaemonStatus, HealthStatus, NamespaceStatus, PoolStatus
from kvferry.proto.status_numbers import declared_numbers

# Below this number of columns, the sparkline and some columns are left out.
NARROW = 76
SPARK_STEPS = " ▁▂▃▄▅▆▇█"
# Seconds for which a daemon is shown as reconnected.
RECENT = 30.0


def render_screen(
    daemons: Sequence[DaemonHistory], now: float, width: int, searched: str = ""
) -> RenderableType:
    """All panels. searched: the directories that were searched, shown if there is no daemon."""
    if not daemons:
        return Panel(Text(f"no daemon runs here (searched {searched})", "yellow"), title="kvferry")
    return Group(*(render_panel(daemon, now, width) for daemon in daemons))


def render_panel(daemon: DaemonHistory, now: float, width: int) -> Panel:
    if daemon.sample is None or daemon.error:
        return _error_panel(daemon, now)
    status = daemon.sample.status
    healthy = status.health is None or status.health.healthy or status.health.starting
    note = ""
    if daemon.reconnected_at is not None and now - daemon.reconnected_at < RECENT:
        note = f" reconnected {short_duration(now - daemon.reconnected_at)} ago"
    return Panel(
        Group(*_rows(daemon, daemon.sample, width - 4)),
        title=Text.assemble((_title(status, width), "bold"), (note, "yellow")),
        title_align="left",
        subtitle=Text.assemble(*_format_health(status.health)),
        subtitle_align="left",
        border_style="cyan" if healthy else "red",
        box=box.ROUNDED,
        padding=(0, 1),
    )


def _error_panel(daemon: DaemonHistory, now: float) -> Panel:
    if not daemon.error:
        text = Text("waiting for its reply", "dim")
    elif daemon.sample is None:
        text = Text(daemon.error, "red")
    else:
        text = Text(f"gone for {short_duration(now - daemon.since)}: {daemon.error}", "red")
        text.append(f"\nlast seen as pid {daemon.sample.status.pid}; reconnecting", "dim")
    title = Text(str(daemon.directory), "bold")
    return Panel(text, title=title, title_align="left", border_style="red", box=box.ROUNDED)


def _title(status: DaemonStatus, width: int) -> str:
    parts = [status.device.name, f"pid {status.pid}", f"up {duration(status.uptime_seconds)}"]
    if width >= NARROW and status.device.uuid != status.device.kind:
        parts.insert(1, status.device.uuid[:12])
    return " · ".join(parts)


def _format_health(health: HealthStatus | None) -> Iterator[tuple[str, str]]:
    if health is None:
        yield "replies", "green"
    elif health.healthy:
        yield "healthy", "green"
        if health.probe_seconds is not None:
            yield f" · probe {short_duration(health.probe_seconds)}", "dim"
    elif health.starting:
        yield f"starting: {'; '.join(health.reasons)}", "yellow"
    else:
        yield "; ".join(health.reasons), "bold red"


def _rows(daemon: DaemonHistory, sample: StatusSample, width: int) -> Iterator[RenderableType]:
    status, wide = sample.status, width >= NARROW - 4
    yield _link_row(daemon, status, width, wide)
    yield _queue_row(status, daemon.rates)
    yield _pool_row(status.pool, width)
    if status.siblings:
        yield sibling_row(status.siblings)
    yield from (tier_row(tier) for tier in status.tiers)
    check = status.verification
    if check is not None and check.decided_bytes < check.total_bytes:
        yield Text.assemble(("verified ", "dim"), format_verified(check))
    if sample.namespaces:
        yield _namespace_table(sample, daemon.previous, wide)
    yield from _engine_row(status)
    if status.errors:
        counts = (f"{code} x{n:,}" for code, n in sorted(status.errors.items()))
        yield Text.assemble(("errors   ", "dim"), (", ".join(counts), "yellow"))


def _link_row(daemon: DaemonHistory, status: DaemonStatus, width: int, wide: bool) -> Table:
    contiguous = status.copying.contiguous if status.copying else None
    table = Table.grid(padding=(0, 1))
    for direction, style in (("store", "magenta"), ("load", "cyan")):
        past = [getattr(rates, direction) for rates in tuple(daemon.history)]
        peak = getattr(contiguous, direction) if contiguous else max([*past, 1.0])
        rate = getattr(daemon.rates, direction)
        cells = [Text(f"{direction:<7}", "dim"), Text(f"{rate / 1e9:6.2f} GB/s", "bold")]
        cells.append(render_bar([(min(1.0, rate / peak), "█", style)], 20 if wide else 12))
        if wide:
            cells.append(Text(render_sparkline(past, peak, max(0, width - 46)), style))
        table.add_row(*cells)
    return table


def _queue_row(status: DaemonStatus, rates: Rates) -> Text:
    jobs = sum(engine.jobs for engine in status.engines)
    text = Text.assemble(("queue    ", "dim"), f"{jobs:,} in flight · {rates.jobs:,.0f} jobs/s")
    if rates.failed:
        text.append(f" · {rates.failed:,.1f} fail", "red")
    return _append_numbers(text, status.health, status.totals, status)


def _append_numbers(text: Text, *parts: Part | None) -> Text:
    for part in parts:
        for number in numbers(part, top=True) if part is not None else ():
            text.append(" · ").append(number)
    return text


def _pool_row(pool: PoolStatus, width: int) -> Text:
    whole = max(1, pool.size_bytes)
    reserved, pinned = pool.reserved_bytes / whole, pool.pinned_bytes / whole
    parts = [(reserved, "█", "blue"), (max(0.0, pinned - reserved), "▒", "green")]
    text = f" {size(pool.reserved_bytes)} of {size(pool.size_bytes)}"
    if pool.pinned_bytes < pool.size_bytes:
        text += f", {pinned:.0%} registered"
    room = max(10, min(40, width - 9 - len(text)))
    bar = render_bar(parts, room)
    return _append_numbers(Text.assemble(("pool     ", "dim"), bar, text), pool)


def _namespace_table(sample: StatusSample, previous: StatusSample | None, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=36 if wide else 20)
    declared = declared_numbers(type(sample.namespaces[0])).items()
    shown = {field: number for field, number in declared if wide and number.top}
    names = [number.text.format("").strip() for number in shown.values()]
    for name in ("full", "", "hits", *(["blocks"] if wide else []), *names):
        table.add_column(name, justify="right", no_wrap=True)
    old = {space.name: space for space in previous.namespaces} if previous else {}
    for space in sample.namespaces:
        full = (space.blocks - space.free) / max(1, space.blocks)
        cells: list[Text | str] = [
            _model_name(space),
            f"{full:.0%}",
            render_bar([(full, "█", "blue")], 10),
        ]
        cells.append(_format_hit_rate(space, old.get(space.name)))
        if wide:
            cells.append(f"{space.blocks:,} x {size(space.block_bytes)}")
        cells += [format_number(each, getattr(space, field)) for field, each in shown.items()]
        table.add_row(*cells)
    return table


def _model_name(space: NamespaceStatus) -> Text:
    model = space.fingerprint
    rank = f" {model.rank + 1}/{model.world_size}" if model.world_size > 1 else ""
    name = printable(model.model.rsplit("/", 1)[-1])
    return Text(name + rank, "" if space.engines else "dim")


def _format_hit_rate(space: NamespaceStatus, old: NamespaceStatus | None) -> Text:
    """The hit rate since the last sample; without lookups since then, over all time."""
    hits, misses = space.hits, space.misses
    if old is not None and (hits + misses) > (old.hits + old.misses):
        hits, misses = hits - old.hits, misses - old.misses
        return Text(f"{hits / (hits + misses):.0%}", "bold")
    return Text(f"{hits / (hits + misses):.0%}" if hits + misses else "-", "dim")


def _engine_row(status: DaemonStatus) -> Iterator[Text]:
    if not status.engines:
        return
    text = Text.assemble(("engines  ", "dim"))
    for number, engine in enumerate(status.engines):
        style = "green" if engine.present else "dim"
        away = "" if engine.present else " (away)"
        text.append("  " if number else "").append(f"{printable(engine.name)}{away}", style)
        for each in numbers(engine, top=True):
            text.append(" ").append(each)
    yield text


def render_bar(parts: Iterable[tuple[float, str, str]], width: int) -> Text:
    """A bar of parts, each (fraction of the width, character, style); the rest is empty."""
    text = Text()
    for fraction, character, style in parts:
        cells = min(
            width - len(text), round(fraction * width + (0.5 if 0 < fraction < 1 / width else 0))
        )
        text.append(character * cells, style)
    return text.append("░" * (width - len(text)), "dim")


def render_sparkline(values: Sequence[float], peak: float, width: int) -> str:
    """The last `width` values as columns; a value above 0 is never an empty column."""
    top = len(SPARK_STEPS) - 1
    shown = values[-width:] if width else []
    return "".join(SPARK_STEPS[min(top, -int(-value * top // peak))] for value in shown)
