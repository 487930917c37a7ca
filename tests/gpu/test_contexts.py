"""Runs own_contexts.py in a process of its own, because it destroys a context torch may use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.time_limits import TIMEOUT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


def test_the_current_context_is_restored() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    path = Path(__file__).with_name("own_contexts.py")
    done = subprocess.run([*command, path], capture_output=True, text=True, timeout=3 * TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
