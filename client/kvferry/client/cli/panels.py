"""How `kvferry top` looks: a panel a daemon, drawn from what was seen of it and nothing else.

link       each way: what moves now, of what one large copy was measured to reach
queue      jobs under way, and since when the oldest waits for us, or for its engine
pool       reserved, registered and free, not registered yet
below      namespaces with their hit rate since the last look, then engines and errors
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvferry.client.cli.status import verified
from kvferry.client.cli.units import brief, plain, size, span
from kvferry.client.cli.watch import Look, Rates, Seen
from kvferry.proto.status import DaemonStatus, HealthStatus, NamespaceStatus, PoolStatus

# Columns below which the history and the less needed columns are left out.
NARROW = 76
STEPS = " ▁▂▃▄▅▆▇█"
# Seconds for which a daemon is shown as reconnected.
RECENT = 30.0


def screen(daemons: Sequence[Seen], now: float, width: int, looked: str = "") -> RenderableType:
    """All of it. looked: where daemons were looked for, said when there are none."""
    if not daemons:
        return Panel(Text(f"no daemon runs here (looked at {looked})", "yellow"), title="kvferry")
    return Group(*(panel(seen, now, width) for seen in daemons))


def panel(seen: Seen, now: float, width: int) -> Panel:
    if seen.look is None or seen.why:
        return _absent(seen, now)
    status = seen.look.status
    well = status.health is None or status.health.healthy
    back = seen.returned is not None and now - seen.returned < RECENT
    note = f" back for {brief(now - seen.returned)}" if back and seen.returned else ""
    return Panel(
        Group(*_rows(seen, seen.look, width - 4)),
        title=Text.assemble((_name(status, width), "bold"), (note, "yellow")),
        title_align="left",
        subtitle=Text.assemble(*_verdict(status.health)),
        subtitle_align="left",
        border_style="cyan" if well else "red",
        box=box.ROUNDED,
        padding=(0, 1),
    )


def _absent(seen: Seen, now: float) -> Panel:
    if not seen.why:
        said = Text("asking it", "dim")
    elif seen.look is None:  # since when, nobody knows
        said = Text(seen.why, "red")
    else:
        said = Text(f"gone for {brief(now - seen.since)}: {seen.why}", "red")
        said.append(f"\nit was pid {seen.look.status.pid}; waiting for it", "dim")
    title = Text(str(seen.directory), "bold")
    return Panel(said, title=title, title_align="left", border_style="red", box=box.ROUNDED)


def _name(status: DaemonStatus, width: int) -> str:
    parts = [status.device.name, f"pid {status.pid}", f"up {span(status.uptime_seconds)}"]
    if width >= NARROW and status.device.uuid != status.device.kind:
        parts.insert(1, status.device.uuid[:12])
    return " · ".join(parts)


def _verdict(health: HealthStatus | None) -> Iterator[tuple[str, str]]:
    if health is None:
        yield "answers", "green"
    elif health.healthy:
        yield "healthy", "green"
        if health.probe_seconds is not None:
            yield f" · there and back in {brief(health.probe_seconds)}", "dim"
    else:
        yield "; ".join(health.reasons), "bold red"


def _rows(seen: Seen, look: Look, width: int) -> Iterator[RenderableType]:
    status, wide = look.status, width >= NARROW - 4
    yield _link(seen, status, width, wide)
    yield _queue(status, seen.rates)
    yield _pool(status.pool, width)
    left = status.verification
    if left is not None and left.decided_bytes < left.total_bytes:
        yield Text.assemble(("verified ", "dim"), verified(left))
    if look.namespaces:
        yield _namespaces(look, seen.before, wide)
    yield from _engines(status)
    if status.errors:
        counts = (f"{code} x{n:,}" for code, n in sorted(status.errors.items()))
        yield Text.assemble(("errors   ", "dim"), (", ".join(counts), "yellow"))


def _link(seen: Seen, status: DaemonStatus, width: int, wide: bool) -> Table:
    most = status.copying.contiguous if status.copying else None
    table = Table.grid(padding=(0, 1))
    for way, style in (("store", "magenta"), ("load", "cyan")):
        past = [getattr(rates, way) for rates in tuple(seen.history)]
        peak = getattr(most, way) if most else max([*past, 1.0])
        rate = getattr(seen.rates, way)
        cells = [Text(f"{way:<7}", "dim"), Text(f"{rate / 1e9:6.2f} GB/s", "bold")]
        cells.append(bar([(min(1.0, rate / peak), "█", style)], 20 if wide else 12))
        if wide:
            cells.append(Text(spark(past, peak, max(0, width - 46)), style))
        table.add_row(*cells)
    return table


def _queue(status: DaemonStatus, rates: Rates) -> Text:
    jobs = sum(engine.jobs for engine in status.engines)
    said = Text.assemble(("queue    ", "dim"), f"{jobs:,} under way · {rates.jobs:,.0f} jobs/s")
    if rates.failed:
        said.append(f" · {rates.failed:,.1f} fail", "red")
    health = status.health
    if health is not None and health.oldest_job is not None:
        said.append(f" · oldest {brief(health.oldest_job)}")
    if health is not None and health.held_job is not None:
        said.append(f" · waiting for its engine {brief(health.held_job)}", "yellow")
    return said


def _pool(pool: PoolStatus, width: int) -> Text:
    whole = max(1, pool.size_bytes)
    reserved, pinned = pool.reserved_bytes / whole, pool.pinned_bytes / whole
    parts = [(reserved, "█", "blue"), (max(0.0, pinned - reserved), "▒", "green")]
    said = f" {size(pool.reserved_bytes)} of {size(pool.size_bytes)}"
    if pool.pinned_bytes < pool.size_bytes:
        said += f", {pinned:.0%} registered"
    room = max(10, min(40, width - 9 - len(said)))
    return Text.assemble(("pool     ", "dim"), bar(parts, room), said)


def _namespaces(look: Look, before: Look | None, wide: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=36 if wide else 20)
    for name in ("full", "", "hits", *(("blocks", "evicted") if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    old = {space.name: space for space in before.namespaces} if before else {}
    for space in look.namespaces:
        full = (space.blocks - space.free) / max(1, space.blocks)
        cells: list[Text | str] = [_model(space), f"{full:.0%}", bar([(full, "█", "blue")], 10)]
        cells.append(_hits(space, old.get(space.name)))
        if wide:
            cells += [f"{space.blocks:,} x {size(space.block_bytes)}", f"{space.evictions:,}"]
        table.add_row(*cells)
    return table


def _model(space: NamespaceStatus) -> Text:
    whose = space.fingerprint
    rank = f" {whose.rank + 1}/{whose.world_size}" if whose.world_size > 1 else ""
    name = plain(whose.model.rsplit("/", 1)[-1])
    return Text(name + rank, "" if space.engines else "dim")


def _hits(space: NamespaceStatus, old: NamespaceStatus | None) -> Text:
    """Since the last look, where there were any; else since ever."""
    hits, misses = space.hits, space.misses
    if old is not None and (hits + misses) > (old.hits + old.misses):
        hits, misses = hits - old.hits, misses - old.misses
        return Text(f"{hits / (hits + misses):.0%}", "bold")
    return Text(f"{hits / (hits + misses):.0%}" if hits + misses else "-", "dim")


def _engines(status: DaemonStatus) -> Iterator[Text]:
    if not status.engines:
        return
    said = Text.assemble(("engines  ", "dim"))
    for number, engine in enumerate(status.engines):
        style = "green" if engine.present else "dim"
        away = "" if engine.present else " (away)"
        jobs = f" {engine.jobs:,} jobs" if engine.jobs else ""
        said.append("  " if number else "").append(f"{plain(engine.name)}{away}{jobs}", style)
    yield said


def bar(parts: Iterable[tuple[float, str, str]], width: int) -> Text:
    """Fractions of the width, each as (fraction, character, style); the rest is empty."""
    text = Text()
    for fraction, character, style in parts:
        cells = min(
            width - len(text), round(fraction * width + (0.5 if 0 < fraction < 1 / width else 0))
        )
        text.append(character * cells, style)
    return text.append("░" * (width - len(text)), "dim")


def spark(values: Sequence[float], most: float, width: int) -> str:
    """The last `width` values as columns; one that is not 0 is never empty."""
    top = len(STEPS) - 1
    shown = values[-width:] if width else []
    return "".join(STEPS[min(top, -int(-value * top // most))] for value in shown)
