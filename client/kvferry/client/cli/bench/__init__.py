"""`kvferry bench`: the performance of a daemon, measured from the engine's side.

    plan                what to measure, and how much
    rig                 a daemon, a buffer on its device, the contiguous copy to compare with
    raw                 that copy: one contiguous pinned buffer, plain torch, in this process
    engine              a registered engine that submits transfers and waits for them
    bandwidth           GB/s by fragment size
    latency             cost of calls, and of transfers of single blocks
    results             structs of the results, and their JSON
    report              tables

A measurement is a module with a `measure(...)` that returns structs of `results`. It calls `step`
between its parts, never during one: `step` redraws the progress bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.client.cli.bench import bandwidth, latency
from kvferry.client.cli.bench.bench_results import Results, describe_run
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.rig import BenchRig, open_rig

Step = Callable[[str], None]


def run_plan(plan: Plan, arguments: Sequence[str], console: Console) -> Results:
    """Measure everything in `plan`. Raises KVFerryError, also if a copy delivered wrong bytes."""
    started = datetime.now(UTC)
    with _progress(_count_steps(plan), console) as step:
        step("start a daemon, fill its pool")
        with open_rig(plan) as rig:
            results = Results(describe_run(rig.daemon, plan, arguments, started))
            _measure(rig, plan, results, step)
            results.contiguous = rig.raw.rates()
    results.set_ratios()
    return results


def _count_steps(plan: Plan) -> int:
    steps = {
        "bandwidth": bandwidth.count_steps(plan),
        "latency": latency.STEPS,
    }
    return sum(steps[what] for what in plan.what) + 2


def _measure(rig: BenchRig, plan: Plan, results: Results, step: Step) -> None:
    """The contiguous copy is measured before, in between and after."""
    step("contiguous copy")
    rig.raw.sample()
    if "bandwidth" in plan.what:
        results.bandwidth += bandwidth.measure_all(rig, plan, step)
    if "latency" in plan.what:
        results.latency += latency.measure(rig, plan.quick, step)


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Step]:
    """A progress bar that is redrawn by `step` only: a refresh thread would be measured too."""
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


__all__ = ["Plan", "run_plan"]
