"""Runs of random schedules of test_sibling_cores_against_a_model.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import structlog

from support.sibling_contents import WrongBytes
from support.sibling_host import SiblingHost
from support.sibling_schedules import Step, random_schedule, shorten


class FailedSchedule(AssertionError):
    """A schedule failed. Its message has the shortest one that was found."""


def run_schedule(
    directory: Path, schedule: Sequence[Step], daemons: int, *, checks: bool = True
) -> Counter[str]:
    """Run a schedule; return what happened. Raises WrongBytes, and what a daemon raises.

    checks: whether to check the integrity of caches, too.
    """
    host = SiblingHost(directory, daemons, checks=checks)
    with _quiet(), host.running():
        host.run(schedule)
    return host.counts


def find_wrong_bytes(directory: Path, seeds: Iterable[int], steps: int) -> str:
    """Run schedules of a product with a fault, until a load returns wrong bytes; return what it
    returned, "" if none does. What the daemon itself notices ends a schedule only."""
    for seed in seeds:
        daemons = 2 + seed % 2
        schedule = random_schedule(seed, steps, daemons)
        try:
            run_schedule(directory / str(seed), schedule, daemons, checks=False)
        except WrongBytes as error:
            return str(error)
        except Exception:
            continue
    return ""


def run_seeds(directory: Path, seeds: Iterable[int], steps: int, daemons: int) -> Counter[str]:
    """Run a schedule for each seed; return what happened. Raises FailedSchedule."""
    counts, numbers = Counter[str](), count()

    def run(schedule: Sequence[Step]) -> None:
        counts.update(run_schedule(directory / str(next(numbers)), schedule, daemons))

    def fails(schedule: Sequence[Step]) -> bool:
        with suppress(Exception):
            run(schedule)
            return False
        return True

    for seed in seeds:
        schedule = random_schedule(seed, steps, daemons)
        try:
            run(schedule)
        except Exception as error:
            shortest = shorten(schedule, fails)
            text = "\n".join(f"    {step}," for step in shortest)
            raise FailedSchedule(f"seed {seed}: {error!r}\n{text}") from error
    return counts


@contextmanager
def _quiet() -> Iterator[None]:
    """Without log lines: each start of a daemon has some."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        yield
    finally:
        structlog.configure(**before)
