"""`kvferry status` and `kvferry release`. Needs no torch; registers nothing.

The bar of the pool, from the left: reserved by engines, connected or not; registered with the
device and free; not registered yet (a daemon registers its pool in the background).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from rich.console import Console
from rich.text import Text

from kvferry.client import DaemonStatus, OffloadClient, find_daemon
from kvferry.client.cli.tier_rows import sibling_lines, tier_lines
from kvferry.client.cli.units import duration, numbers, printable, rows, short_duration, size
from kvferry.client.endpoint import daemon_pid, find_all_daemons, find_daemon_in
from kvferry.proto.errors import Code, Gone
from kvferry.proto.status import (
    EngineStatus,
    NamespaceStatus,
    PoolStatus,
    Totals,
    VerificationStatus,
)

Namespaces: TypeAlias = tuple[NamespaceStatus, ...]

# Seconds to wait for a reply.
TIMEOUT = 5.0
BAR_WIDTH = 20


def locate_daemon(directory: Path | None) -> Path:
    """A daemon's runtime directory: `directory`, the only one in it, or the only daemon's (None).

    Raises Refused (SEVERAL_DAEMONS), or Gone (DAEMON_GONE) with the searched directories.
    """
    if directory is None:
        return find_daemon()
    return find_daemon_in(directory) or find_all_daemons(directory)[0]


def fetch_status(where: Path, timeout: float = TIMEOUT) -> tuple[DaemonStatus, Namespaces]:
    """A daemon's status. Raises Gone (TIMEOUT), naming its process, if it does not reply."""
    try:
        with OffloadClient(
            where, engine="kvferry-cli", client="kvferry status", timeout=timeout
        ) as client:
            return client.status(), client.namespaces()
    except Gone as gone:
        if gone.code != Code.TIMEOUT:
            raise
        pid = daemon_pid(where)
        advice = (
            f"see the log of process {pid}"
            if pid
            else "start kvferryd (no process has this directory)"
        )
        message = f"no reply from {where} within {timeout:g} s; {advice}"
        raise Gone(Code.TIMEOUT, message, str(where)) from gone


def release_memory(directory: Path | None, name: str) -> int:
    """Free what the daemon keeps for an engine or a namespace: tensors and host memory. Returns
    the bytes."""
    where = locate_daemon(directory)
    with OffloadClient(
        where, engine="kvferry-cli", client="kvferry release", timeout=TIMEOUT
    ) as client:
        return client.release_kv_caches(name, host_memory=True)


def release_retained(directory: Path | None, namespace: str, label: str | None) -> int:
    """End what hints retain in a namespace, of a label or all. Returns the bytes."""
    where = locate_daemon(directory)
    with OffloadClient(
        where, engine="kvferry-cli", client="kvferry release", timeout=TIMEOUT
    ) as client:
        return client.release_retained(namespace, label)


def as_json(value: Any) -> Any:
    """Convert to dicts and lists. msgspec encodes these structs as arrays, without field names."""
    match value:
        case msgspec.Struct():
            return {name: as_json(getattr(value, name)) for name in value.__struct_fields__}
        case tuple() | list():
            return [as_json(item) for item in value]
    return value


def json_text(value: Any) -> str:
    """JSON in ASCII, which every locale can encode."""
    return json.dumps(json.loads(msgspec.json.encode(value)), indent=2)


def print_status(status: DaemonStatus, namespaces: Namespaces, console: Console) -> None:
    """Rows of at most the console's width. Names stay whole: other commands need them."""
    for line in _status_lines(status, namespaces, console.width):
        console.print(line, soft_wrap=True)


def _status_lines(status: DaemonStatus, namespaces: Namespaces, width: int) -> Iterator[Text]:
    device, version = status.device, f"kvferryd {status.version}"
    yield Text.assemble((version, "bold"), " on ", (device.name, "bold"), f", {device.kind}")
    if device.uuid != device.kind:
        yield from rows("uuid", [device.uuid], width)
    process = [f"pid {status.pid}", f"up {duration(status.uptime_seconds)}"]
    yield from rows("process", [*process, f"boot {status.boot_id}"], width)
    yield from _health_lines(status, width)
    yield from _pool_lines(status.pool, width)
    yield from tier_lines(status.tiers, width)
    yield from sibling_lines(status.siblings, width)
    if status.lent:
        yield from rows("lent", [f"{status.lent:,} blocks to siblings"], width)
    if status.verification is not None:
        yield from rows("verified", [format_verified(status.verification)], width)
    yield from _total_lines(status.totals, width)
    if status.errors:
        counts = (f"{code} x{n}" for code, n in sorted(status.errors.items()))
        yield from rows("errors", counts, width, "red")
    for name, error in status.refused_engines.items():
        text = f"engine {printable(name)}: [{error.code}] {printable(error.message)}"
        yield from rows("refused", [text], width, "red")
    sessions = f"{status.sessions} (this one included)"
    parts = [sessions, f"engines {len(status.engines)}", *numbers(status)]
    yield from rows("sessions", parts, width)
    for engine in status.engines:
        yield Text()
        yield from _engine_lines(engine, width)
    for space in namespaces:
        yield Text()
        yield from _namespace_lines(space, width)


def _health_lines(status: DaemonStatus, width: int) -> Iterator[Text]:
    """Health, delays and the oldest jobs."""
    health = status.health
    if health is None:
        return
    healthy, line = summarize_health(status)
    if healthy:
        summary = Text(line, "green")
    elif health.starting:
        summary = Text(line, "yellow")
    else:
        summary = Text(f"unhealthy: {printable(line)}", "bold red")
    yield from rows("health", [summary], width)
    parts = numbers(health)
    if health.probe_seconds is not None and health.probe_age is not None:
        probe, age = short_duration(health.probe_seconds), short_duration(health.probe_age)
        parts.insert(0, f"probe {probe} ({age} ago)")
    yield from rows("", parts, width, "dim")


def summarize_health(status: DaemonStatus) -> tuple[bool, str]:
    """Whether a daemon is healthy and each of its tiers could be opened, and a line for the user.

    A daemon that is starting is not healthy yet.
    """
    health, pool = status.health, status.pool
    if health is not None and health.starting:
        part = 100 * pool.pinned_bytes // max(1, pool.size_bytes)
        registered = f"{part}% of {size(pool.size_bytes)} are registered"
        return False, f"starting: {'; '.join(health.reasons)} ({registered})"
    problems = [f"tier {tier.name}: {tier.failure}" for tier in status.tiers if tier.failure]
    if health is None:
        return not problems, "; ".join(problems) or "it replies, without a health report"
    return not problems and health.healthy, "; ".join([*health.reasons, *problems]) or "healthy"


def format_verified(status: VerificationStatus) -> str:
    """How much of an earlier daemon's blocks is verified or overwritten."""
    part = status.decided_bytes / status.total_bytes
    return f"{int(100 * part)}% of {size(status.total_bytes)} from before the restart"


def _pool_lines(pool: PoolStatus, width: int) -> Iterator[Text]:
    whole = max(1, pool.size_bytes)
    reserved = min(BAR_WIDTH, -(-pool.reserved_bytes * BAR_WIDTH // whole))
    pinned = max(0, pool.pinned_bytes * BAR_WIDTH // whole - reserved)
    bar = Text.assemble(
        ("█" * reserved, "cyan"),
        ("▒" * pinned, "green"),
        ("░" * (BAR_WIDTH - reserved - pinned), "dim"),
        f" {size(pool.size_bytes)}: {size(pool.reserved_bytes)} reserved",
    )
    parts: list[Text | str] = [bar, f"{size(pool.pinned_bytes)} pinned"]
    if pool.pinned_bytes < pool.size_bytes:
        parts.append(Text(f"being registered: {100 * pool.pinned_bytes // whole}%", "yellow"))
    parts += numbers(pool)
    yield from rows("pool", parts, width)


def _total_lines(totals: Totals, width: int) -> Iterator[Text]:
    parts: list[Text | str] = [
        f"stored {size(totals.stored_bytes)} in {totals.stores} jobs",
        f"loaded {size(totals.loaded_bytes)} in {totals.loads} jobs",
        Text(f"{totals.failed} failed", "red" if totals.failed else ""),
        f"{totals.cancelled} cancelled",
        *numbers(totals),
    ]
    yield from rows("moved", parts, width)


def _engine_lines(engine: EngineStatus, width: int) -> Iterator[Text]:
    shown = Text("connected", "green") if engine.present else Text("away", "yellow")
    yield from rows("engine", [printable(engine.name), shown], width)
    block, nbytes = engine.host_block_bytes, engine.host_blocks * engine.host_block_bytes
    parts = [
        f"{engine.host_blocks:,} host blocks of {size(block)} ({size(nbytes)})",
        *numbers(engine),
    ]
    if engine.kept_bytes:
        parts.append(f"{size(engine.kept_bytes)} of tensors kept")
    yield from rows("", parts, width)


def _namespace_lines(space: NamespaceStatus, width: int) -> Iterator[Text]:
    """The model, its rank if there are several, the namespace's name, its engines and numbers."""
    model = space.fingerprint
    names = [printable(model.model)]
    if model.world_size > 1:
        names.append(f"rank {model.rank} of {model.world_size}")
    yield from rows("model", names, width)
    engines = [Text(printable(name), "green") for name in space.engines]
    namespace = [Text(f"namespace {space.name}"), Text(space.policy)]
    yield from rows("", [*namespace, *(engines or [Text("no engine", "yellow")])], width)
    blocks = f"{size(space.host_bytes)}: {space.blocks:,} blocks of {size(space.block_bytes)}"
    lookups = space.hits + space.misses
    hits = [f"{space.hits / lookups:.0%} hits"] if lookups else []
    yield from rows("", [blocks, *hits, *numbers(space)], width)
    if space.hit_rate is not None:
        yield from rows("", _hit_rates(space), width)
    if space.shortfall:
        yield from rows("", [f"less than asked for: {printable(space.shortfall)}"], width, "yellow")


def _hit_rates(space: NamespaceStatus) -> list[str]:
    """The share of prompts that as many, fewer and more blocks would find."""
    rates = {
        "of prompts found with these blocks": space.hit_rate,
        "with half": space.hit_rate_half,
        "with twice": space.hit_rate_double,
        "with four times as many": space.hit_rate_quadruple,
    }
    return [f"{rate:.0%} {text}" for text, rate in rates.items() if rate is not None]
