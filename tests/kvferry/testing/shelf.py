"""What an engine may know of its own host blocks, from the transfers that it submitted."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.testing.marks import Label
from kvferry.testing.tally import TrafficOptions

SEALED_IN = 3.0
"""Seconds within which a daemon has made sure that the next one finds what was stored."""


@dataclass(slots=True, eq=False)
class Job:
    """A transfer under way. labels: what its GPU blocks must hold in the end, 0 where nobody knows.

    writers: of a load, the stores that wrote these labels. places: of a store, where it writes.
    unvouched: a load from a host block that a daemon before this one may not have finished with.
    """

    job_id: int
    store: bool
    gpu: list[int]
    labels: list[int]
    submitted: float
    writers: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    keys: tuple[bytes, ...] = ()
    cancelled: bool = False
    unvouched: bool = False


class Shelf:
    """What an engine's own host blocks hold, sub-block by sub-block, as far as it can know."""

    def __init__(self, options: TrafficOptions, dice: random.Random) -> None:
        self._options, self._dice = options, dice
        self._labels: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._touched: dict[int, float] = {}
        self._unvouched: set[int] = set()
        self._versions = dice.randrange(1 << 22)  # whoever had the name before used others

    def forget(self) -> None:
        """The host blocks are new ones."""
        self._labels.clear()
        self._unvouched.clear()

    def paused(self, seconds: float) -> None:
        """Time went by in which nobody here saw what happened."""
        self._touched = {host: at + seconds for host, at in self._touched.items()}

    def survived(self, lost_at: float) -> None:
        """The host blocks are those of the daemon that went then. It must have vouched for those
        that it had all of, in peace, for some time."""
        factor, long_ago = self._options.factor, lost_at - SEALED_IN
        self._unvouched = {
            host
            for host in range(self._options.host_blocks)
            if self._touched.get(host, 0.0) > long_ago
            or host in self._unvouched
            or not all(host * factor + sub in self._labels for sub in range(factor))
        }

    def vouched(self, places: Sequence[int]) -> bool:
        return self._unvouched.isdisjoint(place // self._options.factor for place in places)

    def transfer(self, count: int) -> tuple[list[int], int, list[int]]:
        """Random host blocks for `count` GPU blocks: ids, the first's skip, and all sub-blocks."""
        factor = self._options.factor
        skip = self._dice.randrange(factor)
        hosts = self._dice.sample(range(self._options.host_blocks), -(-(count + skip) // factor))
        places = [hosts[at // factor] * factor + at % factor for at in range(skip, skip + count)]
        return hosts, skip, places

    def store(self, job: Job) -> None:
        """A store was submitted: from now on, loads find its labels."""
        self._versions += 1
        for place, label in zip(job.places, job.labels, strict=True):
            self._labels[place], self._writers[place] = label, job.job_id
        self.touched(job)

    def touched(self, job: Job) -> None:
        """A store begins, or ends."""
        hosts = Counter(place // self._options.factor for place in job.places)
        self._touched.update(dict.fromkeys(hosts, time.monotonic()))
        self._unvouched -= {host for host, subs in hosts.items() if subs == self._options.factor}

    def label(self, place: int, version: int) -> int:
        return Label(self._options.owner, place, version).number

    def next_version(self) -> int:
        return self._versions + 1

    def expected(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """What these sub-blocks hold, and which store wrote each."""
        return (
            [self._labels.get(place, 0) for place in places],
            [self._writers.get(place, 0) for place in places],
        )

    def spoiled(self, job: Job) -> None:
        """A store did not end well: where nothing was stored since, nobody knows what is there."""
        for place in job.places:
            if self._writers.get(place) == job.job_id:
                self._labels.pop(place, None)
                self._unvouched.add(place // self._options.factor)
