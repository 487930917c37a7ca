"""Daemons that are siblings, with resets, kills and restarts: no load returns wrong or old bytes.

Random steps of some cores that share a page of epochs and each other's memory, in any order of
their accesses to that memory (support/sibling_host.py). Each load that is done is compared with a
model, which knows what every block may contain (support/sibling_contents.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from support.sibling_runs import run_schedule, run_seeds
from support.sibling_schedules import Step

# Minutes if other processes keep the cores busy.
pytestmark = pytest.mark.timeout(900)

RUNS, STEPS = 80, 400


@pytest.mark.parametrize("daemons", [2, 3])
def test_no_load_returns_wrong_or_old_bytes(tmp_path: Path, daemons: int) -> None:
    counts: Counter[str] = run_seeds(tmp_path, range(RUNS), STEPS, daemons)
    # The machine is worth something only if all of this happens.
    least = {"borrowed": 200, "own": 700, "changed": 30, "resets": 70}
    least |= {"kills within": 35, "starts with a pool": 140, "tables lost": 35}
    assert {name: counts[name] for name in least if counts[name] <= least[name]} == {}


def test_borrowed_keys_of_another_composition_are_not_loaded(tmp_path: Path) -> None:
    """An engine borrows a key, and comes back with other pages in the same namespace."""
    schedule = [
        Step("start", 1, 0, 1),
        Step("start", 0, 0, 1),
        Step("borrow", 0, 0, 3),
        Step("store whole", 1, 0, 0),
        Step("search", 0, 0, 0),
        Step("close", 0, 0, 0),
        Step("open", 0, 0, 8),
        Step("load whole", 0, 0, 0),
    ]
    assert run_schedule(tmp_path, schedule, 2)["refused"] == 1
