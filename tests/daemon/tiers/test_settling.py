"""Epochs are settled with shared tiers, whose errors and hangs cost nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvferry.daemon.core.tier_actions import EpochsSettled, SettleEpochs
from kvferry.daemon.tier_config import CustomTierConfig
from kvferry.daemon.tiers import tiering
from kvferry.daemon.tiers.base import Result
from kvferry.testing.tier_subjects import NAMESPACE, PoolMemory, ProcessSubject, open_subject
from support.tiering_fixture import TieringFixture, pause

from .rude_fixtures import SOON_KILLED, Rude, Start
from .setups import MEMORY, memory_setup, shared_setup

OK = Result.OK


# Through the client of one tier


@pytest.fixture
def shared(start: Start, tmp_path: Path) -> Rude:
    return Rude(tmp_path, start, shared=True)


def test_a_tier_settles_epochs(shared: Rude) -> None:
    epochs = {NAMESPACE: (1 << 62) - 1, "other": 0}
    assert shared.tier.settle(epochs) == epochs


@pytest.mark.parametrize("fault", ["settle", "wrong settle"])
def test_a_tier_that_cannot_settle_leaves_all_epochs_out(
    shared: Rude, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shared.on(fault)
    assert shared.tier.settle({NAMESPACE: 7}) == {}
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "tier failed" in line)
    assert "settle" in line
    shared.off(fault)
    assert shared.tier.settle({NAMESPACE: 7}) == {NAMESPACE: 7}
    assert shared.tier.client.is_prompt
    assert shared.tier.client.counts["deaths"] == 0


def test_a_tier_that_hangs_while_it_settles_serves_all_else(shared: Rude) -> None:
    """The network may be lost for long: neither a lookup waits for it, nor is it killed."""
    tier, pid = shared.tier, shared.tier.client.pid
    shared.on("slow settle")
    settled = tier.begin_settle({NAMESPACE: 7})
    tier.wait_until(lambda: list(shared.folder.glob("slow settle-*")))
    ended = time.monotonic() + 3 * SOON_KILLED.grace
    while time.monotonic() < ended:
        assert tier.put([1]) == [OK]
        assert tier.contains([1]) == [True]
        assert tier.fetch([1]) == [OK]
    assert (tier.client.pid, tier.client.is_prompt, settled.done()) == (pid, True, False)
    shared.off("slow settle")
    tier.wait_until(settled.done)
    assert settled.result() == {NAMESPACE: 7}


def test_settling_ends_with_the_process(shared: Rude) -> None:
    tier, pid = shared.tier, shared.tier.client.pid
    assert pid is not None
    shared.on("slow settle")
    settled = tier.begin_settle({NAMESPACE: 7})
    tier.wait_until(lambda: list(shared.folder.glob("slow settle-*")))
    os.kill(pid, signal.SIGKILL)
    tier.wait_until(settled.done)
    assert settled.result() == {}


# Of all tiers


@pytest.fixture
def tiers(pool: PoolMemory) -> Iterator[TieringFixture]:
    """Over a tier, and a shared one behind it."""
    with ExitStack() as stack:
        own = stack.enter_context(open_subject(memory_setup(4 << 20), pool))
        assert isinstance(own, ProcessSubject)
        options = shared_setup(4 << 20).options
        config = CustomTierConfig(MEMORY, options, shared=True)
        other = stack.enter_context(closing(ProcessSubject(pool, config, runner=own.runner)))
        other.wait_until(lambda: other.client.is_on)
        yield stack.enter_context(closing(TieringFixture(pool, [own, other])))


def settled(fixture: TieringFixture) -> list[EpochsSettled]:
    return [each for each in fixture.reports if isinstance(each, EpochsSettled)]


def test_epochs_are_settled_with_shared_tiers_all_the_time(
    tiers: TieringFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiering, "SETTLE_EVERY", 0.05)
    tiers.start()
    pause(tiers.tiers[0])
    assert tiers.reports == []  # no namespace is in use
    begun = time.monotonic()
    for epoch, larger in ((7, 7), (9, 9), (8, 9)):
        tiers.epochs = {NAMESPACE: epoch}
        expected = 1, {NAMESPACE: epoch}, {NAMESPACE: larger}
        tiers.tiers[0].wait_until(
            lambda expected=expected: (
                expected  # type: ignore[misc]
                in [(each.tier, each.asked, each.found) for each in settled(tiers)]
            )
        )
    assert {each.tier for each in settled(tiers)} == {1}
    assert all(begun < each.now < time.monotonic() for each in settled(tiers))


def test_epochs_are_settled_at_once_when_that_is_wanted(
    tiers: TieringFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiering, "SETTLE_EVERY", 1e6)
    tiers.start()
    tiers.epochs = {NAMESPACE: 7}
    pause(tiers.tiers[0])
    assert tiers.reports == []
    tiers.perform(SettleEpochs())
    assert tiers.wait_for(EpochsSettled).found == {NAMESPACE: 7}


def test_a_shared_tier_that_is_busy_settles_again_when_it_is_not(
    pool: PoolMemory, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was asked for may be old by then. Another one settles meanwhile."""
    monkeypatch.setattr(tiering, "SETTLE_EVERY", 1e6)
    rude = Rude(tmp_path, start, shared=True)
    config = CustomTierConfig(MEMORY, shared_setup(4 << 20).options, shared=True)
    with ExitStack() as stack:
        other = stack.enter_context(closing(ProcessSubject(pool, config, runner=rude.tier.runner)))
        other.wait_until(lambda: other.client.is_on)
        both = stack.enter_context(closing(TieringFixture(pool, [rude.tier, other])))
        both.start()
        rude.on("slow settle")
        for epoch in (7, 8):
            both.epochs = {NAMESPACE: epoch}
            both.perform(SettleEpochs())
            expected = 1, {NAMESPACE: epoch}
            both.tiers[0].wait_until(
                lambda expected=expected: (
                    expected  # type: ignore[misc]
                    in [(each.tier, each.found) for each in settled(both)]
                )
            )
        assert {each.tier for each in settled(both)} == {1}
        rude.off("slow settle")
        both.tiers[0].wait_until(
            lambda: (
                [each.found for each in settled(both) if each.tier == 0]
                == [{NAMESPACE: 7}, {NAMESPACE: 8}]
            )
        )


def test_a_shared_tier_that_is_lost_is_settled_with_when_it_is_back(
    tiers: TieringFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiering, "SETTLE_EVERY", 0.05)
    tiers.start()
    tiers.epochs = {NAMESPACE: 7}
    tiers.wait_for(EpochsSettled)
    client = tiers.tiers[1].client
    client._process.kill("test")
    tiers.reports.clear()
    tiers.tiers[0].wait_until(lambda: client.is_started)
    tiers.tiers[0].wait_until(lambda: any(each.found for each in settled(tiers)))
