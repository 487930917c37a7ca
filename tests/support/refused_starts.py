"""A machine that refuses to start processes for a while."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest


def refuse_starts(monkeypatch: pytest.MonkeyPatch, *refusals: OSError) -> list[OSError]:
    """The next `subprocess.Popen` raise these, the last one first. Returns those not raised yet."""
    start, left = subprocess.Popen, list(refusals)

    def popen(*arguments: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return left
