"""Copies beside a busy engine: their rate, and the engine time that they cost.

For each fragment size, engine loop and direction, windows of WINDOW seconds alternate: the engine
alone, the engine with copies (IN_FLIGHT jobs in flight from before the window until after it), the
engine alone... From the time of a step with copies, and the mean of the windows before and after:

    lost ms per GiB    (1 - alone / with) x window / GiB moved in it
    GB/s               between the ends of the first and the last job within the window

A contiguous copy in this process is measured the same way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.client.cli.bench.busy import LOOPS, BusyEngine
from kvferry.client.cli.bench.engine import TIMEOUT, Shape
from kvferry.client.cli.bench.movers import BenchMover, JobMover, contiguous
from kvferry.client.cli.bench.plan import Plan
from kvferry.client.cli.bench.results import GIB, Beside, Spread
from kvferry.client.cli.bench.rig import BenchRig
from kvferry.client.cli.units import size
from kvferry.client.session import timed_out

KIB = 1 << 10
SIZES = (KIB, 4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, 2048 * KIB)
QUICK = (4 * KIB, 256 * KIB)
WINDOW, ALONE = 0.2, 0.2
WINDOWS, QUICK_WINDOWS = 3, 1
IN_FLIGHT = 2
# The contiguous copy is divided into this many jobs, so that several complete within a window.
CONTIGUOUS_JOBS = 16
KVFERRY, CONTIGUOUS = "kvferry", "contiguous"
_DIRECTIONS = ("store", "load")
MoverByDirection = dict[str, BenchMover]


def count_steps(plan: Plan) -> int:
    """How often `measure` calls `step`."""
    return 2 + len(_sizes(plan))


def measure(rig: BenchRig, plan: Plan, step: Callable[[str], None]) -> Iterator[Beside]:
    """Yields a row for each direction, loop and fragment size."""
    step("start a busy engine")
    with BusyEngine(rig.slab.device.index or 0) as busy:
        bench = Windows(busy, plan.times(WINDOWS, QUICK_WINDOWS), step)
        copies: MoverByDirection = {
            direction: contiguous(rig, direction, CONTIGUOUS_JOBS) for direction in _DIRECTIONS
        }
        yield from bench.rows(CONTIGUOUS, 0, copies)
        rig.raw.sample()
        for page_bytes in _sizes(plan):
            with rig.engine(Shape.of(page_bytes)) as engine:
                movers: MoverByDirection = {
                    direction: JobMover(engine, direction, 2) for direction in _DIRECTIONS
                }
                yield from bench.rows(KVFERRY, page_bytes, movers)
            rig.raw.sample()


def _sizes(plan: Plan) -> tuple[int, ...]:
    return plan.pick(plan.sizes, SIZES, QUICK)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a busy engine, alternately without and with copies."""

    busy: BusyEngine
    windows: int
    step: Callable[[str], None]

    def rows(self, method: str, page_bytes: int, movers: MoverByDirection) -> Iterator[Beside]:
        self.step(f"{method}, {size(page_bytes) if page_bytes else 'contiguous'}")
        alone = {direction: _alone(mover) for direction, mover in movers.items()}
        for loop in LOOPS:
            for direction, mover in movers.items():
                yield self._row(
                    Beside(method, direction, loop, page_bytes, alone[direction]), mover
                )

    def _row(self, row: Beside, mover: BenchMover) -> Beside:
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
        return self.busy.run_window(loop, WINDOW)

    def _window(self, loop: str, mover: BenchMover) -> tuple[float, float]:
        """(bytes per second of the copies, milliseconds per step of the engine)."""
        with _keep_copying(mover) as replace_completed:
            while not replace_completed():
                pass
            self.busy.begin_window(loop, WINDOW)
            ends = list[float]()
            while not self.busy.window_ended() or len(ends) < 2:
                ends += replace_completed()
            step_ms = self.busy.end_window()
        return mover.nbytes * (len(ends) - 1) / (ends[-1] - ends[0]), step_ms


def _alone(mover: BenchMover) -> float:
    """GB/s without the engine."""
    with _keep_copying(mover) as replace_completed:
        begin, ends = time.perf_counter(), list[float]()
        while time.perf_counter() < begin + ALONE or len(ends) < 3:
            ends += replace_completed()
    return mover.nbytes * (len(ends) - 1) / (ends[-1] - ends[0]) / 1e9


@contextlib.contextmanager
def _keep_copying(mover: BenchMover) -> Iterator[Callable[[], list[float]]]:
    """Keep IN_FLIGHT jobs in flight; the function replaces completed ones, returns their times."""
    deadline, in_flight = time.monotonic() + TIMEOUT, IN_FLIGHT

    def replace_completed() -> list[float]:
        ended = [time.perf_counter()] * mover.count_completed()
        for _ in ended:
            mover.submit()
        if time.monotonic() > deadline:
            raise timed_out("copies beside the engine did not complete", mover.nbytes)
        return ended

    for _ in range(IN_FLIGHT):
        mover.submit()
    yield replace_completed
    while in_flight:
        in_flight -= mover.count_completed()
