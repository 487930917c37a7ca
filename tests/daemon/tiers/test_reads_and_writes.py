"""Reads come before writes, which may take long then."""

from __future__ import annotations

import pytest

from kvferry.daemon.tiers import tier_client
from kvferry.daemon.tiers.base import Result
from kvferry.testing.tier_subjects import NAMESPACE, key_of

from .rude_fixtures import Rude


def test_fetches_overtake_puts(rude: Rude) -> None:
    """With both threads busy with puts, and more puts queued, fetches are next."""
    tier = rude.tier
    tier.put([0])
    rude.on("slow")
    rude.on("slow reads")
    written = [tier.blocks(NAMESPACE, [key_of(number)], [number]) for number in range(1, 6)]
    puts = [tier.begin_put(blocks) for blocks in written]
    tier.wait_until(lambda: len(list(rude.folder.glob("slow-*"))) == 2)
    read = tier.blocks(NAMESPACE, [key_of(0)], [32])
    fetches = [tier.begin_fetch(read) for _ in range(2)]
    assert tier.contains([0]) == [True]  # it has read them all
    rude.off("slow")
    tier.wait_until(lambda: len([put for put in puts if put.results]) == 2)
    assert not any(fetch.results for fetch in fetches)
    rude.off("slow reads")
    tier.wait_until(lambda: all(call.results for call in (*puts, *fetches)))


def test_a_put_that_waits_for_reads_is_not_late(
    rude: Rude, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_client, "PUT_SECONDS", 1.0)
    tier = rude.tier
    tier.put([0])
    rude.on("paced reads")
    read = tier.blocks(NAMESPACE, [key_of(0)], [32])
    written = tier.blocks(NAMESPACE, [key_of(1)], [1])
    # 3 seconds for two threads
    reads = [tier.begin_fetch(read) for _ in range(120)]
    put = tier.begin_put(written)
    tier.wait_until(lambda: put.results)
    assert put.results == [Result.OK]
    assert len([fetch for fetch in reads if fetch.results]) > 110
    assert tier.client.counts["deaths"] == 0
