"""Reads come before writes, which may take long then."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.daemon.tiers import tier_client
from kvferry.daemon.tiers.base import Result
from kvferry.testing.tier_subjects import NAMESPACE, key_of

from .rude_fixtures import Rude


def test_fetches_overtake_puts(rude: Rude) -> None:
    """With both threads busy with puts, and more puts queued, fetches are next."""
    tier, order = rude.tier, list[str]()
    tier.put([0])
    rude.on("slow")
    rude.on("slow reads")
    for number in range(1, 6):
        blocks = tier.blocks(NAMESPACE, [key_of(number)], [number])
        checksums = np.zeros(1, np.uint64)
        tier.client.put(blocks, checksums, lambda _: order.append("put"))
    tier.wait_until(lambda: len(list(rude.folder.glob("slow-*"))) == 2)
    for _ in range(2):
        blocks = tier.blocks(NAMESPACE, [key_of(0)], [32])
        tier.client.fetch(blocks, 30.0, lambda _: order.append("fetch"))
    answered = list[bool]()
    tier.client.contains(NAMESPACE, [key_of(0)], 30.0, lambda _: answered.append(True))
    tier.wait_until(lambda: answered)  # it has read them all
    rude.off("slow")
    tier.wait_until(lambda: len(order) == 2)
    rude.off("slow reads")
    tier.wait_until(lambda: len(order) == 7)
    assert order.index("fetch") == 2


def test_a_put_that_waits_for_reads_is_not_late(
    rude: Rude, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_client, "PUT_SECONDS", 1.0)
    tier, reads, written = rude.tier, list[Result](), list[Result]()
    tier.put([0])
    rude.on("paced reads")
    for _ in range(120):  # 3 seconds for two threads
        blocks = tier.blocks(NAMESPACE, [key_of(0)], [32])
        tier.client.fetch(blocks, 30.0, reads.extend)
    blocks = tier.blocks(NAMESPACE, [key_of(1)], [1])
    tier.client.put(blocks, np.zeros(1, np.uint64), written.extend)
    tier.wait_until(lambda: written)
    assert written == [Result.OK]
    assert len(reads) > 110
    assert tier.client.counters.deaths == 0
