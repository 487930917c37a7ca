"""Mistakes in the code of a tier, which may be anybody's, cost errors and are explained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.daemon.tiers.base import Result
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    PoolMemory,
    ProcessSubject,
    TierSetup,
    open_subject,
)
from support.time_limits import TIMEOUT

OK, ERROR = Result.OK, Result.ERROR


@pytest.fixture
def tier(
    pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ProcessSubject]:
    """rude_tier.py: a file with a fault's name in `tmp_path` turns it on."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with open_subject(TierSetup("rude_tier", {"folder": str(tmp_path)}), pool) as made:
        assert isinstance(made, ProcessSubject)
        yield made


def test_too_few_results_are_errors_of_the_call(
    tier: ProcessSubject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = tmp_path / "too few"
    fault.touch()
    assert tier.put([1, 2]) == [ERROR, ERROR]
    fault.unlink()
    assert tier.put([3, 4]) == [OK, OK]
    fault.touch()
    assert tier.fetch([3, 4]) == [ERROR, ERROR]
    assert tier.contains([3, 4]) == [False, False]
    log = capsys.readouterr().out
    for call in ("contains", "fetch", "put"):
        assert f"{call} has returned 1 results for 2 keys; return one for each" in log


def test_a_tier_that_cannot_say_its_usage_stays_on(tier: ProcessSubject, tmp_path: Path) -> None:
    tier.put([1])
    before = tier.usage()
    (tmp_path / "usage").touch()
    tier.put([2])
    assert tier.usage() == before
    assert tier.contains([1, 2]) == [True, True]
    assert tier.client.counts["deaths"] == 0


def test_what_a_process_sent_before_its_end_is_read(
    tier: ProcessSubject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the daemon is busy until the process has ended: it says why."""
    client, before = tier.client, tier.client.pid
    (tmp_path / "drop").touch()
    tier.start(client.refresh_usage())
    tier.start(client.drop(NAMESPACE))
    deadline = time.monotonic() + TIMEOUT
    while ") Z " not in Path(f"/proc/{before}/stat").read_text():
        assert time.monotonic() < deadline
    tier.wait_until(lambda: client.pid not in (None, before))
    assert "drop failed" in capsys.readouterr().out
