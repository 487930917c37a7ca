"""deploy/README.md: the table of models and pools is what tests/bench/kv_bytes.py prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "bench" / "kv_bytes.py"
PAGE = ROOT / "deploy" / "README.md"


def test_the_page_has_the_table_of_the_script() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env={"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("\n") > 10
    assert f"\n{done.stdout}" in PAGE.read_text(), "run tests/bench/kv_bytes.py --write"
