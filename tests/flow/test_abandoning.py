"""An engine abandons a stopped daemon (SIGSTOP) and reuses the GPU blocks of its jobs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from kvferry.client import (
    AsyncOffloadClient,
    Code,
    Gone,
    LocalDaemon,
    OffloadClient,
    Outcome,
    Timeline,
    TransferResult,
    shared_empty,
)
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.block_specs import load, store
from support.time_limits import PROMPTLY, TIMEOUT

BLOCKS, PAGE = 16, 4096
PATTERN = 77


@pytest.fixture
def timeline() -> Iterator[Timeline]:
    timeline = Timeline.create()
    yield timeline
    timeline.close()


@pytest.fixture
def tensor() -> torch.Tensor:
    """Each block is filled with its number."""
    tensor = shared_empty((BLOCKS, PAGE))
    for block in range(BLOCKS):
        tensor[block] = block
    return tensor


@pytest.fixture
def kvferryd_to_stop(kvferryd: LocalDaemon) -> Iterator[LocalDaemon]:
    yield kvferryd
    os.kill(kvferryd.pid, signal.SIGCONT)


def wait_results(client: OffloadClient, count: int) -> list[TransferResult]:
    results: list[TransferResult] = []

    def all_ended() -> bool:
        results.extend(client.get_finished())
        return len(results) >= count

    until(all_ended)
    return results


def test_reused_blocks_are_not_overwritten(
    kvferryd_to_stop: LocalDaemon, tensor: torch.Tensor, timeline: Timeline
) -> None:
    """Job 10 waits for a fence. The other jobs wait for nothing; the daemon has not read them."""
    with OffloadClient(kvferryd_to_stop.directory, engine="abandons", timeout=TIMEOUT) as client:
        client.register_kv_caches(
            {"layer": tensor}, num_blocks=BLOCKS, host_bytes=8 * PAGE, timeline=timeline
        )
        client.transfer_async(1, store(1, 0))
        assert [result.success for result in wait_results(client, 1)] == [True]
        fence = timeline.signal() + 1
        client.transfer_async(10, load(0, 2), wait_for=fence)
        assert client.status().pid == kvferryd_to_stop.pid  # it has received the job
        os.kill(kvferryd_to_stop.pid, signal.SIGSTOP)
        for job_id, block in ((11, 3), (12, 4)):
            client.transfer_async(job_id, load(0, block))
        client.transfer_async(13, store(5, 3))

        before = time.monotonic()
        client.abandon()
        client.abandon()  # again, while it reconnects
        assert time.monotonic() - before < PROMPTLY
        lost = client.get_finished()
        assert {result.job_id: result.outcome for result in lost} == dict.fromkeys(
            (10, 11, 12, 13), Outcome.LOST
        )
        assert client.get_finished() == []
        assert (client.connected, client.connecting) == (False, True)
        with pytest.raises(Gone) as gone:
            client.transfer_async(14, store(6, 4))
        assert gone.value.code == Code.DAEMON_GONE
        tensor[2:6] = PATTERN  # the blocks belong to other requests now
        timeline.signal(value=fence)

        os.kill(kvferryd_to_stop.pid, signal.SIGCONT)

        def reconnected() -> bool:
            assert bool((tensor[2:6] == PATTERN).all())
            assert client.get_finished() == []
            return client.connected

        until(reconnected)
        assert client.incarnation == 2
        assert bool((tensor[2:6] == PATTERN).all())
        client.transfer_async(20, store(7, 1), wait_for=timeline.last + 1)
        timeline.signal()
        client.transfer_async(21, load(1, 8), wait_for=timeline.last)
        assert [result.success for result in wait_results(client, 2)] == [True, True]
        assert bool((tensor[8] == 7).all())
        assert bool((tensor[2:6] == PATTERN).all())


def test_no_chunk_is_in_flight_after_reconnecting(
    start_kvferryd: StartKvferryd, tensor: torch.Tensor, timeline: Timeline
) -> None:
    """The daemon is stopped while it copies chunks. After SIGCONT it copies none of the rest."""
    daemon = start_kvferryd(reference_stall=0.3)
    with OffloadClient(daemon.directory, engine="abandons", timeout=TIMEOUT) as client:
        client.register_kv_caches(
            {"layer": tensor}, num_blocks=BLOCKS, host_bytes=8 * PAGE, timeline=timeline
        )
        client.transfer_async(1, store(1, 0))
        assert [result.success for result in wait_results(client, 1)] == [True]
        for job_id in range(2, 6):
            client.transfer_async(job_id, load(0, job_id))
        assert client.status().pid == daemon.pid  # it has received them
        os.kill(daemon.pid, signal.SIGSTOP)
        client.abandon()
        assert len(client.get_finished()) == 4
        tensor[2:6] = PATTERN
        os.kill(daemon.pid, signal.SIGCONT)
        until(lambda: client.get_finished() == [] and client.connected)
        client.transfer_async(7, store(7, 1))
        client.transfer_async(8, load(1, 9))  # runs after any chunk of an abandoned load
        assert [result.success for result in wait_results(client, 2)] == [True, True]
        assert bool((tensor[2:6] == PATTERN).all())


def test_a_client_that_does_not_reconnect_ends(kvferryd: LocalDaemon) -> None:
    with OffloadClient(kvferryd.directory, reconnect=False) as client:
        client.abandon()
        assert (client.connected, client.connecting) == (False, False)
        with pytest.raises(Gone, match="abandoned"):
            client.status()


async def test_an_asyncio_client_abandons(
    kvferryd_to_stop: LocalDaemon, tensor: torch.Tensor, timeline: Timeline
) -> None:
    """A task that waits for a job continues at once, and the event loop reconnects."""
    client = await AsyncOffloadClient.connect(
        kvferryd_to_stop.directory, engine="async", timeout=TIMEOUT
    )
    async with client:
        await client.register_kv_caches({"layer": tensor}, num_blocks=BLOCKS, timeline=timeline)
        client.transfer_async(1, store(1, 0), wait_for=1)
        await client.status()
        os.kill(kvferryd_to_stop.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(client.wait([1]))
        await asyncio.sleep(0)
        client.abandon()
        await asyncio.wait_for(waiting, TIMEOUT)
        assert [result.outcome for result in client.get_finished()] == [Outcome.LOST]
        os.kill(kvferryd_to_stop.pid, signal.SIGCONT)
        async with asyncio.timeout(TIMEOUT):
            while not client.connected:
                await asyncio.sleep(0.01)
        client.transfer_async(2, store(1, 0), wait_for=timeline.last + 1)
        timeline.signal()
        await client.wait([2])
        assert [result.success for result in client.get_finished()] == [True]
