"""`kvferry status`: asks a daemon what it holds, and shows it. Needs no torch, registers nothing.

The pool's bar, from the left: reserved for engines, whether they are here or away; registered with
the device and free; not registered yet (a daemon fills its pool in the background).
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
from kvferry.client.cli.units import brief, plain, size, span
from kvferry.client.endpoint import folder_in
from kvferry.proto.errors import Code, Gone
from kvferry.proto.status import (
    HealthStatus,
    NamespaceStatus,
    PoolStatus,
    Totals,
    VerificationStatus,
)

Namespaces: TypeAlias = tuple[NamespaceStatus, ...]

TIMEOUT = 5.0
BAR = 40


def locate(directory: Path | None) -> Path:
    """The folder of a daemon's sockets: `directory`, or the one folder in it, or where it is found.

    Raises Gone (DAEMON_GONE), naming what was looked at.
    """
    if directory is None:
        return find_daemon()
    folder = folder_in(directory)
    if folder is None:
        message = f"no kvferry.sock in {directory} or a directory in it; start kvferryd, or name "
        message += "another directory"
        raise Gone(Code.DAEMON_GONE, message, str(directory))
    return folder


def ask(directory: Path | None, timeout: float = TIMEOUT) -> tuple[DaemonStatus, Namespaces]:
    """What a daemon says. Raises Gone (TIMEOUT), naming its process, where it does not answer."""
    where = locate(directory)
    try:
        with OffloadClient(
            where, engine="kvferry-cli", client="kvferry status", timeout=timeout
        ) as client:
            return client.status(), client.namespaces()
    except Gone as gone:
        if gone.code != Code.TIMEOUT:
            raise
        pid = holder(where)
        advice = (
            f"see the log of process {pid}"
            if pid
            else "start kvferryd (no process has this directory)"
        )
        message = f"no reply from {where} within {timeout:g} s; {advice}"
        raise Gone(Code.TIMEOUT, message, str(where)) from gone


def holder(directory: Path) -> int | None:
    """The process that holds a daemon's folder, if it is alive."""
    try:
        pid = int((directory / "lock").read_text())
        os.kill(pid, 0)
    except PermissionError:
        return pid
    except (OSError, ValueError):
        return None
    return pid


def release(directory: Path | None, engine: str) -> int:
    """Have the daemon keep an engine's tensors no longer; returns their bytes."""
    where = locate(directory)
    with OffloadClient(
        where, engine="kvferry-cli", client="kvferry release", timeout=TIMEOUT
    ) as client:
        return client.release_kv_caches(engine)


def as_json(value: Any) -> Any:
    """Plain dicts and lists; the wire's own form leaves the names of the fields out."""
    match value:
        case msgspec.Struct():
            return {name: as_json(getattr(value, name)) for name in value.__struct_fields__}
        case tuple() | list():
            return [as_json(item) for item in value]
    return value


def json_text(value: Any) -> str:
    """For programs, in letters that every locale has."""
    return json.dumps(json.loads(msgspec.json.encode(value)), indent=2)


def show(status: DaemonStatus, namespaces: Namespaces, console: Console) -> None:
    for line in _lines(status):
        console.print(line, soft_wrap=True)
    if status.engines:
        console.print(_engines(status))
    if namespaces:
        console.print(_namespaces(namespaces))


def _lines(status: DaemonStatus) -> Iterator[Text]:
    device, who = status.device, f"kvferryd {status.version}"
    uuid = "" if device.uuid == device.kind else f" ({device.uuid})"
    yield Text.assemble((who, "bold"), " on ", (device.name, "bold"), f"{uuid}, {device.kind}")
    yield Text(f"pid {status.pid}, up {span(status.uptime_seconds)}, boot {status.boot_id}")
    yield from _health(status.health)
    yield _pool(status.pool)
    if status.verification is not None:
        yield Text(f"verified {verified(status.verification)}")
    yield _totals(status.totals)
    if status.errors:
        counts = (f"{code} x{n}" for code, n in sorted(status.errors.items()))
        yield Text(f"errors   {', '.join(counts)}", "red")
    yield Text(f"sessions {status.sessions} (this one too), engines {len(status.engines)}")


def _health(health: HealthStatus | None) -> Iterator[Text]:
    """Well or not, and what was late; a job that its engine holds back is told apart."""
    if health is None:  # a daemon that does not say
        return
    if health.healthy:
        said = ("healthy", "green")
    else:
        said = (f"unhealthy: {'; '.join(health.reasons)}", "bold red")
    yield Text.assemble("health   ", said)
    parts = [f"lane {brief(health.worker_lag)}, loop {brief(health.loop_lag)} late"]
    if health.probe_seconds is not None and health.probe_age is not None:
        parts.insert(0, f"probe {brief(health.probe_seconds)}, {brief(health.probe_age)} ago")
    if health.oldest_job is not None:
        parts.append(f"oldest job {brief(health.oldest_job)}")
    if health.held_job is not None:
        parts.append(f"waiting for its engine {brief(health.held_job)}")
    yield Text(f"         {'; '.join(parts)}", "dim")


def verdict(health: HealthStatus | None) -> tuple[bool, str]:
    """Whether a daemon is well, and a line that says it."""
    if health is None:
        return True, "it answers; it is too old to say more"
    return health.healthy, "; ".join(health.reasons) or "healthy"


def verified(status: VerificationStatus) -> str:
    """How much of what an earlier daemon left is verified or stored over."""
    part = status.decided_bytes / status.total_bytes
    return f"{int(100 * part)}% of {size(status.total_bytes)} from before the restart"


def _pool(pool: PoolStatus) -> Text:
    """reserved, then pinned and free, then not pinned yet."""
    whole = max(1, pool.size_bytes)
    reserved = min(BAR, -(-pool.reserved_bytes * BAR // whole))
    pinned = max(0, pool.pinned_bytes * BAR // whole - reserved)
    return Text.assemble(
        "pool     ",
        ("█" * reserved, "cyan"),
        ("▒" * pinned, "green"),
        ("░" * (BAR - reserved - pinned), "dim"),
        f" {size(pool.size_bytes)}: {size(pool.reserved_bytes)} reserved, "
        f"{size(pool.pinned_bytes)} pinned",
    )


def _totals(totals: Totals) -> Text:
    text = (
        f"moved    stored {size(totals.stored_bytes)} in {totals.stores} jobs, "
        f"loaded {size(totals.loaded_bytes)} in {totals.loads} jobs"
    )
    failed = (f", {totals.failed} failed", "red" if totals.failed else "")
    return Text.assemble(text, failed, f", {totals.cancelled} cancelled")


def _engines(status: DaemonStatus) -> Table:
    table = Table("engine", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("host blocks", "of", "in all", "jobs under way", "tensors kept"):
        table.add_column(name, justify="right")
    for engine in status.engines:
        here = Text("here", "green") if engine.present else Text("away", "yellow")
        block, nbytes = engine.host_block_bytes, engine.host_blocks * engine.host_block_bytes
        cells = (f"{engine.host_blocks:,}", size(block), size(nbytes), str(engine.jobs))
        kept = size(engine.kept_bytes) if engine.kept_bytes else "-"
        table.add_row(Text(plain(engine.name)), here, *cells, kept)
    return table


def _namespaces(namespaces: Namespaces) -> Table:
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
    """The model, its rank where there are several, who is in it, and what the daemon calls it."""
    whose = space.fingerprint
    rank = f", rank {whose.rank} of {whose.world_size}" if whose.world_size > 1 else ""
    return Text.assemble(
        f"{plain(whose.model)}\n{space.policy}{rank}\n",
        (
            ", ".join(map(plain, space.engines)) or "nobody here",
            "green" if space.engines else "yellow",
        ),
        (f"\n{space.name}", "dim"),
    )


def _hits(space: NamespaceStatus) -> str:
    lookups = space.hits + space.misses
    return f"{space.hits / lookups:.0%}" if lookups else "-"
