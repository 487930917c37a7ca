"""What an engine may know of its own host blocks, from the transfers that it submitted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.block_marks import Label
from support.traffic_statistics import TrafficOptions

UNKNOWN, UNDEFINED = 0, -1
"""In place of a label: nobody here knows what it holds (an engine of this name had it before, or
its store was lost); and its last store did not complete, so that no load of it may be done."""


@dataclass(slots=True, eq=False)
class HostBlocksJob:
    """A transfer under way. labels: what its GPU blocks must hold in the end.

    writers: of a load, the stores that wrote these labels. places: of a store, where it writes.
    settled: of a load, whether all stores of its blocks completed, with the daemon that is here.
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
    settled: bool = False


class HostBlocksModel:
    """What an engine's own host blocks hold, sub-block by sub-block.

    A sub-block holds what the last store of it wrote, if that completed, and is undefined if it did
    not. If nobody heard how it ended, because the daemon or the session did, it is unknown.
    """

    def __init__(self, options: TrafficOptions, dice: random.Random) -> None:
        self._options, self._dice = options, dice
        self._labels: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._settled: set[int] = set()
        self._inherited = False
        """Whether an engine of this name had these host blocks before."""
        self._versions = dice.randrange(1 << 22)  # whoever had the name before used others

    def forget(self) -> None:
        """The host blocks are new ones."""
        self._labels.clear()
        self._settled.clear()
        self._inherited = False

    def survived(self) -> None:
        """The host blocks are those of an earlier session, or of a daemon that went."""
        self._inherited |= not self._labels
        self._settled.clear()

    def transfer(self, count: int) -> tuple[list[int], int, list[int]]:
        """Random host blocks for `count` GPU blocks: ids, the first's skip, and all sub-blocks."""
        factor = self._options.factor
        skip = self._dice.randrange(factor)
        hosts = self._dice.sample(range(self._options.host_blocks), -(-(count + skip) // factor))
        places = [hosts[at // factor] * factor + at % factor for at in range(skip, skip + count)]
        return hosts, skip, places

    def store(self, job: HostBlocksJob) -> None:
        """A store was submitted: from now on, loads find its labels."""
        self._versions += 1
        self._settled.difference_update(job.places)
        for place, label in zip(job.places, job.labels, strict=True):
            self._labels[place], self._writers[place] = label, job.job_id

    def completed(self, job: HostBlocksJob) -> None:
        self._settled.update(self._own(job))

    def settled(self, places: Sequence[int]) -> bool:
        return self._settled.issuperset(places)

    def label(self, place: int, version: int) -> int:
        return Label(self._options.owner, place, version).number

    def next_version(self) -> int:
        return self._versions + 1

    def expected(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """What these sub-blocks hold, and which store wrote each."""
        other = UNKNOWN if self._inherited else UNDEFINED
        return (
            [self._labels.get(place, other) for place in places],
            [self._writers.get(place, 0) for place in places],
        )

    def lost(self, job: HostBlocksJob) -> None:
        """Nobody heard how a store ended: the block holds that, or what was stored before."""
        self._labels.update(dict.fromkeys(self._own(job), UNKNOWN))

    def failed(self, job: HostBlocksJob) -> None:
        """A store did not complete: what nobody stored over since is undefined."""
        self._labels.update(dict.fromkeys(self._own(job), UNDEFINED))

    def _own(self, job: HostBlocksJob) -> list[int]:
        return [place for place in job.places if self._writers.get(place) == job.job_id]
