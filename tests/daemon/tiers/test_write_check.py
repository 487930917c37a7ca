"""Blocks that a tier has lost are written again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.tier_actions import WrittenBlocks
from kvferry.daemon.tiers.base import Result, TierUsage
from kvferry.daemon.tiers.write_check import WriteCheck

OK, MISS, LATE, ERROR = Result.OK, Result.MISS, Result.LATE, Result.ERROR


class FakeTier:
    """As WriteCheck sees a TierClient, and the core."""

    def __init__(self) -> None:
        self.is_prompt = self.is_started = True
        self.usage = TierUsage(capacity_bytes=1000)
        self.counts = Counter[str]()
        self.results: list[Result] = [OK, OK]
        self.rounds: list[list[WrittenBlocks]] = []
        self.asked: list[Sequence[bytes]] = []
        self.reopened: list[Sequence[bool]] = []
        self.woken = 0

    async def contains(self, _: str, keys: Sequence[bytes], __: float) -> list[Result]:
        self.asked.append(keys)
        return self.results[: len(keys)]

    def next_written(self, tier: int, _: int) -> WrittenBlocks | None:
        assert tier == 3
        if self.rounds and self.rounds[0]:
            return self.rounds[0].pop(0)
        self.rounds = self.rounds[1:]
        return None

    def reopen_writes(self, _: WrittenBlocks, missing: Sequence[bool]) -> None:
        self.reopened.append(missing)

    def wake_up(self) -> None:
        self.woken += 1


class CheckFixture:
    """A WriteCheck whose pauses end when the test says so: `asyncio.sleep(0)` needs no loop."""

    def __init__(self) -> None:
        self.tier = FakeTier()
        tier: Any = self.tier
        self.run = WriteCheck(tier, tier, 3, tier.wake_up, every=0.0).run()
        self.run.send(None)

    def ask(self, times: int = 1) -> None:
        """End so many pauses."""
        for _ in range(times):
            self.run.send(None)

    def add_round(self, *keys: bytes) -> None:
        """One question for each of these pairs of letters."""
        blocks = np.arange(2)
        self.tier.rounds.append(
            [WrittenBlocks(3, "store", (pair[:1], pair[1:]), blocks) for pair in keys]
        )


@pytest.fixture
def fixture() -> Iterator[CheckFixture]:
    fixture = CheckFixture()
    yield fixture
    fixture.run.close()


@pytest.mark.parametrize(
    ("results", "reopened"),
    [([OK, MISS], [[False, True]]), ([OK, OK], []), ([LATE, LATE], []), ([ERROR, ERROR], [])],
)
def test_what_is_missing_is_written_again(
    fixture: CheckFixture, results: list[Result], reopened: list[list[bool]]
) -> None:
    fixture.add_round(b"ab")
    fixture.tier.results = results
    fixture.tier.usage = TierUsage(1000, evictions=1)
    fixture.ask()
    assert fixture.tier.asked == [(b"a", b"b")]
    assert (fixture.tier.reopened, fixture.tier.woken) == (reopened, len(reopened))


def test_a_tier_is_asked_for_all_keys_once_after_it_has_lost_some(fixture: CheckFixture) -> None:
    fixture.add_round(b"ab", b"cd")
    fixture.add_round(b"ef")
    fixture.ask(3)
    assert fixture.tier.asked == []
    fixture.tier.counts["deaths"] = 1
    fixture.ask()
    fixture.tier.counts["deaths"] = 2  # counts for the next round
    fixture.ask(2)
    assert fixture.tier.asked == [(b"a", b"b"), (b"c", b"d")]
    fixture.ask(9)
    assert fixture.tier.asked[2:] == [(b"e", b"f")]


def test_a_tier_that_does_not_count_what_it_loses_is_asked_again_and_again(
    fixture: CheckFixture,
) -> None:
    fixture.tier.usage = TierUsage()
    for _ in range(3):
        fixture.add_round(b"ab")
    fixture.ask(6)
    assert len(fixture.tier.asked) == 3


def test_a_tier_that_is_off_or_dies_is_not_believed(fixture: CheckFixture) -> None:
    fixture.add_round(b"ab")
    fixture.tier.usage = TierUsage()
    fixture.tier.is_prompt = False
    fixture.ask()
    assert fixture.tier.asked == []
    fixture.tier.is_prompt, fixture.tier.is_started = True, False
    fixture.tier.results = [MISS, MISS]
    fixture.ask()
    assert fixture.tier.reopened == []
