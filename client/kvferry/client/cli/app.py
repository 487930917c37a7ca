"""What can be typed, and what it means; the work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from kvferry.client.cli import units
from kvferry.client.cli.status import TIMEOUT, as_json, ask, json_text, release, show, verdict
from kvferry.proto.errors import Refused
from kvferry.proto.sizes import parse_bytes

WHAT = ("bandwidth", "latency", "beside", "queued", "start")
OWN_DAEMON = ("beside", "start")

GIB = 1 << 30

app = typer.Typer(
    help="Look at a kvferry daemon, find what is wrong, or measure one.",
    epilog="A daemon is found in /run/kvferry, $XDG_RUNTIME_DIR/kvferry or /tmp/kvferry-UID, "
    "unless --directory names the folder of its sockets. Exit status: 0 done, 1 failed (one line "
    "on stderr), 2 wrong usage. Start a daemon with kvferryd.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _sizes(text: str | None) -> str | None:
    if text is not None:
        _parsed(text)
    return text


def _parsed(text: str) -> tuple[int, ...]:
    return tuple(sorted({_bytes(part) for part in text.split(",")}))


def _bytes(text: str) -> int:
    try:
        nbytes = parse_bytes(text)
    except Refused as error:
        raise typer.BadParameter(error.message) from error
    if not nbytes:
        raise typer.BadParameter(f"size = {text!r} is zero; give at least one byte")
    return nbytes


def _size(text: str | None) -> str | None:
    if text is not None:
        _bytes(text)
    return text


def _what(text: str) -> str:
    if unknown := set(text.split(",")) - {*WHAT, "all"}:
        raise typer.BadParameter(
            f"unknown: {', '.join(sorted(unknown))}; use {', '.join(WHAT)} or all"
        )
    return text


def _file(path: Path | None) -> Path | None:
    """Checked before anything is measured, not after."""
    if path is not None:
        try:
            there = path.exists()
            path.open("ab").close()
            if not there:
                path.unlink()
        except OSError as error:
            raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from error
    return path


Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        "-d",
        help="Folder of the daemon's sockets.",
        metavar="DIR",
        readable=False,  # who is not admitted may not read it, and is told so further down
    ),
]


@app.command()
def status(
    directory: Directory = None,
    json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Only say in one line whether it is healthy; exit 1 where it is not."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for its answer.", min=0.1, metavar="SECONDS")
    ] = TIMEOUT,
) -> None:
    """Show what a daemon holds, for whom, and what it has done so far; and whether it is well."""
    report, namespaces = ask(directory, timeout)
    if check:
        well, line = verdict(report.health)
        print(f"kvferryd {report.pid} on {report.device.name}: {line}")
        raise typer.Exit(0 if well else 1)
    if json:
        everything = as_json(report) | {"namespaces": as_json(namespaces)}
        print(json_text(everything))
    else:
        show(report, namespaces, Console(highlight=False))


@app.command("release")
def release_(
    engine: Annotated[str, typer.Argument(help="The engine's name.", metavar="ENGINE")],
    directory: Directory = None,
) -> None:
    """Keep an engine's KV tensors no longer: free them, or where it is here, when it goes."""
    print(f"released {units.size(release(directory, engine))} kept for {engine}")


@app.command()
def doctor(
    directory: Directory = None,
    json: Annotated[bool, typer.Option("--json", help="The findings, for programs.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that the daemon has for an answer.", min=0.1)
    ] = 5.0,
) -> None:
    """Look for what keeps an engine from its daemon, and say what to change.

    Run it as the engine's user, in its container, with its environment. It stores and loads a page
    of memory of the daemon's; that page of the pool stays the doctor's until somebody needs it.
    Exit status 1: something failed.
    """
    from kvferry.client.cli import doctor as findings_table
    from kvferry.client.doctor import examine

    findings = examine(directory, timeout)
    if json:
        print(json_text(findings))
    else:
        findings_table.show(findings, Console(highlight=False))
    raise typer.Exit(int(findings_table.failed(findings)))


@app.command()
def top(
    directory: Directory = None,
    interval: Annotated[
        float, typer.Option("--interval", "-n", help="Seconds between looks.", min=0.1)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it one time, and end.")] = False,
) -> None:
    """Watch all daemons of this machine: the link, queue, pool, namespaces, engines, health.

    q or ctrl-c ends it. Where the output is no terminal, it is shown one time.
    """
    from kvferry.client.cli.top import run

    if not run(directory, interval, once=once):
        raise typer.Exit(1)


@app.command()
def bench(
    context: typer.Context,
    device: Annotated[
        str,
        typer.Option("--device", help="auto, cpu, a GPU's index or its UUID.", metavar="DEVICE"),
    ] = "auto",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            "-d",
            help="Use the running daemon in this folder, whose pool needs 2 x GIB free, instead "
            "of one of the bench's own.",
            metavar="DIR",
            readable=False,
        ),
    ] = None,
    what: Annotated[
        str,
        typer.Option(
            help=f"What to measure: {', '.join(WHAT)}, or all.", callback=_what, metavar="LIST"
        ),
    ] = "bandwidth,latency",
    gib: Annotated[
        float | None,
        typer.Option(help="GiB to move each way in one go (default: 1; quick: 1/16).", min=1e-3),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Fragment sizes of bandwidth and beside (default: 7 to 9 from 1KiB to 2MiB).",
            callback=_sizes,
            metavar="LIST",
        ),
    ] = None,
    reps: Annotated[
        int | None,
        typer.Option(
            help="How often (default: 5 copies of a size, besides one to warm up; 3 starts, 3 "
            "windows beside an engine; quick: 2, 1, 1).",
            min=1,
        ),
    ] = None,
    pool_gib: Annotated[
        float | None,
        typer.Option(
            help="Host pool of the daemon whose start is measured (default: 64 on a GPU, or what "
            "fits into 0.7 of the free memory; 1 on the CPU).",
            min=1 / 64,
        ),
    ] = None,
    staging: Annotated[
        str | None,
        typer.Option(
            help="Staging buffer of the bench's own daemons, 64MiB or more (default: theirs).",
            callback=_size,
            metavar="SIZE",
        ),
    ] = None,
    mps: Annotated[
        bool, typer.Option("--mps", help="Beside an engine: once more under CUDA MPS.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, bytes and repetitions.")] = (
        False
    ),
    json: Annotated[
        Path | None,
        typer.Option(help="Write everything here, samples too.", callback=_file, metavar="FILE"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the figures over fragment size.", callback=_file, metavar="FILE.png"
        ),
    ] = None,
) -> None:
    """Measure a daemon from an engine's side, beside a plain contiguous copy on the same machine.

    bandwidth: GB/s by fragment size, storing, loading and both at once. latency: what the calls
    and single blocks cost, also with the GIL or all cores taken. beside: what copies and a busy
    engine in a process of its own cost each other, for other ways to copy too (GPU only). queued:
    a block loaded while 8 x GIB of stores wait. start: a daemon's start against one allocation of
    as much pinned memory, and its device memory.

    A fragment is one page of one KV tensor; up to 64 tensors share a block table, and pages are
    gathered into host blocks of 2 MiB. Ratios are to the contiguous pinned copy, measured before,
    in between and after. A sample of the bytes is compared after each copy of bandwidth.
    """
    if directory is not None and device != "auto":
        raise typer.BadParameter("--device and --directory exclude each other; leave one out")
    if directory is not None and staging is not None:
        raise typer.BadParameter("--staging and --directory exclude each other; leave one out")
    wanted = set(what.split(","))
    if directory is not None and (own := wanted & {*OWN_DAEMON, "all"}):
        raise typer.BadParameter(f"{own.pop()} starts its own daemons; leave --directory out")
    wanted = set(WHAT) if "all" in wanted else wanted
    if mps and "beside" not in wanted:
        raise typer.BadParameter("--mps needs beside; add --what beside")
    from kvferry.client.cli.bench import Plan, possible, report, run

    plan = Plan(
        device,
        directory,
        int((gib or (1 / 16 if quick else 1.0)) * GIB),
        None if sizes is None else _parsed(sizes),
        reps,
        quick,
        frozenset(wanted),
        None if pool_gib is None else int(pool_gib * GIB),
        mps,
        None if staging is None else _bytes(staging),
    )
    console = Console(stderr=True)
    plan = possible(plan, console)
    if plot is not None:
        from kvferry.client.cli.bench import plotting

        try:
            plotting.check(plot, plan.what)
        except ValueError as error:
            raise typer.BadParameter(f"--plot: {error}") from error
    results = run(plan, context.obj or [], console)
    report.show(results, Console(highlight=False))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
    if plot is not None:
        plotting.draw(results, plot)
