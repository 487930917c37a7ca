"""`kvferry tier`: list, verify or clear what a disk tier has stored.

The daemon's package reads the files, in a process of its own: this package does not import it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvferry.client.cli.status import json_text
from kvferry.client.cli.units import duration, printable, size
from kvferry.proto.errors import Code, ErrorInfo, Failed, error_of

COMMAND = "kvferry.daemon.tiers.disk.command"
# Bytes of the command's log that an error message repeats.
LOG_BYTES = 300

app = typer.Typer(
    name="tier",
    help="List, verify or clear the blocks that a disk tier has stored.",
    no_args_is_help=True,
)

Root = Annotated[
    Path, typer.Argument(help="The directory of tiers.disk.path.", metavar="PATH", readable=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


@app.command("list")
def list_(root: Root, json: AsJson = False) -> None:
    """List the namespaces in a disk tier, also while a daemon uses it.

    Run it as the daemon's user or as root.
    """
    found = run_command("list", root)
    if json:
        print(json_text(found))
        return
    # Not a table: a narrow terminal would break its names, which `clear` needs.
    for each in found:
        print(printable(each["model"]) or "unknown model")
        print(f"    namespace {printable(each['namespace'])}")
        blocks, allocated = each["blocks"], size(each["allocated_bytes"])
        if blocks is not None:
            print(f"    {blocks:,} blocks of {size(each['block_bytes'])}")
        if each["problem"]:
            print(f"    {each['problem']}")
        written = each["last_written"]
        age = f"{duration(max(0.0, time.time() - written))} ago" if written else "never"
        print(f"    {allocated} on disk, last written {age}")
    if not found:
        print(f"no namespace in {root}")


@app.command()
def verify(root: Root, json: AsJson = False) -> None:
    """Read all blocks and compare them with their checksums. Exit status 1: some are bad.

    Stop the daemon first. Nothing is changed: a bad block is a miss when an engine requests it.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn("verifying"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("verifying", total=None)

        def show(progress: dict[str, int]) -> None:
            bar.update(task, completed=progress["done_bytes"], total=progress["total_bytes"])

        results = run_command("verify", root, show=show)
    if json:
        print(json_text(results))
    else:
        for each in results:
            problem = f"; {each['problem']}" if each["problem"] else ""
            print(
                f"{printable(each['namespace'])}: {each['good']:,} blocks good, "
                f"{each['bad']:,} bad{problem}"
            )
        if not results:
            print(f"no namespace in {root}")
    raise typer.Exit(int(any(each["bad"] or each["problem"] for each in results)))


@app.command()
def clear(
    root: Root,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="Delete only this namespace, by its name here or in status.", metavar="NAME"
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete the blocks of a namespace, or all. Stop the daemon first."""
    names = [] if namespace is None else [namespace]
    if not yes:
        run_command("check-unused", root, *names)  # before the question, not after it
        what = "all blocks" if namespace is None else f"the blocks of {printable(namespace)}"
        typer.confirm(f"Delete {what} in {root}?", abort=True, err=True)
    cleared = run_command("clear", root, *names)
    blocks = sum(each["blocks"] or 0 for each in cleared)
    freed = sum(each["allocated_bytes"] for each in cleared)
    print(f"deleted {blocks:,} blocks of {len(cleared)} namespaces, {size(freed)}")


def run_command(
    verb: str, root: Path, *arguments: str, show: Callable[[dict[str, int]], None] | None = None
) -> list[dict[str, Any]]:
    """The result of the daemon's command. Raises the error that it reports.

    Raises Failed (COPY_FAILED) if it ends without a result, with the end of its log.
    """
    command = [sys.executable, "-m", COMMAND, verb, str(root), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            ((kind, value),) = msgspec.json.decode(line, type=dict[str, Any]).items()
            if kind == "progress" and show is not None:
                show(value)
            elif kind == "error":
                raise error_of(msgspec.convert(value, ErrorInfo))
            elif kind == "result":
                return list(value)
        log = process.stderr.read().strip()
    if "No module named" in log:
        raise ModuleNotFoundError(name="structlog")
    message = f"the command ended with status {process.returncode}: {log[-LOG_BYTES:]}"
    raise Failed(Code.COPY_FAILED, message, str(root))
