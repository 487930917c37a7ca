"""Breaks the product in a hundred ways, and reports what no test notices: `make mutants`.

    python -m mutants                     # all
    python -m mutants tiers epoch -j 1    # those with one of these texts in their name or path
    python -m mutants epoch --all-tests   # with all tests, instead of the few that each names

First the tests must pass without a change. Exit status: 1 if a mutant survives, 2 if the tests fail
without one, or a mutant no longer matches the source: then correct it.

Here a mutant is a change of a source file. tests/support/sibling_mutants.py has those of the
comparisons between siblings, for a machine that needs thousands of runs to find wrong bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import count, groupby
from pathlib import Path

from mutants.catalog import MUTANTS
from mutants.source_mutant import SourceMutant
from mutants.trial import ALL_TESTS, TrialOutcome, TrialResult, copy_tree, run_pytest, try_all

ROOT = Path(__file__).parents[2]
# Seconds in which the tests of a mutant, or all tests, end.
LIMIT, ALL_LIMIT = 60.0, 3600.0


def main(
    arguments: Sequence[str] | None = None,
    mutants: Sequence[SourceMutant] = MUTANTS,
    root: Path = ROOT,
) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="of a name or a path")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--all-tests", action="store_true", help="run all tests for each mutant")
    options = parser.parse_args(arguments)
    chosen = [one for one in mutants if _is_wanted(one, options.texts)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(options.texts)!r} in its name or path")
    if stale := find_stale(chosen, root):
        print(*stale, sep="\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as directory:
        trees = [Path(directory) / str(number) for number in range(min(options.jobs, len(chosen)))]
        for tree in trees:
            copy_tree(root, tree)
        tests = ALL_TESTS if options.all_tests else ()
        if not _passes_without(trees[0], chosen, tests, options.jobs):
            return 2
        shown = _Progress(len(chosen))
        limit = ALL_LIMIT if options.all_tests else LIMIT
        results = try_all(chosen, trees, tests=tests, limit=limit, ended=shown.show)
    print_results(results)
    if any(result.outcome is TrialOutcome.BROKEN for result in results):
        return 2
    return 1 if any(result.outcome is TrialOutcome.SURVIVED for result in results) else 0


def find_stale(mutants: Sequence[SourceMutant], root: Path) -> list[str]:
    """For each mutant that no longer matches the source: its name, and why."""
    problems = ((mutant.name, mutant.find_problem(root)) for mutant in mutants)
    return [f"stale mutant {name!r}: {problem}" for name, problem in problems if problem]


def _is_wanted(mutant: SourceMutant, texts: Sequence[str]) -> bool:
    return not texts or any(text in mutant.name or text in mutant.path for text in texts)


def _passes_without(
    tree: Path, mutants: Sequence[SourceMutant], tests: Sequence[str], jobs: int
) -> bool:
    tests = tests or sorted({test for mutant in mutants for test in mutant.tests})
    print(f"{len(mutants)} mutants; first their tests without a change", flush=True)
    parallel = ("-n", str(jobs), "--dist", "worksteal") if jobs > 1 else ()
    status, output = run_pytest(tree, (*parallel, *tests), None)
    if status:
        print(output, "the tests fail without a mutant; correct them first", sep="\n")
    return not status


class _Progress:
    """Prints a line for each result. Called by several threads."""

    def __init__(self, total: int) -> None:
        self._total, self._numbers = total, count(1)

    def show(self, result: TrialResult) -> None:
        place = f"{next(self._numbers):3}/{self._total}"
        took = f"{result.seconds:5.1f} s"
        print(f"{place} {result.outcome.value:8} {took}  {result.mutant.name}", flush=True)


def print_results(results: Sequence[TrialResult]) -> None:
    """Print which test killed each mutant, file by file; then what must be corrected."""
    for path, group in groupby(results, lambda result: result.mutant.path):
        print(f"\n{path}\n{'-' * len(path)}")
        for result in group:
            print(f"{result.outcome.value:8}  {result.mutant.name}")
            if result.killer:
                print(f"{'':8}  {result.killer}")
    of_outcome = {each: [r for r in results if r.outcome is each] for each in TrialOutcome}
    for result in of_outcome[TrialOutcome.BROKEN]:
        print(f"\nthe tests of {result.mutant.name!r} could not be run:\n{result.output}")
    print()
    print(", ".join(f"{len(its)} {outcome.value}" for outcome, its in of_outcome.items()))
    for result in of_outcome[TrialOutcome.SURVIVED]:
        print(f"survived: {result.mutant.name} ({result.mutant.path})")


if __name__ == "__main__":
    sys.exit(main())
