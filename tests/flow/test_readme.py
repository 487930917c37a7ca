"""The README's Python, as it is written there, beside a daemon on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, endpoint
from kvferry.testing.engine import until

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_each_piece_runs_on_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever ran before it: none needs names of another, or leaves no room to it."""
    assert len(BLOCKS) == 2
    with LocalDaemon(pool_bytes=256 << 20) as daemon:
        until(lambda: "serving" in daemon.log())
        monkeypatch.setattr(endpoint, "runtime_directories", lambda: [daemon.runtime_dir])
        for block in (*BLOCKS, *reversed(BLOCKS)):
            exec(compile(block, README.name, "exec"), {})
            said = capsys.readouterr().out
            assert "True" in said
            assert "False" not in said
            assert ("(2, True)" in said) == (block is BLOCKS[1]), "what was stored is loaded"
        until(lambda: daemon.log().count("client disconnected") == 4)
