"""The commands and their options. Each command calls the module that does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from typer.core import TyperCommand

from kvferry.client.cli import status as status_command
from kvferry.client.cli import tier as tier_command
from kvferry.client.cli import units
from kvferry.client.cli.status import TIMEOUT, as_json, fetch_status, json_text
from kvferry.client.endpoint import find_all_daemons
from kvferry.proto.errors import Refused
from kvferry.proto.sizes import parse_bytes
from kvferry.proto.version import kvferry_version

MEASUREMENTS = ("bandwidth", "latency")

GIB = 1 << 30


class DirectoryCommand(TyperCommand):
    """A command with --directory. It names the flag if a directory is given without it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        extra = super().parse_args(ctx, args)
        if extra:
            ctx.fail(f"unexpected argument {extra[0]!r}; name a directory with --directory DIR")
        return extra


app = typer.Typer(
    help="Show the state of a kvferry daemon, diagnose problems, or benchmark it.",
    epilog="Daemons are searched in /run/kvferry, $XDG_RUNTIME_DIR/kvferry and /tmp/kvferry-UID; "
    "--directory names another directory. Exit status: 0 done, 1 failed (one line on stderr), "
    "2 wrong usage. Start a daemon with kvferryd.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables have a type beside each flag that takes no value
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(tier_command.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvferry {kvferry_version()}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options before the command."""


def _check_size(text: str) -> str:
    _parse_size(text)
    return text


def _check_sizes(text: str | None) -> str | None:
    if text is not None:
        _parse_sizes(text)
    return text


def _parse_sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({_parse_size(part) for part in text.split(",")}))


def _parse_size(text: str) -> int:
    try:
        nbytes = parse_bytes(text)
    except Refused as error:
        raise typer.BadParameter(error.message) from error
    if not nbytes:
        raise typer.BadParameter(f"size = {text!r} is zero; give at least one byte")
    return nbytes


def _check_measurements(text: str) -> str:
    if unknown := set(text.split(",")) - {*MEASUREMENTS, "all"}:
        raise typer.BadParameter(
            f"unknown: {', '.join(sorted(unknown))}; use {', '.join(MEASUREMENTS)} or all"
        )
    return text


def _check_writable(path: Path | None) -> Path | None:
    """Checked before the measurement, whose results would be lost."""
    if path is not None:
        try:
            existed = path.exists()
            path.open("ab").close()
            if not existed:
                path.unlink()
        except OSError as error:
            raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from error
    return path


Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        "-d",
        help="Directory of the daemon's sockets.",
        metavar="DIR",
        readable=False,  # a user without access gets a better message from the client
    ),
]


@app.command(cls=DirectoryCommand)
def status(
    directory: Directory = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print everything as JSON; a list if several run."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Print one line: healthy or not. Exit status 1 if it is not, if it is still "
            "starting, or if a tier cannot be used.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the reply.", min=0.1, metavar="SECONDS")
    ] = TIMEOUT,
) -> None:
    """Show health, pool, engines, namespaces and totals of each daemon."""
    reports = [fetch_status(where, timeout) for where in find_all_daemons(directory)]
    if check:
        lines = [(report, *status_command.summarize_health(report)) for report, _ in reports]
        for report, _, line in lines:
            print(f"kvferryd {report.pid} on {report.device.name}: {line}")
        raise typer.Exit(0 if all(healthy for _, healthy, _ in lines) else 1)
    if json:
        values = [as_json(report) | {"namespaces": as_json(each)} for report, each in reports]
        print(json_text(values if len(values) > 1 else values[0]))
        return
    for number, (report, namespaces) in enumerate(reports):
        print(end="\n" * bool(number))
        status_command.print_status(report, namespaces, Console(highlight=False))


@app.command(cls=DirectoryCommand)
def release(
    name: Annotated[
        str, typer.Argument(help="The name of an engine or a namespace.", metavar="NAME")
    ],
    retained: Annotated[
        bool,
        typer.Option(
            "--retained",
            help="Free nothing: let the blocks be evicted that hints retain in namespace NAME, "
            "also while engines have it open.",
        ),
    ] = False,
    label: Annotated[
        str | None,
        typer.Option(
            help="With --retained: free only the blocks with this label.", metavar="LABEL"
        ),
    ] = None,
    directory: Directory = None,
) -> None:
    """Free the memory that is kept for an engine or a namespace.

    These are KV tensors and host memory. Those of a connected engine are freed when it disconnects;
    a namespace that an engine has open is refused. Blocks in a tier stay. `kvferry status` shows
    the names, and how many blocks are retained.
    """
    if label is not None and not retained:
        raise typer.BadParameter("--label needs --retained; add it")
    if retained:
        nbytes = status_command.release_retained(directory, name, label)
        print(f"{units.size(nbytes)} of {name} are no longer retained")
        return
    nbytes = status_command.release_memory(directory, name)
    print(f"released {units.size(nbytes)} kept for {name}")


@app.command(cls=DirectoryCommand)
def doctor(
    directory: Directory = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for each reply.", min=0.1, metavar="SECONDS")
    ] = TIMEOUT,
) -> None:
    """Check what an engine needs, and print what to change.

    Run it as the engine's user, in its container, with its environment. It stores and loads one
    page; that page of the pool stays reserved until the memory is needed. Exit status 1: a check
    failed.
    """
    from kvferry.client.cli.doctor import print_findings
    from kvferry.client.doctor import Verdict, run_checks

    findings = run_checks(directory, timeout)
    if json:
        print(json_text(findings))
    else:
        print_findings(findings, Console(highlight=False))
    raise typer.Exit(int(any(finding.verdict is Verdict.FAIL for finding in findings)))


@app.command(cls=DirectoryCommand)
def top(
    directory: Directory = None,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", "-n", help="Seconds between two updates.", min=0.1, metavar="SECONDS"
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Watch all daemons of this machine.

    Shows link, queue, pool, namespaces, engines and health of each. Press q or ctrl-c to exit. If
    the output is not a terminal, it is printed once.
    """
    from kvferry.client.cli.top import run_top

    if not run_top(directory, interval, once=once):
        raise typer.Exit(1)


@app.command("size")
def size_command(
    trace: Annotated[
        Path,
        typer.Option(
            help="JSON lines in the format of Mooncake's traces, also compressed (.gz).",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ],
    model_bytes_per_token: Annotated[
        str,
        typer.Option(
            help="Bytes of the KV cache per token, of all layers, as 128KiB; with several ranks, "
            "those of one, and the memory is that of one daemon.",
            callback=_check_size,
            metavar="SIZE",
        ),
    ],
    block_tokens: Annotated[
        int, typer.Option(help="Tokens of a block of the trace.", min=1, metavar="NUMBER")
    ] = 512,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Host memory, as 64GiB,256GiB (default: doubled from 1GiB while it brings more).",
            callback=_check_sizes,
            metavar="LIST",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Show what more host memory would find of a trace.

    For the namespaces of a running daemon, `kvferry status` shows the same for half, twice and four
    times their blocks.
    """
    from kvferry.client.cli.sizing import measure_sizes, print_sizes, read_trace

    recorded = read_trace(trace, Console(stderr=True))
    block_bytes = _parse_size(model_bytes_per_token) * block_tokens
    chosen = () if sizes is None else _parse_sizes(sizes)
    results = measure_sizes(recorded, block_bytes, block_tokens, chosen)
    if json:
        print(json_text(results))
    else:
        print_sizes(recorded, results, Console(highlight=False))


@app.command(cls=DirectoryCommand)
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
            help="Use the running daemon in this directory instead of starting one; its pool "
            "needs 2 x GIB free.",
            metavar="DIR",
            readable=False,
        ),
    ] = None,
    what: Annotated[
        str,
        typer.Option(
            help=f"What to measure: {', '.join(MEASUREMENTS)}, or all.",
            callback=_check_measurements,
            metavar="LIST",
        ),
    ] = "bandwidth,latency",
    gib: Annotated[
        float | None,
        typer.Option(
            help="GiB per direction and copy (default: 1; quick: 1/16).", min=1e-3, metavar="GIB"
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Fragment sizes of bandwidth, as 4KiB,16384 (default: 9 from 1KiB to 2MiB).",
            callback=_check_sizes,
            metavar="LIST",
        ),
    ] = None,
    reps: Annotated[
        int | None,
        typer.Option(
            help="Copies per size after a warm-up (default: 5; quick: 2).",
            min=1,
            metavar="NUMBER",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, bytes and repetitions.")] = (
        False
    ),
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write all results and samples to this file.",
            callback=_check_writable,
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Benchmark a daemon against a plain contiguous pinned copy.

    bandwidth: GB/s by fragment size for stores, loads and both at once. latency: cost of calls and
    of single blocks.

    A fragment is one page of one KV tensor; up to 64 tensors share a block table, and pages are
    gathered into host blocks of 2 MiB. Ratios are to the contiguous pinned copy, measured before,
    in between and after. After each copy of bandwidth, a sample of the bytes is compared.
    """
    if directory is not None and device != "auto":
        raise typer.BadParameter("--device and --directory exclude each other; leave one out")
    measurements = set(what.split(","))
    from kvferry.client.cli.bench import Plan, report, run_plan

    plan = Plan(
        device,
        directory,
        int((gib or (1 / 16 if quick else 1.0)) * GIB),
        None if sizes is None else _parse_sizes(sizes),
        reps,
        quick,
        frozenset(MEASUREMENTS if "all" in measurements else measurements),
    )
    console = Console(stderr=True)
    results = run_plan(plan, context.obj or [], console)
    report.print_results(results, Console(highlight=False))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
