"""Failures to start a process, as on a machine without memory or process ids."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest


def refuse_starts(monkeypatch: pytest.MonkeyPatch, *refusals: OSError) -> list[OSError]:
    """Make the next `subprocess.Popen` calls raise these errors, the last one first.

    Returns the list of errors that have not been raised yet.
    """
    start, left = subprocess.Popen, list(refusals)

    def popen(*arguments: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return left
