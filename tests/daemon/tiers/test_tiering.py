"""Tiering carries out the core's actions through real tier processes, and reports each outcome."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.tier_actions import (
    MAX_TIER_KEYS,
    BlocksFetched,
    DropStore,
    FetchReleased,
    StoresFound,
    WriteJob,
)
from kvferry.daemon.core.writes import Writes
from kvferry.daemon.tier_config import CustomTierConfig
from kvferry.daemon.tiers import tier_client, write_out
from kvferry.daemon.tiers.tier_process import PoolFiles
from kvferry.daemon.tiers.tiering import start_tiers
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    POOL_BYTES,
    PoolMemory,
    ProcessSubject,
    content_of,
    open_subject,
)
from support.tiering_fixture import BLOCK, TieringFixture, pause

from .rude_fixtures import Rude
from .setups import MEMORY, disk_setup, memory_setup


@pytest.fixture
def memory(pool: PoolMemory) -> Iterator[TieringFixture]:
    """Over one memory tier."""
    with open_subject(memory_setup(4 << 20), pool) as tier:
        assert isinstance(tier, ProcessSubject)
        with closing(TieringFixture(pool, [tier])) as fixture:
            yield fixture


@pytest.fixture
def two(pool: PoolMemory) -> Iterator[TieringFixture]:
    """Over two memory tiers, the fast one first."""
    with ExitStack() as stack:
        fast = stack.enter_context(open_subject(memory_setup(4 << 20), pool))
        assert isinstance(fast, ProcessSubject)
        config = CustomTierConfig(MEMORY, {"size": 4 << 20})
        slow = stack.enter_context(closing(ProcessSubject(pool, config, runner=fast.runner)))
        slow.wait_until(lambda: slow.client.is_on)
        yield stack.enter_context(closing(TieringFixture(pool, [fast, slow])))


@pytest.fixture
def disk(pool: PoolMemory, tmp_path: Path) -> Iterator[TieringFixture]:
    """Over one disk tier."""
    with open_subject(disk_setup(tmp_path / "tier", 16 << 20), pool) as tier:
        assert isinstance(tier, ProcessSubject)
        with closing(TieringFixture(pool, [tier])) as fixture:
            yield fixture


# Searches and fetches


def test_the_fastest_tier_that_has_a_key_is_reported(two: TieringFixture) -> None:
    two.start()
    two.tiers[0].put([1, 2])
    two.tiers[1].put([2, 3])
    found = two.find(1, 2, 3, 4)
    assert (found.search, found.tier_of) == (7, (0, 0, 1, -1))
    assert (len(found.rates), found.queues) == (2, (0.0, 0.0))


def test_the_keys_that_a_tier_has_and_has_not_are_counted(memory: TieringFixture) -> None:
    memory.start()
    memory.tiers[0].put([5])
    found = memory.find(*range(MAX_TIER_KEYS))
    assert [n for n, tier in enumerate(found.tier_of) if tier == 0] == [5]
    (status,) = memory.tiering.status({})
    assert (status.hits, status.misses) == (1, MAX_TIER_KEYS - 1)


def test_fetched_blocks_are_reported_and_then_released(memory: TieringFixture) -> None:
    memory.start()
    memory.tiers[0].put([1, 2])
    assert memory.fetch(0, 1, 9, 2) == BlocksFetched(3, (True, False, True))
    memory.wait_for(FetchReleased)
    assert [type(each) for each in memory.reports] == [BlocksFetched, FetchReleased]
    assert np.array_equal(memory.pool.block(32), content_of(1, BLOCK))
    assert np.array_equal(memory.pool.block(34), content_of(2, BLOCK))
    ((name, seconds),) = memory.promoted
    assert name == "custom"
    assert seconds > 0
    (status,) = memory.tiering.status({"custom": {"skipped": 5}})
    assert (status.name, status.state, status.promoted, status.skipped) == ("custom", "on", 2, 5)
    assert status.promotion_seconds == seconds
    assert (status.read_bytes, status.queue_seconds) == (2 * BLOCK, 0.0)


@pytest.fixture
def slow(rude: Rude) -> Iterator[TieringFixture]:
    """Over one tier with faults."""
    with closing(TieringFixture(rude.tier.pool, [rude.tier])) as fixture:
        yield fixture


def test_blocks_of_a_late_fetch_are_not_released(slow: TieringFixture, rude: Rude) -> None:
    """Until the tier can no longer write into them: here, when it has answered."""
    slow.start()
    rude.tier.put([1])
    rude.on("slow reads")
    assert slow.fetch(0, 1, seconds=0.1) == BlocksFetched(3, (False,))
    pause(slow.tiers[0])
    assert [type(each) for each in slow.reports] == [BlocksFetched]
    rude.off("slow reads")
    slow.wait_for(FetchReleased)


def test_blocks_of_a_late_put_are_not_released(
    slow: TieringFixture, rude: Rude, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the tier no longer reads them: here, when it is dead."""
    monkeypatch.setattr(tier_client, "PUT_SECONDS", 0.1)
    slow.start("write_through")
    pid = rude.tier.client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    slow.write(slow.write_job(1, 0))
    rude.tier.wait_until(lambda: not rude.tier.client.is_prompt)  # the put is late
    assert (slow.core.ended, rude.tier.client.pid) == ({}, pid)
    rude.tier.wait_until(lambda: slow.core.ended)
    assert slow.core.ended == {1: [False]}
    assert rude.tier.client.pid != pid


def test_a_tier_that_is_dead_finds_nothing_and_fetches_nothing(memory: TieringFixture) -> None:
    memory.start()
    memory.tiers[0].put([1])
    client = memory.tiers[0].client
    client._process.kill("test")
    assert memory.find(1).tier_of == (-1,)
    assert memory.fetch(0, 1).ok == (False,)
    memory.wait_for(FetchReleased)
    assert memory.promoted == []
    assert memory.tiering.status({})[0].state == "off"


# Stores


def test_a_store_is_dropped_in_all_tiers(two: TieringFixture) -> None:
    two.start()
    for tier in two.tiers:
        tier.put([1])
        tier.put([2], "other")
    two.perform(DropStore(NAMESPACE))
    for tier in two.tiers:
        tier.wait_until(lambda tier=tier: tier.client.is_prompt)  # type: ignore[misc]
        assert tier.contains([1]) == [False]
        assert tier.contains([2], "other") == [True]
    assert two.reports == []


def test_a_drop_is_done_also_if_the_daemon_stops_next(disk: TieringFixture) -> None:
    disk.start()
    disk.tiers[0].put([1])
    disk.perform(DropStore(NAMESPACE))
    disk.close()
    disk.tiers[0].close()
    with closing(ProcessSubject(disk.pool, disk.tiers[0].client.config)) as tier:
        tier.wait_until(lambda: tier.client.is_on)
        assert tier.stores() == []


def test_the_stores_of_a_tier_are_reported_when_it_starts(
    pool: PoolMemory, disk: TieringFixture
) -> None:
    disk.start()
    disk.tiers[0].put([1])
    config, reports = disk.tiers[0].client.config, list[Report]()
    disk.close()
    disk.tiers[0].close()
    files = PoolFiles(pool.files.descriptors, POOL_BYTES // 2, POOL_BYTES)

    async def start() -> float:
        before = time.monotonic()
        (tier,) = start_tiers([config], files, cast(Writes, disk.core), reports.extend)
        await tier.client._process.until_ready()
        assert tier.client._stores_in_use() == disk.core.stores_in_use()
        await tier.client._process.close()
        return before

    begun = asyncio.run(start())
    (found,) = reports
    assert isinstance(found, StoresFound)
    assert found.stores == (NAMESPACE,)
    assert begun < found.now < time.monotonic()


# Writing out


def test_blocks_are_written_and_unpinned(disk: TieringFixture) -> None:
    disk.start("clean_ahead")
    disk.write(disk.write_job(1, 0, 1), disk.write_job(2, 2))
    disk.tiers[0].wait_until(lambda: len(disk.core.ended) == 2)
    assert disk.core.ended == {1: [True, True], 2: [True]}
    assert disk.find(0, 1, 2, 3).tier_of == (0, 0, 0, -1)
    assert disk.fetch(0, 1).ok == (True,)
    assert disk.core.asked[0] == (0, write_out.TAKEN_BLOCKS, 0.25)
    (status,) = disk.tiering.status({})
    assert (status.written, status.written_bytes) == (3, 3 * BLOCK)


def test_each_tier_is_written_with_its_options(two: TieringFixture) -> None:
    two.start("write_through", "clean_ahead")
    two.core.tier_of = {1: 0, 2: 1}
    two.write(two.write_job(1, 0), two.write_job(2, 1))
    two.tiers[0].wait_until(lambda: len(two.core.ended) == 2)
    assert sorted(two.find(0, 1).tier_of) == [0, 1]
    assert {asked[0]: asked[1:] for asked in two.core.asked} == {
        0: (write_out.TAKEN_BLOCKS, 1.0),
        1: (write_out.TAKEN_BLOCKS, 0.25),
    }
    assert [tier.written for tier in two.tiering.status({})] == [1, 1]


def test_without_anything_to_write_the_core_is_not_asked(disk: TieringFixture) -> None:
    disk.start("write_through")
    disk.write()
    disk.tiers[0].wait_until(lambda: disk.core.asked)
    waited = time.monotonic() + 5 * write_out.DELAY
    disk.tiers[0].wait_until(lambda: time.monotonic() > waited)
    assert len(disk.core.asked) == 1


def test_a_block_that_the_tier_has_is_not_counted_as_written(disk: TieringFixture) -> None:
    """As after a restart, when the pool was restored."""
    disk.start("write_through")
    disk.write(disk.write_job(1, 0, 1))
    disk.tiers[0].wait_until(lambda: 1 in disk.core.ended)
    disk.write(disk.write_job(2, 1, 2))
    disk.tiers[0].wait_until(lambda: 2 in disk.core.ended)
    assert disk.core.ended == {1: [True, True], 2: [True, True]}
    (status,) = disk.tiering.status({})
    assert (status.written, status.written_bytes) == (3, 3 * BLOCK)


def test_writes_in_flight_are_bounded(
    disk: TieringFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_out, "IN_FLIGHT_BYTES", 2 * BLOCK)
    disk.start("write_through")
    pid = disk.tiers[0].client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    disk.write(*(disk.write_job(number, number) for number in range(5)))
    disk.tiers[0].wait_until(lambda: len(disk.core.jobs) == 3)
    pause(disk.tiers[0])
    assert len(disk.core.jobs) == 3
    os.kill(pid, signal.SIGCONT)
    disk.tiers[0].wait_until(lambda: len(disk.core.ended) == 5)


def test_writes_keep_their_rate(disk: TieringFixture) -> None:
    disk.start("write_through", rate=10 * BLOCK)
    begun = time.monotonic()
    disk.write(*(disk.write_job(number, 2 * number, 2 * number + 1) for number in range(4)))
    disk.tiers[0].wait_until(lambda: len(disk.core.ended) == 4)
    assert time.monotonic() - begun > 0.55  # the first job takes nothing, the others 0.2 s each


def test_a_tier_that_takes_nothing_is_left_alone_for_a_while(memory: TieringFixture) -> None:
    job = memory.write_job(1, 0)
    large = WriteJob(1, NAMESPACE, job.keys, job.checksums, job.offsets, 5 << 20)
    memory.start("write_through")
    begun = time.monotonic()
    memory.write(large)
    memory.tiers[0].wait_until(lambda: memory.core.ended)
    assert memory.core.ended == {1: [False]}
    memory.write(memory.write_job(2, 0))
    memory.tiers[0].wait_until(lambda: len(memory.core.ended) == 2)
    assert time.monotonic() - begun > 0.9


# The end


def test_nothing_is_reported_or_written_once_it_is_stopped(memory: TieringFixture) -> None:
    memory.start("write_through")
    memory.tiers[0].put([1])
    memory.tiering.stop()
    memory.begin_fetch(0, 1)
    memory.write(memory.write_job(1, 0))
    memory.tiers[0].wait_until(lambda: memory.promoted)
    pause(memory.tiers[0])
    assert (memory.reports, memory.core.asked) == ([], [])


def test_an_error_in_a_flow_ends_all_of_them(memory: TieringFixture) -> None:
    """Which ends the daemon (flows.py). Later actions are dropped."""
    memory.start("write_through")
    memory.tiers[0].put([1])

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    memory.tiering._promoted = fail
    memory.begin_fetch(0, 1)
    with pytest.raises(ExceptionGroup) as caught:
        memory.tiers[0].wait_until(lambda: False)
    assert caught.group_contains(ZeroDivisionError)
    memory.begin_fetch(0, 1)
    assert memory.reports == []
