"""Runs of random schedules of test_sibling_cores_against_a_model.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

import structlog

from support.sibling_host import SiblingHost, Step, random_schedule, shorten


class FailedSchedule(AssertionError):
    """A schedule failed. Its message has the shortest one that was found."""


def run_seeds(directory: Path, seeds: Iterable[int], steps: int, daemons: int) -> Counter[str]:
    """Run a schedule for each seed; return what happened. Raises FailedSchedule."""
    counts, numbers = Counter[str](), count()

    def run(schedule: Sequence[Step]) -> None:
        host = SiblingHost(directory / f"{daemons}-{next(numbers)}", daemons)
        with host.running():
            host.run(schedule)
        counts.update(host.counts)

    def fails(schedule: Sequence[Step]) -> bool:
        try:
            run(schedule)
        except Exception:
            return True
        return False

    log = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        for seed in seeds:
            schedule = random_schedule(seed, steps, daemons)
            try:
                run(schedule)
            except Exception as error:
                shortest = shorten(schedule, fails)
                text = "\n".join(f"    {step}," for step in shortest)
                raise FailedSchedule(f"seed {seed}: {error!r}\n{text}") from error
    finally:
        structlog.configure(**log)
    return counts
