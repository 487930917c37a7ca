"""The process of a tier, and the arguments of its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvferry.daemon.processes import ProcessTimes, Program
from kvferry.daemon.tier_config import TierConfig
from kvferry.daemon.tiers.messages import TierArguments

WORKER = "kvferry.daemon.tiers.tier_worker"


@dataclass(frozen=True, slots=True)
class TierTimes(ProcessTimes):
    """How long a tier may take, and how long one that fails is left alone, in seconds.

    start: until the process has opened its tier. Registering a large pool with a network card takes
    longest. end: to write everything back when the daemon stops.
    """

    # After a deadline, until a process that has not answered is killed. A busy or throttled device
    # takes a second for the reads that have begun; a process that is killed costs more than
    # waiting, because its tier gets no requests meanwhile.
    grace: float = 2.0
    # For which the circuit breaker turns the tier off: at first, and at most.
    first_off: float = 1.0
    longest_off: float = 60.0


DEFAULT_TIMES = TierTimes()


@dataclass(frozen=True, slots=True)
class PoolFiles:
    """The host pool: descriptors of its chunks, all but the last of `chunk_bytes`."""

    descriptors: Sequence[int]
    chunk_bytes: int
    nbytes: int


def tier_program(tier: TierConfig, pool: PoolFiles) -> Program:
    chunks = tuple(pool.descriptors)
    arguments = TierArguments(chunks, pool.chunk_bytes, pool.nbytes, tier.module, tier.options)
    given = [msgspec.json.encode(arguments).decode()]
    return Program(f"{tier.name} tier", WORKER, given, chunks)
