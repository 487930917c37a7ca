"""Two daemons of one host share a cache in the demo."""

from __future__ import annotations

import pytest

from kvferry.testing import demo_siblings


def test_one_daemon_finds_the_blocks_of_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_siblings.main() == 0
    output = capsys.readouterr().out
    assert "every byte is the one that engine A stored: yes" in output
    assert "after a reset no daemon finds a key: yes" in output
