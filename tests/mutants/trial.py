"""Runs tests against mutants, each in a copy of the tree.

A copy serves one mutant after the other. Called by the threads of __main__.py, each with a copy of
its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from queue import SimpleQueue

from mutants.source_mutant import SourceMutant

PARTS = "proto", "client", "daemon", "tests"
# What `make test` runs.
ALL_TESTS = "-m", "not gpu and not systemd", "--ignore", "tests/faults", "tests"
# Exit statuses of pytest: no test has failed, but not all could be run.
NOT_RUN = 2, 3, 4, 5
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
# Distinct times of mutated files: Python compares them, in seconds, with those in its caches.
_times = count(1)


class TrialOutcome(Enum):
    KILLED = "killed"
    SURVIVED = "survived"
    # The tests could not be run: the mutant is no valid Python, or the machine is too busy.
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """killer: the test that failed, or how the run has ended. output: of pytest."""

    mutant: SourceMutant
    outcome: TrialOutcome
    killer: str
    seconds: float
    output: str


def copy_tree(root: Path, target: Path) -> None:
    """Copy what git does not ignore."""
    ignored = [line.rstrip("/") for line in (root / ".gitignore").read_text().split()]
    shutil.copytree(root, target, ignore=shutil.ignore_patterns(".git", *ignored))


def run_pytest(tree: Path, arguments: Sequence[str], limit: float | None) -> tuple[int | None, str]:
    """The exit status of pytest, None if it takes more than `limit` seconds; and its output."""
    path = os.pathsep.join(str(tree / part) for part in PARTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_group(process)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill it and its children, also those that a test has left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def applied(mutant: SourceMutant, tree: Path) -> Iterator[None]:
    """In this context, a copy has the change."""
    path = tree / mutant.path
    source, status = path.read_text(), path.stat()
    path.write_text(mutant.mutated(source))
    seconds = next(_times)
    os.utime(path, (seconds, seconds))
    try:
        yield
    finally:
        path.write_text(source)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def try_mutant(mutant: SourceMutant, tree: Path, tests: Sequence[str], limit: float) -> TrialResult:
    """Run tests against a mutant until one fails, or the time is over."""
    begun = time.monotonic()
    with applied(mutant, tree):
        status, output = run_pytest(tree, ("-x", *tests), limit)
    if status is None and run_pytest(tree, ("-x", *tests), limit)[0] is None:
        # On a busy machine: this says nothing about the mutant.
        outcome, killer = TrialOutcome.BROKEN, ""
        output = f"{output}\nthe tests take more than {limit:g} s also without the mutant"
    elif status is None:
        outcome, killer = TrialOutcome.KILLED, f"the time limit of {limit:g} s"
    elif status in NOT_RUN:
        outcome, killer = TrialOutcome.BROKEN, ""
    elif status == 0:
        outcome, killer = TrialOutcome.SURVIVED, ""
    else:
        failed = _FAILED.search(output)
        outcome = TrialOutcome.KILLED
        killer = failed[1] if failed else f"exit status {status} of pytest"
    return TrialResult(mutant, outcome, killer, time.monotonic() - begun, output)


def try_all(
    mutants: Sequence[SourceMutant],
    trees: Sequence[Path],
    *,
    tests: Sequence[str],
    limit: float,
    ended: Callable[[TrialResult], None],
) -> list[TrialResult]:
    """Try mutants, as many at once as there are copies. Returns the results in their order.

    tests: for all; empty: those of each. ended: called with each result, in any order.
    """
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def attempt(mutant: SourceMutant) -> TrialResult:
        tree = free.get()
        try:
            result = try_mutant(mutant, tree, tests or mutant.tests, limit)
        finally:
            free.put(tree)
        ended(result)
        return result

    with ThreadPoolExecutor(len(trees)) as threads:
        return list(threads.map(attempt, mutants))
