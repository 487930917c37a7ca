"""Tiering carries out the core's actions, and reports each outcome."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from kvferry.daemon.core.tier_actions import (
    BlocksFetched,
    DropStore,
    EpochsSettled,
    FetchReleased,
    FindKeys,
    KeysFound,
    SettleEpochs,
)
from kvferry.daemon.tiers import write_out
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.messages import TierBlocks
from kvferry.daemon.tiers.tiering import SETTLE_EVERY
from kvferry.testing.tier_subjects import NAMESPACE, key_of
from support.eventually import eventually

from .tiering_fixture import BLOCK, FakeTierClient, TieringFixture, tiers, write_job

pytestmark = pytest.mark.virtual_time


# Searches and fetches


async def test_the_fastest_tier_that_has_a_key_is_reported() -> None:
    """And the keys that each tier has and has not are counted."""
    fast, slow = FakeTierClient(1, 2), FakeTierClient(2, 3)
    async with tiers(fast, slow) as fixture:
        fixture.tiering.perform(FindKeys(7, NAMESPACE, tuple(map(key_of, (1, 2, 3, 4)))))
        found = await fixture.wait_for(KeysFound)
    assert (found.search, found.tier_of) == (7, (0, 0, 1, -1))
    assert (len(found.rates), found.queues) == (2, (0.0, 0.0))
    assert fast.counts == slow.counts == {"hits": 2, "misses": 2}


async def test_fetched_blocks_are_reported_and_then_released() -> None:
    tier = FakeTierClient(1, 2)
    tier.may_move.clear()
    async with tiers(tier) as fixture:
        fixture.fetch(1, 9, 2)
        await asyncio.sleep(3)
        (status,) = fixture.tiering.status({"custom": {"skipped": 5}})
        assert (status.name, status.state, status.skipped) == ("custom", "on", 5)
        assert status.queue_seconds == pytest.approx(3)
        tier.may_move.set()
        await fixture.wait_for(FetchReleased)
        (status,) = fixture.tiering.status({})
    assert fixture.reports == [BlocksFetched(3, (True, False, True)), FetchReleased(3)]
    (blocks,) = tier.moved
    offsets = b"".join((block * BLOCK).to_bytes(8, "little") for block in (32, 33, 34))
    assert blocks == TierBlocks(NAMESPACE, (key_of(1), key_of(9), key_of(2)), offsets, BLOCK)
    ((name, seconds),) = fixture.promoted
    assert (name, seconds) == ("custom", status.promotion_seconds)
    assert seconds == pytest.approx(3)
    assert status.queue_seconds == 0.0


@pytest.mark.parametrize("died", [False, True])
async def test_blocks_are_not_released_before_the_tier_has_answered_or_died(died: bool) -> None:
    """Until then it may write into those of a late fetch, and read those of a late put."""
    tier = FakeTierClient(1, write="write_through")
    tier.result, tier.holds_blocks = Result.LATE, True
    async with tiers(tier) as fixture:
        fixture.fetch(1)
        fixture.write(write_job(1, 0))
        await asyncio.sleep(100)
        assert (fixture.reports, fixture.writes.ended) == ([BlocksFetched(3, (False,))], {})
        tier.release(died=died)
        await fixture.wait_for(FetchReleased)
        await eventually(lambda: fixture.writes.ended == {1: [False]})
    assert fixture.promoted == []


@pytest.mark.parametrize(
    ("is_started", "breaker", "failure", "state"),
    [
        (True, "closed", "", "on"),
        (True, "half_open", "", "probing"),
        (True, "open", "", "off"),
        (False, "closed", "", "starting"),
        (False, "closed", "it has ended", "off"),
    ],
)
async def test_the_state_of_a_tier_is_shown(
    is_started: bool, breaker: str, failure: str, state: str
) -> None:
    tier = FakeTierClient()
    tier.is_started, tier.breaker.state, tier.failure = is_started, breaker, failure
    (status,) = TieringFixture([tier]).tiering.status({})
    assert (status.state, status.failure) == (state, failure)


async def test_a_store_is_dropped_in_all_tiers() -> None:
    both = FakeTierClient(), FakeTierClient()
    async with tiers(*both) as fixture:
        fixture.tiering.perform(DropStore(NAMESPACE))
    assert [tier.dropped for tier in both] == [[NAMESPACE], [NAMESPACE]]
    assert fixture.reports == []


# Writing out


async def test_each_tier_is_written_with_its_options() -> None:
    both = FakeTierClient(write="write_through"), FakeTierClient(write="clean_ahead")
    async with tiers(*both, FakeTierClient()) as fixture:
        fixture.writes.tier_of = {1: 0, 2: 1}
        fixture.write(write_job(1, 0, 1), write_job(2, 2))
        await eventually(lambda: len(fixture.writes.ended) == 2)
    assert fixture.writes.ended == {1: [True, True], 2: [True]}
    assert both[0].stored[NAMESPACE] == {key_of(0), key_of(1)}
    assert both[1].stored[NAMESPACE] == {key_of(2)}
    assert {asked[0]: asked[1:] for asked in fixture.writes.asked} == {
        0: (write_out.TAKEN_BLOCKS, 1.0),
        1: (write_out.TAKEN_BLOCKS, 0.25),
    }


async def test_without_anything_to_write_the_core_is_not_asked() -> None:
    async with tiers(FakeTierClient(write="write_through")) as fixture:
        fixture.write()
        await asyncio.sleep(60)
    assert len(fixture.writes.asked) == 1


async def test_writes_in_flight_are_bounded() -> None:
    tier = FakeTierClient(write="write_through")
    tier.may_move.clear()
    blocks = write_out.IN_FLIGHT_BYTES // BLOCK // 2
    async with tiers(tier) as fixture:
        fixture.write(*(write_job(number, *range(blocks)) for number in range(5)))
        begun = time.monotonic()
        await asyncio.sleep(60)
        assert len(fixture.writes.jobs) == 3
        (status,) = fixture.tiering.status({})
        assert status.queue_seconds == pytest.approx(time.monotonic() - begun, abs=0.1)
        tier.may_move.set()
        await eventually(lambda: len(fixture.writes.ended) == 5)


async def test_writes_keep_their_rate() -> None:
    tier = FakeTierClient(write="write_through", rate=str(10 * BLOCK))
    async with tiers(tier) as fixture:
        fixture.write(*(write_job(number, 2 * number, 2 * number + 1) for number in range(4)))
        await eventually(lambda: len(fixture.writes.ended) == 4)
    assert [at - tier.begun[0] for at in tier.begun] == pytest.approx([0, 0.2, 0.4, 0.6], abs=0.01)


async def test_a_tier_that_takes_nothing_is_left_alone_for_longer_and_longer() -> None:
    tier = FakeTierClient(write="write_through")
    tier.result = Result.FULL
    async with tiers(tier) as fixture:
        fixture.write(*(write_job(number, number) for number in range(4)))
        await eventually(lambda: len(fixture.writes.ended) == 3)
        tier.result = None
        await eventually(lambda: len(fixture.writes.ended) == 4)
    assert fixture.writes.ended == {0: [False], 1: [False], 2: [False], 3: [True]}
    assert [at - tier.begun[0] for at in tier.begun] == pytest.approx([0, 1, 3, 7], abs=0.1)


async def test_a_tier_that_is_off_is_not_written() -> None:
    tier = FakeTierClient(write="write_through")
    tier.is_on = False
    async with tiers(tier) as fixture:
        fixture.write(write_job(1, 0))
        await asyncio.sleep(60)
        assert fixture.writes.asked == []
        tier.is_on = True
        await eventually(lambda: fixture.writes.ended == {1: [True]})


# Epochs of shared tiers


def settled(fixture: TieringFixture) -> list[tuple[int, int, int]]:
    """The tier, and the epochs that it was asked for and has found."""
    return [
        (each.tier, each.asked[NAMESPACE], each.found[NAMESPACE])
        for each in fixture.all_of(EpochsSettled)
    ]


async def test_epochs_are_settled_with_shared_tiers_all_the_time() -> None:
    async with tiers(FakeTierClient(), FakeTierClient(shared=True)) as fixture:
        await asyncio.sleep(60)
        assert fixture.reports == []  # no namespace is in use
        for epoch, larger in ((7, 7), (9, 9), (8, 9)):
            fixture.epochs = {NAMESPACE: epoch}
            fixture.reports.clear()
            await asyncio.sleep(10 * SETTLE_EVERY)
            assert settled(fixture) == [(1, epoch, larger)] * 10
            times = [each.now for each in fixture.all_of(EpochsSettled)]
            assert np.diff(times) == pytest.approx([SETTLE_EVERY] * 9)


async def test_epochs_are_settled_at_once_when_that_is_wanted() -> None:
    async with tiers(FakeTierClient(shared=True)) as fixture:
        fixture.epochs = {NAMESPACE: 7}
        begun = time.monotonic()
        fixture.tiering.perform(SettleEpochs())
        assert (await fixture.wait_for(EpochsSettled)).now == pytest.approx(begun, abs=0.01)


async def test_a_shared_tier_that_is_busy_settles_again_when_it_is_not() -> None:
    """What it was asked for may be old by then. Another one settles meanwhile."""
    busy = FakeTierClient(shared=True)
    busy.may_settle.clear()
    async with tiers(busy, FakeTierClient(shared=True)) as fixture:
        for epoch in (7, 8):
            fixture.epochs = {NAMESPACE: epoch}
            await asyncio.sleep(10 * SETTLE_EVERY)
            assert settled(fixture)[-1] == (1, epoch, epoch)
        assert {tier for tier, *_ in settled(fixture)} == {1}
        busy.may_settle.set()
        await asyncio.sleep(2 * SETTLE_EVERY)
        assert [each for each in settled(fixture) if each[0] == 0][:2] == [(0, 7, 7), (0, 8, 8)]


async def test_a_shared_tier_that_is_lost_is_settled_with_when_it_is_back() -> None:
    tier = FakeTierClient(shared=True)
    tier.is_started = False
    async with tiers(tier) as fixture:
        fixture.epochs = {NAMESPACE: 7}
        await asyncio.sleep(60)
        assert fixture.reports == []
        tier.is_started = True
        await fixture.wait_for(EpochsSettled)


# The end


async def test_nothing_is_reported_or_written_once_it_is_stopped() -> None:
    async with tiers(FakeTierClient(1, write="write_through")) as fixture:
        fixture.tiering.stop()
        fixture.fetch(1)
        fixture.write(write_job(1, 0))
        await eventually(lambda: fixture.promoted)
        await asyncio.sleep(60)
    assert (fixture.reports, fixture.writes.asked) == ([], [])


async def test_an_error_in_a_flow_ends_all_of_them() -> None:
    """Which ends the daemon (flows.py). Later actions are dropped."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async def fetch_twice(fixture: TieringFixture) -> None:
        fixture.tiering._promoted = fail
        async with fixture.running():
            for _ in range(2):
                fixture.fetch(1)
                await asyncio.sleep(1)

    fixture = TieringFixture([FakeTierClient(1)])
    with pytest.raises(ExceptionGroup) as caught:
        await fetch_twice(fixture)
    assert caught.group_contains(ZeroDivisionError)
    assert fixture.reports == []
