"""Blocks that a tier has lost are written again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from kvferry.daemon.core.tier_actions import WrittenBlocks
from kvferry.daemon.tiers.base import Result, TierUsage
from kvferry.daemon.tiers.write_check import CHECK_EVERY, WriteCheck
from kvferry.testing.tier_subjects import NAMESPACE, key_of
from support.background import in_background

from .tiering_fixture import FakeTierClient, FakeWrites

pytestmark = pytest.mark.virtual_time


class CheckFixture:
    """A WriteCheck of a tier that has keys 1 to 5, and the core."""

    def __init__(self) -> None:
        self.tier, self.writes, self.woken = FakeTierClient(*range(1, 6)), FakeWrites(), 0
        self.tier.usage = TierUsage(capacity_bytes=1000)

    async def run(self) -> None:
        core, client = cast(Any, self.writes), cast(Any, self.tier)
        await WriteCheck(core, client, 3, self.wake_up).run()

    def wake_up(self) -> None:
        self.woken += 1

    def add_round(self, *pairs: tuple[int, int]) -> None:
        """One question for each pair of keys."""
        self.writes.written.append(
            [WrittenBlocks(3, NAMESPACE, tuple(map(key_of, pair)), np.arange(2)) for pair in pairs]
        )

    def sought(self) -> list[tuple[bytes, ...]]:
        return [tuple(keys) for keys in self.tier.sought]


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(map(key_of, numbers))


@pytest.mark.parametrize(
    ("pair", "found", "reopened"),
    [
        ((1, 9), None, [[False, True]]),
        ((1, 2), None, []),
        ((8, 9), Result.LATE, []),
        ((8, 9), Result.ERROR, []),
    ],
)
async def test_what_is_missing_is_written_again(
    pair: tuple[int, int], found: Result | None, reopened: list[list[bool]]
) -> None:
    fixture = CheckFixture()
    fixture.add_round(pair)
    fixture.tier.found = found
    async with in_background(fixture.run()):
        await asyncio.sleep(0)
        fixture.tier.usage = TierUsage(1000, evictions=1)
        await asyncio.sleep(60)
    assert fixture.sought() == [keys(*pair)]
    assert (fixture.writes.reopened, fixture.woken) == (reopened, len(reopened))


async def test_a_tier_is_asked_for_all_keys_once_after_it_has_lost_some() -> None:
    fixture = CheckFixture()
    fixture.add_round((1, 2), (3, 4))
    fixture.add_round((5, 1))
    async with in_background(fixture.run()):
        await asyncio.sleep(60.5 * CHECK_EVERY)
        assert fixture.sought() == []
        fixture.tier.counts["deaths"] = 1
        await asyncio.sleep(CHECK_EVERY)
        assert fixture.sought() == [keys(1, 2)]
        fixture.tier.counts["deaths"] = 2  # counts for the next round
        await asyncio.sleep(CHECK_EVERY)
        assert fixture.sought() == [keys(1, 2), keys(3, 4)]
        await asyncio.sleep(60)
    assert fixture.sought()[2:] == [keys(5, 1)]


async def test_a_tier_that_does_not_count_what_it_loses_is_asked_again_and_again() -> None:
    fixture = CheckFixture()
    fixture.tier.usage = TierUsage()
    for _ in range(3):
        fixture.add_round((1, 2))
    async with in_background(fixture.run()):
        await asyncio.sleep(60)
    assert fixture.sought() == [keys(1, 2)] * 3


async def test_a_tier_that_is_off_or_dies_is_not_believed() -> None:
    fixture = CheckFixture()
    fixture.tier.usage = TierUsage()
    fixture.add_round((8, 9))
    fixture.tier.is_prompt = False
    async with in_background(fixture.run()):
        await asyncio.sleep(60)
        assert fixture.sought() == []
        fixture.tier.is_prompt, fixture.tier.is_started = True, False
        await asyncio.sleep(60)
    assert (fixture.sought(), fixture.writes.reopened) == ([keys(8, 9)], [])
