"""Each comparison and each order of writes is needed: without it, the machine finds wrong bytes.

See test_sibling_cores_against_a_model.py, and support/sibling_mutants.py for what is weakened.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sibling_mutants import MUTANTS
from support.sibling_runs import find_wrong_bytes

SEEDS, STEPS = range(400), 400
# They need many runs before bytes are wrong: minutes in all.
RARE = {
    "the version is read last",
    "the version is counted",
    "the version is inverted",
    "the parity is ignored",
    "keys are compared by hash",
    "a reserved block keeps its version",
    "a freed table is not void",
    "a freed table is void late",
    "the version of a store is written first",
    "a restart leaves versions as they are",
    "tables are signed before the draw",
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_weakened_rule_loses_bytes(tmp_path: Path, name: str, long: bool) -> None:
    if name in RARE and not long:
        pytest.skip("only with --long, as in `make mutants`")
    with MUTANTS[name]():
        assert find_wrong_bytes(tmp_path, SEEDS, STEPS)
