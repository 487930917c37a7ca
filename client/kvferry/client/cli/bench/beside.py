"""Copies beside a busy engine: what they still move, and what they cost the engine.

For each fragment size, engine loop and direction, windows of WINDOW seconds take turns: the engine
alone, the engine with copies (IN_FLIGHT jobs under way from before it until behind it), the engine
alone... From a step's time with copies, and the mean of the windows before and behind it:

    lost ms per GiB    (1 - alone / with) x window / GiB moved in it
    GB/s               between the ends of the first and the last job within the window

The alternatives are measured the same way: a daemon that may only copy directly, a kernel over
pinned memory in this process, and one contiguous run; and contiguous runs of PIECE bytes with a
kernel of one thread behind each, which is what the turns of staged copies cost by themselves. With
--mps, the daemon and the engine also as clients of CUDA MPS.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvferry.client.cli.bench.busy import LOOPS, Busy
from kvferry.client.cli.bench.engine import TIMEOUT, Shape, engine
from kvferry.client.cli.bench.movers import Mover, Transfers, contiguous, pinned_kernel, turns
from kvferry.client.cli.bench.mps import mps
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.results import GIB, Beside, Spread
from kvferry.client.cli.bench.rig import Rig, own_daemon, ready
from kvferry.client.cli.units import size
from kvferry.client.session import timed_out
from kvferry.proto.errors import KVFerryError

KIB = 1 << 10
SIZES = (KIB, 4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, 2048 * KIB)
ALTERNATIVES = (4 * KIB, 32 * KIB, 256 * KIB)
QUICK = (4 * KIB, 256 * KIB)
WINDOW, ALONE = 0.2, 0.2
WINDOWS, QUICK_WINDOWS = 3, 1
IN_FLIGHT = 2
# Divisor of the alternatives' job size, so that slow ones complete within a window.
SMALL_JOBS = 16
KVFERRY, MPS, DIRECT = "kvferry", "kvferry, MPS", "batched DMA"
KERNEL, CONTIGUOUS, TURNS = "pinned kernel", "contiguous", "turns of the GPU"
# Most bytes that one kernel batch of staged copies moves, with 256 MiB of staging.
PIECE = 256 << 20
_WAYS = ("store", "load")
Movers = dict[str, Mover]


def steps(plan: Plan) -> int:
    """How often `measure` calls `step`."""
    ours, others = len(_sizes(plan, SIZES)), len(_sizes(plan, ALTERNATIVES))
    return 3 + ours * (2 if plan.mps else 1) + others * (2 if find_spec("triton") else 1)


def measure(
    rig: Rig, plan: Plan, step: Callable[[str], None], notes: list[str]
) -> Iterator[Beside]:
    """Yields a row for each way, loop and fragment size; `notes` gets what was left out."""
    ordinal, windows = rig.slab.device.index or 0, plan.times(WINDOWS, QUICK_WINDOWS)
    sizes, others = _sizes(plan, SIZES), _sizes(plan, ALTERNATIVES)
    step("start a busy engine")
    with Busy(ordinal) as busy:
        bench = Windows(busy, windows, step)
        yield from bench.rows(CONTIGUOUS, 0, {w: contiguous(rig, w, SMALL_JOBS) for w in _WAYS})
        pieces = max(2, rig.raw.nbytes // PIECE)
        yield from bench.rows(TURNS, PIECE, {way: turns(rig, way, pieces) for way in _WAYS})
        rig.raw.sample()
        for page_bytes in sizes:
            yield from bench.transfers(KVFERRY, rig, rig.directory, page_bytes, 2)
            rig.raw.sample()
        with own_daemon(plan, 2 * plan.half_bytes, copy_mode="direct") as d:
            ready(d.directory)
            for page_bytes in others:
                yield from bench.transfers(DIRECT, rig, d.directory, page_bytes, 2 * SMALL_JOBS)
        try:
            for page_bytes in others:
                movers = {way: pinned_kernel(rig, way, page_bytes, SMALL_JOBS) for way in _WAYS}
                yield from bench.rows(KERNEL, page_bytes, movers)
        except (ImportError, RuntimeError, OSError) as error:
            notes.append(f"a kernel over pinned memory was not measured: {error}")
        rig.raw.sample()
    if plan.mps:
        try:
            yield from _under_mps(rig, plan, step, windows)
        except KVFerryError as error:
            notes.append(f"CUDA MPS was not measured: {error}")


def _under_mps(rig: Rig, plan: Plan, step: Callable[[str], None], windows: int) -> Iterator[Beside]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mps())
        daemon = own_daemon(plan, 2 * plan.half_bytes)
        directory = stack.enter_context(daemon).directory
        ready(directory)
        bench = Windows(stack.enter_context(Busy(rig.slab.device.index or 0)), windows, step)
        for page_bytes in _sizes(plan, SIZES):
            yield from bench.transfers(MPS, rig, directory, page_bytes, 2)


def _sizes(plan: Plan, usual: tuple[int, ...]) -> tuple[int, ...]:
    return plan.pick(plan.sizes, usual, QUICK)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a busy engine, alone and with copies in turn."""

    busy: Busy
    windows: int
    step: Callable[[str], None]

    def transfers(
        self, how: str, rig: Rig, directory: Path, page_bytes: int, jobs: int
    ) -> Iterator[Beside]:
        with engine(directory, Shape.of(page_bytes), rig.slab) as registered:
            registered.fill()
            movers: Movers = {way: Transfers(registered, way, jobs) for way in _WAYS}
            yield from self.rows(how, page_bytes, movers)

    def rows(self, how: str, page_bytes: int, movers: Movers) -> Iterator[Beside]:
        self.step(f"{how}, {size(page_bytes) if page_bytes else 'whole'}")
        alone = {way: _alone(mover) for way, mover in movers.items()}
        for loop in LOOPS:
            for way, mover in movers.items():
                yield self._row(Beside(how, way, loop, page_bytes, alone[way]), mover)

    def _row(self, row: Beside, mover: Mover) -> Beside:
        bases, busy_steps, rates = [self._base(row.loop)], [], []
        for _ in range(self.windows):
            rate, step_ms = self._window(row.loop, mover)
            rates.append(rate)
            busy_steps.append(step_ms)
            bases.append(self._base(row.loop))
        pairs = zip(bases, bases[1:], busy_steps, rates, strict=False)
        lost = [(1 - (b + a) / 2 / ms) / rate * GIB * 1e3 for b, a, ms, rate in pairs]
        row.rate = Spread.of([rate / 1e9 for rate in rates])
        row.alone_ms, row.with_ms = Spread.of(bases), Spread.of(busy_steps)
        row.lost_ms_per_gib = Spread.of(lost)
        return row

    def _base(self, loop: str) -> float:
        return self.busy.step_ms(loop, WINDOW)

    def _window(self, loop: str, mover: Mover) -> tuple[float, float]:
        """(bytes per second, milliseconds per step) while both are at work."""
        with _kept_going(mover) as turn:
            while not turn():
                pass
            self.busy.begin(loop, WINDOW)
            ends = list[float]()
            while not self.busy.ended() or len(ends) < 2:
                ends += turn()
            step_ms = self.busy.end()
        return mover.nbytes * (len(ends) - 1) / (ends[-1] - ends[0]), step_ms


def _alone(mover: Mover) -> float:
    """GB/s with nothing beside."""
    with _kept_going(mover) as turn:
        begin, ends = time.perf_counter(), list[float]()
        while time.perf_counter() < begin + ALONE or len(ends) < 3:
            ends += turn()
    return mover.nbytes * (len(ends) - 1) / (ends[-1] - ends[0]) / 1e9


@contextlib.contextmanager
def _kept_going(mover: Mover) -> Iterator[Callable[[], list[float]]]:
    """IN_FLIGHT jobs under way; the function replaces those that ended, and says when they did."""
    deadline, under_way = time.monotonic() + TIMEOUT, IN_FLIGHT

    def turn() -> list[float]:
        ended = [time.perf_counter()] * mover.take()
        for _ in ended:
            mover.submit()
        if time.monotonic() > deadline:
            raise timed_out("jobs did not end", mover.nbytes)
        return ended

    for _ in range(IN_FLIGHT):
        mover.submit()
    yield turn
    while under_way:
        under_way -= mover.take()
