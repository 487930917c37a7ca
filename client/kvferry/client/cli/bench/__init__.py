"""`kvferry bench`: what a daemon does for an engine, measured from the engine's side.

    rig          a daemon, a slab of device memory, the contiguous copy to compare with
    raw          that copy: one run of pinned memory, plain torch, in this process
    engine       an engine to the daemon: registers the slab in some shape, submits, waits
    bandwidth    GB/s by fragment size        latency    what calls and single blocks cost
    results      what came out, and its JSON  report, plotting    shown

A measurement is a module with a `measure(rig, ...)` that returns one of the structs in `results`.
It calls `step` between its parts, never within one: that moves the progress bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.client.cli.bench import bandwidth, latency
from kvferry.client.cli.bench.results import Results, about
from kvferry.client.cli.bench.rig import Plan, Rig, open_rig


def run(plan: Plan, arguments: Sequence[str], console: Console) -> Results:
    """Measure what `plan` says. Raises KVFerryError, also where a copy brought wrong bytes."""
    sizes = len(plan.sizes)
    total = 1 + (sizes + 2) + sizes * bandwidth.steps(plan.reps) + latency.STEPS
    with _progress(total, console) as step:
        step("start a daemon, fill its pool")
        with open_rig(plan) as rig:
            results = Results(about(rig, plan, arguments, datetime.now(UTC)))
            _measure(rig, plan, results, step)
    results.finish()
    return results


def _measure(rig: Rig, plan: Plan, results: Results, step: Callable[[str], None]) -> None:
    """Every fragment size, then latencies; the contiguous copy before, in between and after."""

    def contiguous() -> None:
        step("contiguous copy")
        rig.raw.sample()

    contiguous()
    for page_bytes in plan.sizes:
        results.bandwidth.append(bandwidth.measure(rig, page_bytes, plan.reps, step))
        contiguous()
    results.latency += latency.measure(rig, plan.quick, step)
    contiguous()
    results.contiguous = rig.raw.rates()


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """A bar that moves when told to and not by itself: its thread would be measured too."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=total)

        def step(what: str) -> None:
            progress.update(task, advance=1, description=what, refresh=True)

        yield step


__all__ = ["Plan", "run"]
