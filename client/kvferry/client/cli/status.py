"""`kvferry status` and `kvferry release`. Needs no torch; registers nothing.

The bar of the pool, from the left: reserved by engines, connected or not; registered with the
device and free; not registered yet (a daemon registers its pool in the background).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.client import DaemonStatus, OffloadClient, find_daemon
from kvferry.client.cli.tier_rows import tier_lines
from kvferry.client.cli.units import duration, printable, short_duration, size
from kvferry.client.endpoint import find_daemon_in
from kvferry.proto.errors import Code, Gone
from kvferry.proto.status import (
    HealthStatus,
    NamespaceStatus,
    PoolStatus,
    Totals,
    VerificationStatus,
)

Namespaces: TypeAlias = tuple[NamespaceStatus, ...]

# Seconds to wait for a reply.
TIMEOUT = 5.0
BAR_WIDTH = 40


def locate_daemon(directory: Path | None) -> Path:
    """A daemon's runtime directory: `directory`, the only one in it, or the only daemon's (None).

    Raises Gone (DAEMON_GONE), naming the directories that were searched.
    """
    if directory is None:
        return find_daemon()
    found = find_daemon_in(directory)
    if found is None:
        message = f"no kvferry.sock in {directory} or a directory in it; start kvferryd, or name "
        message += "another directory"
        raise Gone(Code.DAEMON_GONE, message, str(directory))
    return found


def fetch_status(
    directory: Path | None, timeout: float = TIMEOUT
) -> tuple[DaemonStatus, Namespaces]:
    """A daemon's status. Raises Gone (TIMEOUT), naming its process, if it does not reply."""
    where = locate_daemon(directory)
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


def daemon_pid(directory: Path) -> int | None:
    """The process that holds the lock of a runtime directory, if it is alive."""
    try:
        pid = int((directory / "lock").read_text())
        os.kill(pid, 0)
    except PermissionError:
        return pid
    except (OSError, ValueError):
        return None
    return pid


def release_kept_tensors(directory: Path | None, engine: str) -> int:
    """Have the daemon stop keeping an engine's tensors; returns their size in bytes."""
    where = locate_daemon(directory)
    with OffloadClient(
        where, engine="kvferry-cli", client="kvferry release", timeout=TIMEOUT
    ) as client:
        return client.release_kv_caches(engine)


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
    for line in _header_lines(status):
        console.print(line, soft_wrap=True)
    if status.engines:
        console.print(_engine_table(status))
    if namespaces:
        console.print(_namespace_table(namespaces))


def _header_lines(status: DaemonStatus) -> Iterator[Text]:
    device, version = status.device, f"kvferryd {status.version}"
    uuid = "" if device.uuid == device.kind else f" ({device.uuid})"
    yield Text.assemble((version, "bold"), " on ", (device.name, "bold"), f"{uuid}, {device.kind}")
    yield Text(f"pid {status.pid}, up {duration(status.uptime_seconds)}, boot {status.boot_id}")
    yield from _health_lines(status.health)
    yield _pool_bar(status.pool)
    yield from tier_lines(status.tiers)
    if status.verification is not None:
        yield Text(f"verified {format_verified(status.verification)}")
    yield _format_totals(status.totals)
    if status.errors:
        counts = (f"{code} x{n}" for code, n in sorted(status.errors.items()))
        yield Text(f"errors   {', '.join(counts)}", "red")
    yield Text(f"sessions {status.sessions} (this one included), engines {len(status.engines)}")


def _health_lines(health: HealthStatus | None) -> Iterator[Text]:
    """Health and delays. A job that waits for its engine's timeline is shown separately."""
    if health is None:
        return
    if health.healthy:
        summary = ("healthy", "green")
    else:
        summary = (f"unhealthy: {'; '.join(health.reasons)}", "bold red")
    yield Text.assemble("health   ", summary)
    worker, loop = short_duration(health.worker_lag), short_duration(health.loop_lag)
    parts = [f"device worker {worker}, event loop {loop} late"]
    if health.probe_seconds is not None and health.probe_age is not None:
        probe, age = short_duration(health.probe_seconds), short_duration(health.probe_age)
        parts.insert(0, f"probe {probe}, {age} ago")
    if health.oldest_job is not None:
        parts.append(f"oldest job {short_duration(health.oldest_job)}")
    if health.held_job is not None:
        parts.append(f"waiting for its engine {short_duration(health.held_job)}")
    yield Text(f"         {'; '.join(parts)}", "dim")


def summarize_health(health: HealthStatus | None) -> tuple[bool, str]:
    """Whether a daemon is healthy, and a line for the user."""
    if health is None:
        return True, "it replies, without a health report"
    return health.healthy, "; ".join(health.reasons) or "healthy"


def format_verified(status: VerificationStatus) -> str:
    """How much of an earlier daemon's blocks is verified or overwritten."""
    part = status.decided_bytes / status.total_bytes
    return f"{int(100 * part)}% of {size(status.total_bytes)} from before the restart"


def _pool_bar(pool: PoolStatus) -> Text:
    whole = max(1, pool.size_bytes)
    reserved = min(BAR_WIDTH, -(-pool.reserved_bytes * BAR_WIDTH // whole))
    pinned = max(0, pool.pinned_bytes * BAR_WIDTH // whole - reserved)
    return Text.assemble(
        "pool     ",
        ("█" * reserved, "cyan"),
        ("▒" * pinned, "green"),
        ("░" * (BAR_WIDTH - reserved - pinned), "dim"),
        f" {size(pool.size_bytes)}: {size(pool.reserved_bytes)} reserved, "
        f"{size(pool.pinned_bytes)} pinned",
    )


def _format_totals(totals: Totals) -> Text:
    text = (
        f"moved    stored {size(totals.stored_bytes)} in {totals.stores} jobs, "
        f"loaded {size(totals.loaded_bytes)} in {totals.loads} jobs"
    )
    failed = (f", {totals.failed} failed", "red" if totals.failed else "")
    return Text.assemble(text, failed, f", {totals.cancelled} cancelled")


def _engine_table(status: DaemonStatus) -> Table:
    table = Table("engine", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("host blocks", "of", "total", "jobs in flight", "tensors kept"):
        table.add_column(name, justify="right")
    for engine in status.engines:
        connected = Text("connected", "green") if engine.present else Text("away", "yellow")
        block, nbytes = engine.host_block_bytes, engine.host_blocks * engine.host_block_bytes
        cells = (f"{engine.host_blocks:,}", size(block), size(nbytes), str(engine.jobs))
        kept = size(engine.kept_bytes) if engine.kept_bytes else "-"
        table.add_row(Text(printable(engine.name)), connected, *cells, kept)
    return table


def _namespace_table(namespaces: Namespaces) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, leading=1)
    table.add_column("namespace", overflow="fold")
    for name in ("blocks", "of", "ready", "pinned", "free", "hits", "evicted"):
        table.add_column(name, justify="right")
    for space in namespaces:
        counts = (f"{n:,}" for n in (space.ready, space.pinned, space.free))
        cells = (f"{space.blocks:,}", size(space.block_bytes), *counts)
        table.add_row(_title(space), *cells, _hits(space), f"{space.evictions:,}")
    return table


def _title(space: NamespaceStatus) -> Text:
    """The model, its rank if there are several, the engines, and the name of the namespace."""
    fingerprint = space.fingerprint
    rank, ranks = fingerprint.rank, fingerprint.world_size
    rank_text = f", rank {rank} of {ranks}" if ranks > 1 else ""
    return Text.assemble(
        f"{printable(fingerprint.model)}\n{space.policy}{rank_text}\n",
        (
            ", ".join(map(printable, space.engines)) or "no engine",
            "green" if space.engines else "yellow",
        ),
        (f"\n{space.name}", "dim"),
    )


def _hits(space: NamespaceStatus) -> str:
    lookups = space.hits + space.misses
    return f"{space.hits / lookups:.0%}" if lookups else "-"
