"""The measurements, and their amounts: the parsed command line.

Each measurement has its own defaults for options that were not given; `quick` selects smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvferry.client.cli.bench.bench_engine import HOST_BLOCK

T = TypeVar("T")

MIN_HALF = 16 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of a run, and their amounts.

    nbytes: bytes per direction of one copy. directory: of a running daemon, or None.

    sizes, reps: as given, or None for the defaults.
    """

    device: str
    directory: Path | None
    nbytes: int
    sizes: tuple[int, ...] | None
    reps: int | None
    quick: bool
    what: frozenset[str] = frozenset({"bandwidth", "latency"})

    def pick(self, given: T | None, usual: T, quick: T) -> T:
        return given if given is not None else quick if self.quick else usual

    def times(self, usual: int, quick: int) -> int:
        return self.pick(self.reps, usual, quick)

    @property
    def half_bytes(self) -> int:
        """Half of the device buffer: whole host blocks, at least one of each size."""
        largest = max((*(self.sizes or ()), MIN_HALF))
        return -(-max(self.nbytes, largest) // HOST_BLOCK) * HOST_BLOCK

    @property
    def rig_pool_bytes(self) -> int:
        """Bytes of host pool that the rig needs: the size of the device buffer."""
        return 2 * self.half_bytes
