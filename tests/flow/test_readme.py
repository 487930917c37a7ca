"""Runs the Python blocks of the README with a daemon on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, endpoint
from kvferry.testing.engine import until

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_code_runs_more_than_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves nothing that a second run meets."""
    (block,) = BLOCKS
    with LocalDaemon(pool_bytes=256 << 20) as daemon:
        until(lambda: "serving" in daemon.log())
        monkeypatch.setattr(endpoint, "runtime_directories", lambda: [daemon.runtime_dir])
        for _ in range(2):
            exec(compile(block, README.name, "exec"), {})
            output = capsys.readouterr().out
            assert "True" in output
            assert "False" not in output
        until(lambda: daemon.log().count("client disconnected") == 2)


def test_the_plot_shows_the_times_of_the_table() -> None:
    """The command in CONTRIBUTING.md draws it again."""
    table = README.read_text().partition("| vLLM 0.33 | kvferry |")[2].partition("\n\n")[0]
    plot = (ROOT / "tests" / "bench" / "results.svg").read_text()
    times = re.findall(r"\*\*([\d.]+ m?s)\*\*", table)
    assert len(times) == 7
    assert all(f">{time}</text>" in plot for time in times)
