"""`kvferry bench`: what a daemon does for an engine, measured from the engine's side.

    plan         what to measure, and how much
    rig          a daemon, a slab of device memory, the contiguous copy to compare with
    raw          that copy: one run of pinned memory, plain torch, in this process
    engine       an engine to the daemon: registers the slab in some shape, submits, waits
    bandwidth    GB/s by fragment size
    latency      what calls and single blocks cost; pressure: with the GIL or all cores taken
    queued       one block loaded while stores wait
    start        from a daemon's start to a pool in service; bare: what a plain process has
    beside       what copies and a busy engine (busy) cost each other; movers: ways to copy, with
                 pinned_kernel; mps: both under CUDA MPS
    results      what came out, and its JSON
    report, plotting    shown

A measurement is a module with a `measure(...)` that returns the structs in `results`. It calls
`step` between its parts, never within one: that moves the progress bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvferry.client.cli.bench import bandwidth, beside, latency, queued, start
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.results import Results, about
from kvferry.client.cli.bench.rig import Rig, device_of, open_rig
from kvferry.proto.errors import Code, Refused

Step = Callable[[str], None]


def possible(plan: Plan, console: Console) -> Plan:
    """`plan` without what its device cannot do, which is said. Raises Refused where that is all."""
    if device_of(plan) != "cpu":
        return plan
    if plan.staging_bytes is not None:
        console.print("--staging has no effect on the CPU")
    if "beside" in plan.what:
        if len(plan.what) == 1:
            raise Refused(Code.NO_DEVICE, "beside needs a GPU, not cpu; give another --what", "cpu")
        console.print("beside skipped: it needs a GPU")
    return replace(plan, what=plan.what - {"beside"})


def run(plan: Plan, arguments: Sequence[str], console: Console) -> Results:
    """Measure what `plan` says. Raises KVFerryError, also where a copy brought wrong bytes."""
    started = datetime.now(UTC)
    with _progress(_steps(plan), console) as step:
        begun = start.measure(plan, step) if "start" in plan.what else None
        if begun is not None and not plan.needs_rig:
            return Results(about(begun[1], plan, arguments, started), start=begun[0])
        step("start a daemon, fill its pool")
        with open_rig(plan) as rig:
            results = Results(about(rig.daemon, plan, arguments, started))
            results.start = begun[0] if begun else None
            _measure(rig, plan, results, step)
            results.contiguous = rig.raw.rates()
    results.finish()
    return results


def _steps(plan: Plan) -> int:
    steps = {
        "start": start.steps(plan),
        "bandwidth": bandwidth.steps(plan),
        "latency": latency.STEPS,
        "queued": queued.STEPS,
        "beside": beside.steps(plan) if "beside" in plan.what else 0,
    }
    return sum(steps[what] for what in plan.what) + 2 * plan.needs_rig


def _measure(rig: Rig, plan: Plan, results: Results, step: Step) -> None:
    """The contiguous copy is measured before, in between and after."""
    step("contiguous copy")
    rig.raw.sample()
    if "bandwidth" in plan.what:
        results.bandwidth += bandwidth.measure_all(rig, plan, step)
    if "latency" in plan.what:
        results.latency += latency.measure(rig, plan.quick, step)
    if "queued" in plan.what:
        results.queued += queued.measure(rig, plan, step)
    if "beside" in plan.what:
        results.beside += beside.measure(rig, plan, step, results.notes)


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Step]:
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


__all__ = ["Plan", "possible", "run"]
