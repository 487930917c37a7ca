"""Mistakes in the code of a tier, which may be anybody's, cost errors and are explained."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.daemon.tiers.base import Result, Tier
from kvferry.daemon.tiers.messages import TierArguments
from kvferry.daemon.tiers.tier_worker import check_tier
from kvferry.proto.errors import Code, Refused
from kvferry.testing.memory_tier import MemoryTier
from kvferry.testing.tier_subjects import PoolMemory, ProcessSubject, TierSetup, open_subject
from support.time_limits import TIMEOUT

OK, ERROR = Result.OK, Result.ERROR


@pytest.fixture
def tier(
    pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ProcessSubject]:
    """rude_tier.py: a file with a fault's name in `tmp_path` turns it on."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
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
    (tmp_path / "end in drop").touch()
    tier.start(client.refresh_usage())
    tier.begin_drop()
    deadline = time.monotonic() + TIMEOUT
    while ") Z " not in Path(f"/proc/{before}/stat").read_text():
        assert time.monotonic() < deadline
    tier.wait_until(lambda: client.pid not in (None, before))
    assert "end in drop" in capsys.readouterr().out


# What a tier must have

GIVEN = TierArguments((), 0, 0, "own_tier", {})


class Partial:
    """Has `io_threads` and `put` only."""

    io_threads = 2

    def put(self) -> None: ...


def test_a_tier_that_lacks_something_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        check_tier(Partial(), GIVEN)
    lacks = "call_bytes, close, contains, drop, fetch, maintain, note_used, stores, usage"
    assert caught.value.info.code == Code.BAD_CONFIG
    assert caught.value.message == (
        f"Partial of own_tier lacks {lacks}; see Tier in kvferry.daemon.tiers.base"
    )


def test_a_tier_that_cannot_settle_is_no_shared_tier() -> None:
    check_tier(MemoryTier(1), GIVEN)
    with pytest.raises(Refused, match="MemoryTier of own_tier lacks settle; see SharedTier in"):
        check_tier(MemoryTier(1), msgspec.structs.replace(GIVEN, is_shared=True))


def test_what_has_no_body_in_the_interface_must_be_written() -> None:
    class Inherited(Tier):
        def put(self, *_: object) -> list[Result]:
            return []

    with pytest.raises(TypeError, match=r"contains.*drop.*fetch.*usage"):
        Inherited()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (
            TierSetup("kvferry.testing.memory_tier", {"size": 1}, shared=True),
            "MemoryTier of kvferry.testing.memory_tier lacks settle; see SharedTier in",
        ),
        (TierSetup("rude_tier", {"folder": "."}), "stores fails"),
    ],
    ids=["lacks", "stores"],
)
def test_a_tier_that_cannot_be_used_is_explained(
    pool: PoolMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setup: TierSetup,
    reason: str,
) -> None:
    """For example one that cannot name its stores: an old one could be found again."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stores").touch()
    with (
        pytest.raises(RuntimeError, match=f"tier {setup.module} not opened: .*{reason}"),
        open_subject(setup, pool),
    ):
        pass
