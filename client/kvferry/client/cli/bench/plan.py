"""What is to be measured, and how much of it: the command line, decided.

Every measurement has its own defaults for what was not given; `quick` stands for smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvferry.client.cli.bench.engine import HOST_BLOCK

T = TypeVar("T")

MIN_HALF = 16 << 20
QUEUED_JOBS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """nbytes: to move each way in one go. directory: of a running daemon, or None.

    sizes, reps, pool_bytes, staging_bytes: as given, or None for the defaults.
    """

    device: str
    directory: Path | None
    nbytes: int
    sizes: tuple[int, ...] | None
    reps: int | None
    quick: bool
    what: frozenset[str] = frozenset({"bandwidth", "latency"})
    pool_bytes: int | None = None
    mps: bool = False
    staging_bytes: int | None = None

    def pick(self, given: T | None, usual: T, quick: T) -> T:
        return given if given is not None else quick if self.quick else usual

    def times(self, usual: int, quick: int) -> int:
        return self.pick(self.reps, usual, quick)

    @property
    def half_bytes(self) -> int:
        """Half of the slab: whole host blocks, at least one of each size."""
        largest = max((*(self.sizes or ()), MIN_HALF))
        return -(-max(self.nbytes, largest) // HOST_BLOCK) * HOST_BLOCK

    @property
    def rig_pool_bytes(self) -> int:
        """The host pool that the rig needs: two halves, or all stores queued and one more."""
        return self.half_bytes * (QUEUED_JOBS + 1 if "queued" in self.what else 2)

    @property
    def needs_rig(self) -> bool:
        return self.what != {"start"}
