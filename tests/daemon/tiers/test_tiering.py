"""Tiering carries out the core's actions through real tier processes, and reports each outcome."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.tier_actions import (
    MAX_TIER_KEYS,
    BlocksFetched,
    DropStore,
    FetchReleased,
    StoreDropped,
    StoreDroppedElsewhere,
    WriteJob,
)
from kvferry.daemon.core.writes import Writes
from kvferry.daemon.tier_config import CustomTierConfig
from kvferry.daemon.tiers import drop_queue, tier_client, write_out
from kvferry.daemon.tiers.drop_markers import add_marker, marked_stores
from kvferry.daemon.tiers.messages import UsageRequest
from kvferry.daemon.tiers.tier_process import PoolFiles
from kvferry.daemon.tiers.tiering import DropTimes, start_tiers
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    POOL_BYTES,
    PoolMemory,
    ProcessSubject,
    content_of,
    open_subject,
)
from support.tiering_fixture import BLOCK, FakeWrites, TieringFixture
from support.time_limits import TIMEOUT

from .rude_fixtures import Rude
from .setups import MEMORY, disk_setup, memory_setup


@pytest.fixture
def memory(pool: PoolMemory, tmp_path: Path) -> Iterator[TieringFixture]:
    """Over one memory tier."""
    with open_subject(memory_setup(4 << 20), pool) as tier:
        assert isinstance(tier, ProcessSubject)
        with closing(TieringFixture(pool, [tier], tmp_path)) as fixture:
            yield fixture


@pytest.fixture
def two(pool: PoolMemory, tmp_path: Path) -> Iterator[TieringFixture]:
    """Over two memory tiers, the fast one first."""
    with ExitStack() as stack:
        fast = stack.enter_context(open_subject(memory_setup(4 << 20), pool))
        assert isinstance(fast, ProcessSubject)
        config = CustomTierConfig(MEMORY, {"size": 4 << 20})
        slow = stack.enter_context(closing(ProcessSubject(pool, config, runner=fast.runner)))
        slow.wait_until(lambda: slow.client.is_on)
        yield stack.enter_context(closing(TieringFixture(pool, [fast, slow], tmp_path)))


@pytest.fixture
def disk(pool: PoolMemory, tmp_path: Path) -> Iterator[TieringFixture]:
    """Over one disk tier."""
    with open_subject(disk_setup(tmp_path / "tier", 16 << 20), pool) as tier:
        assert isinstance(tier, ProcessSubject)
        with closing(TieringFixture(pool, [tier], tmp_path)) as fixture:
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
def slow(rude: Rude, tmp_path: Path) -> Iterator[TieringFixture]:
    """Over one tier with faults."""
    with closing(TieringFixture(rude.tier.pool, [rude.tier], tmp_path / "markers")) as fixture:
        yield fixture


def test_blocks_of_a_late_fetch_are_not_released(slow: TieringFixture, rude: Rude) -> None:
    """Until the tier can no longer write into them: here, when it has answered."""
    slow.start()
    rude.tier.put([1])
    rude.on("slow reads")
    assert slow.fetch(0, 1, seconds=0.1) == BlocksFetched(3, (False,))
    pause(slow)
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


def pause(fixture: TieringFixture) -> None:
    """Let the event loop run for a moment, in which nothing should happen."""
    until = time.monotonic() + 0.1
    fixture.tiers[0].wait_until(lambda: time.monotonic() > until)


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


# Drops


def test_a_dropped_store_is_reported_and_gone(disk: TieringFixture) -> None:
    disk.start()
    disk.tiers[0].put([1])
    disk.perform(DropStore(4, NAMESPACE))
    assert disk.wait_for(StoreDropped) == StoreDropped(4)
    assert disk.find(1).tier_of == (-1,)
    markers = disk.attached[0].markers
    assert markers.is_dir()
    disk.tiers[0].wait_until(lambda: not list(marked_stores(markers)))


async def test_a_drop_in_a_shared_tier_is_reported(pool: PoolMemory, tmp_path: Path) -> None:
    reports, core, config = list[Report](), FakeWrites(), CustomTierConfig(MEMORY, {"size": 4096})
    files = PoolFiles(pool.files.descriptors, POOL_BYTES // 2, POOL_BYTES)
    tiers = start_tiers([config, config], files, tmp_path, cast(Writes, core), reports.extend)
    requests = [tier.client.usage_request() for tier in tiers]
    assert requests == [UsageRequest(core.namespaces())] * 2
    tiers[1].client.dropped_elsewhere(NAMESPACE)
    assert reports == [StoreDroppedElsewhere(1, NAMESPACE)]
    for tier in tiers:
        await tier.client._process.close()


def test_a_drop_by_another_daemon_is_done_in_the_other_tiers(two: TieringFixture) -> None:
    two.start()
    for tier in two.tiers:
        tier.put([1])
    two.perform(DropStore(4, NAMESPACE, dropped_by=1))
    assert two.wait_for(StoreDropped) == StoreDropped(4)
    assert two.find(1).tier_of == (1,)


def test_a_drop_is_reported_also_if_the_tier_does_not_answer(disk: TieringFixture) -> None:
    """The tier drops the keys before it finds anything again."""
    disk.start(times=DropTimes(report=0.2))
    disk.tiers[0].put([1])
    client = disk.tiers[0].client
    assert client.pid is not None
    stopped = client.pid
    os.kill(stopped, signal.SIGSTOP)
    disk.perform(DropStore(4, NAMESPACE))
    disk.wait_for(StoreDropped)
    os.kill(stopped, signal.SIGKILL)
    disk.tiers[0].wait_until(lambda: client.pid not in (None, stopped) and client.is_on)
    assert disk.find(1).tier_of == (-1,)


def delay_markers(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no marker be written until the event is set."""
    marked = threading.Event()

    def add_slowly(*arguments: Any) -> Path:
        marked.wait(TIMEOUT)
        return add_marker(*arguments)

    monkeypatch.setattr(drop_queue, "add_marker", add_slowly)
    return marked


def test_a_drop_does_not_wait_for_a_marker_that_takes_long(
    disk: TieringFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is slow; no key may be found once the drop is reported."""
    marked = delay_markers(monkeypatch)
    disk.start(times=DropTimes(report=0.5, marker=0.05))
    disk.tiers[0].put([1])
    disk.perform(DropStore(4, NAMESPACE))
    disk.wait_for(StoreDropped)
    assert disk.find(1).tier_of == (-1,)
    marked.set()
    markers = disk.attached[0].markers
    disk.tiers[0].wait_until(lambda: markers.is_dir() and not list(marked_stores(markers)))


def test_drops_of_one_namespace_are_done_together(disk: TieringFixture) -> None:
    """Many resets while the tier is busy: one marker, and one more drop."""
    disk.start()
    disk.tiers[0].put([1])
    client, markers = disk.tiers[0].client, disk.attached[0].markers
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    try:
        for number in range(100):
            disk.perform(DropStore(number, NAMESPACE))
        disk.tiers[0].wait_until(lambda: client.in_flight > 0)
        assert len(list(marked_stores(markers))) == 1
        assert client.in_flight <= 2  # a drop, and a request for the usage
    finally:
        os.kill(client.pid, signal.SIGCONT)

    def dropped() -> set[int]:
        return {each.drop for each in disk.reports if isinstance(each, StoreDropped)}

    disk.tiers[0].wait_until(lambda: dropped() == set(range(100)))
    assert disk.find(1).tier_of == (-1,)
    disk.tiers[0].wait_until(lambda: not list(marked_stores(markers)))


def test_a_drop_is_sent_before_the_tier_ends(disk: TieringFixture) -> None:
    """Also one that is requested just before the daemon stops."""
    disk.start()
    disk.tiers[0].put([1])
    disk.perform(DropStore(4, NAMESPACE))
    disk.close()
    disk.tiers[0].close()
    with closing(ProcessSubject(disk.pool, disk.tiers[0].client.config)) as tier:
        tier.wait_until(lambda: tier.client.is_on)
        assert tier.contains([1]) == [False]


def test_a_marked_drop_is_done_at_the_next_start(memory: TieringFixture) -> None:
    """Daemon and tier may end before the drop itself."""
    memory.tiers[0].put([1, 2])
    memory.tiers[0].put([3], "other")
    markers = memory.attached[0].markers
    add_marker(markers, NAMESPACE, 12)
    assert [store for _, store in marked_stores(markers)] == [NAMESPACE]
    memory.start()
    assert memory.find(1, 2).tier_of == (-1, -1)
    memory.tiers[0].wait_until(lambda: not list(marked_stores(markers)))
    assert memory.find(1, 2).tier_of == (-1, -1)
    assert memory.tiers[0].contains([3], "other") == [True]


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
    pause(disk)
    assert len(disk.core.jobs) == 3
    os.kill(pid, signal.SIGCONT)
    disk.tiers[0].wait_until(lambda: len(disk.core.ended) == 5)


def test_writes_keep_their_rate(disk: TieringFixture) -> None:
    disk.start("write_through", rate=10 * BLOCK)
    begun = time.monotonic()
    disk.write(*(disk.write_job(number, 2 * number, 2 * number + 1) for number in range(4)))
    disk.tiers[0].wait_until(lambda: len(disk.core.ended) == 4)
    assert time.monotonic() - begun > 0.55  # the first job takes nothing, the others 0.2 s each


def test_a_store_that_is_being_dropped_is_not_written(
    disk: TieringFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the drop would delete blocks that were stored after the reset."""
    marked = delay_markers(monkeypatch)
    disk.start("write_through")
    disk.tiers[0].put([9])
    disk.perform(DropStore(4, NAMESPACE))
    disk.write(disk.write_job(1, 0))
    disk.tiers[0].wait_until(lambda: disk.core.ended)
    assert disk.core.ended == {1: [False]}
    marked.set()
    disk.wait_for(StoreDropped)
    disk.core.jobs.append(disk.write_job(2, 0))
    disk.tiers[0].wait_until(lambda: [True] in disk.core.ended.values())
    assert disk.find(0, 9).tier_of == (0, -1)


def test_a_tier_that_takes_nothing_is_left_alone_for_a_while(memory: TieringFixture) -> None:
    job = memory.write_job(1, 0)
    large = WriteJob(1, NAMESPACE, job.keys, job.checksums, job.offsets, 5 << 20)
    memory.start("write_through")
    memory.write(large)
    memory.tiers[0].wait_until(lambda: memory.core.ended)
    ended = time.monotonic()
    assert memory.core.ended == {1: [False]}
    memory.write(memory.write_job(2, 0))
    memory.tiers[0].wait_until(lambda: len(memory.core.ended) == 2)
    assert time.monotonic() - ended > 0.9


# The end


def test_nothing_is_reported_or_written_once_it_is_stopped(memory: TieringFixture) -> None:
    memory.start("write_through")
    memory.tiers[0].put([1])
    memory.tiering.stop()
    memory.begin_fetch(0, 1)
    memory.write(memory.write_job(1, 0))
    memory.tiers[0].wait_until(lambda: memory.promoted)
    pause(memory)
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
