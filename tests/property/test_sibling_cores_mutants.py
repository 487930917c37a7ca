"""Each comparison and each order of writes is needed: without it, the machine finds wrong bytes.

See test_sibling_cores_against_a_model.py, and support/sibling_mutants.py for what is weakened.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sibling_mutants import MUTANTS, Mutant
from support.sibling_runs import find_wrong_bytes

SEEDS, STEPS = range(400), 400


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_weakened_rule_loses_bytes(tmp_path: Path, mutant: Mutant) -> None:
    with mutant():
        assert find_wrong_bytes(tmp_path, SEEDS, STEPS)
