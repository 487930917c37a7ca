"""Two daemons share a Mooncake Store in the demo, with real processes of Mooncake."""

from __future__ import annotations

import pytest
from rich.progress import Progress

from kvferry.testing import demo_cluster
from kvferry.testing.mooncake_store import is_installed

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="Mooncake is not installed: pip install 'kvferry[mooncake]'"
)
BLOCKS = 24


def test_one_daemon_finds_the_blocks_of_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_cluster.main(["--blocks", str(BLOCKS)]) == 0
    output = capsys.readouterr().out
    assert "is the one that engine A stored: yes" in output
    assert "after a reset no key is found: yes" in output


def test_the_demo_detects_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine A stores other bytes than engine B expects."""

    def fill(engine: demo_cluster.ClusterEngine) -> None:
        engine._pages.fill_(7)

    monkeypatch.setattr(demo_cluster.ClusterEngine, "fill", fill)
    with Progress(disable=True) as progress:
        report = demo_cluster.play(4, progress)
    assert report.wrong == 4
