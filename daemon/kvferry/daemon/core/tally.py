"""What became of all jobs: counts and histograms, by direction and by how they were copied.

A job costs it two bisections and a few additions; whoever wants to see it takes a copy, and makes
of it what a monitoring system reads. Nothing on a job's way hashes an enumeration's member, which
takes Python longer than all of this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from copy import deepcopy

from kvferry.daemon.core.actions import Ended
from kvferry.proto.messages import JobResult, Outcome
from kvferry.proto.specs import Direction

BOUNDS = tuple(scale * 10**power for power in range(-5, 2) for scale in (1, 2.5, 5))
"""Upper bounds of the buckets, in seconds: 10 us to 50 s. What takes longer is in one more."""


class Histogram:
    """How many values fell into each bucket, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds


class Movement:
    """All jobs of one direction that were copied in one way and are done."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.device = Histogram()
        """Seconds on the device."""
        self.queued = Histogram()
        """Seconds from when a job was accepted until its first piece was submitted."""


class Way:
    """All jobs of one direction: those done by how they were copied, the others by outcome."""

    def __init__(self) -> None:
        self.done: dict[str, Movement] = {}
        self.others: Counter[Outcome] = Counter()

    def add(self, mode: str, result: JobResult, report: Ended) -> None:
        if result.outcome is not Outcome.DONE:
            self.others[result.outcome] += 1
            return
        movement = self.done.get(mode)
        if movement is None:
            movement = self.done[mode] = Movement()
        movement.nbytes += result.nbytes
        movement.device.observe(report.seconds)
        movement.queued.observe(report.queued)


class Tally:
    """Refused jobs never ran, and are not in it."""

    def __init__(self) -> None:
        self._stores = Way()
        self._loads = Way()

    def add(self, mode: str, result: JobResult, report: Ended) -> None:
        way = self._stores if result.direction is Direction.STORE else self._loads
        way.add(mode, result, report)

    @property
    def movements(self) -> dict[tuple[str, str], Movement]:
        """By direction and mode."""
        return {
            (direction, mode): movement
            for direction, way in self._ways
            for mode, movement in way.done.items()
        }

    @property
    def outcomes(self) -> dict[tuple[str, str], int]:
        """How many, by direction and outcome: those that a daemon tells are there from the start,
        or nobody would see the first one as a growth."""
        done = {
            (direction, str(Outcome.DONE)): sum(sum(m.device.counts) for m in way.done.values())
            for direction, way in self._ways
        }
        others = {
            (direction, str(outcome)): number
            for direction, way in self._ways
            for outcome, number in ({Outcome.FAILED: 0, Outcome.CANCELLED: 0} | way.others).items()
        }
        return done | others

    def copy(self) -> Tally:
        """As it is now; what comes later does not change it."""
        return deepcopy(self)

    @property
    def _ways(self) -> tuple[tuple[str, Way], tuple[str, Way]]:
        return (str(Direction.STORE), self._stores), (str(Direction.LOAD), self._loads)
