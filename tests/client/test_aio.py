"""The asyncio client: the same methods as coroutines, cancellation and timeouts."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

from kvferry.client import (
    AsyncOffloadClient,
    Code,
    Gone,
    LocalDaemon,
    OffloadClient,
    Refused,
    Timeline,
    TransferResult,
    shared_empty,
)
from kvferry.proto import messages as wire
from kvferry.proto.codec import encode
from kvferry.testing.plugin import StartKvferryd
from support.block_specs import load, store
from support.raw_client import one_tensor
from support.time_limits import PROMPTLY, TIMEOUT

NEVER = 1 << 40


@pytest.fixture(scope="module")
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon(pool_bytes=16 << 20) as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: LocalDaemon) -> AsyncIterator[AsyncOffloadClient]:
    """A connected client without registered tensors."""
    async with await AsyncOffloadClient.connect(
        daemon.directory, engine="async", timeout=TIMEOUT
    ) as connected:
        yield connected


async def register(client: AsyncOffloadClient) -> tuple[torch.Tensor, Timeline]:
    """Register a tensor of eight blocks of 64 bytes."""
    tensor, timeline = shared_empty((8, 64)), Timeline.create()
    for block in range(8):
        tensor[block] = block
    region = await client.register_kv_caches(
        {"layer": tensor}, num_blocks=8, host_bytes=512, timeline=timeline
    )
    assert (region.num_blocks, region.block_bytes) == (8, 64)
    return tensor, timeline


async def poll_results(client: AsyncOffloadClient, count: int) -> list[TransferResult]:
    """Poll as a scheduler does, until `count` results have arrived."""
    results: list[TransferResult] = []
    async with asyncio.timeout(TIMEOUT):
        while len(results) < count:
            results += client.get_finished()
            await asyncio.sleep(0)
    return results


async def test_every_method(client: AsyncOffloadClient) -> None:
    tensor, timeline = await register(client)
    before = (await client.status()).totals
    client.transfer_async(1, store(3, 0))
    client.transfer_async(2, load(0, 7))
    await client.wait([1, 2])
    assert {r.job_id: r.success for r in client.get_finished()} == {1: True, 2: True}
    assert bool((tensor[7] == 3).all())
    after = (await client.status()).totals
    assert (after.stores - before.stores, after.loads - before.loads) == (1, 1)
    with pytest.raises(Refused) as refused:
        await client.register_kv_caches({"layer": tensor}, num_blocks=8)
    assert refused.value.code == Code.ALREADY_REGISTERED
    timeline.close()


async def test_tensors_of_the_daemon(client: AsyncOffloadClient) -> None:
    region, (tensor,), kept = await client.allocate_kv_caches(
        one_tensor(), host_bytes=512, keep=True
    )
    with pytest.raises(Refused) as empty_name:
        await client.release_kv_caches("")
    assert empty_name.value.code == Code.BAD_MESSAGE
    assert not kept
    assert (region.num_blocks, tuple(tensor.shape), tensor.dtype) == (8, (8, 64), torch.int8)
    tensor.zero_()
    tensor[2] = 7
    client.transfer_async(1, store(2, 3))
    client.transfer_async(2, load(3, 5))
    await client.wait([1, 2])
    assert tensor[:, 0].tolist() == [0, 0, 7, 0, 0, 7, 0, 0]
    assert await client.release_kv_caches() >= 512
    with pytest.raises(Refused) as refused:
        await client.release_kv_caches("unknown")
    assert refused.value.code == Code.NOT_REGISTERED


async def test_a_wait_that_ends_early_leaves_the_client_usable(client: AsyncOffloadClient) -> None:
    _, timeline = await register(client)
    client.transfer_async(1, store(0, 0), wait_for=1)
    waiting = asyncio.create_task(client.wait([1]))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    began = time.monotonic()
    with pytest.raises(Gone) as gone:
        await client.wait([1, 2], timeout=0.1)
    assert 0.1 <= time.monotonic() - began < PROMPTLY
    assert (gone.value.code, gone.value.value) == (Code.TIMEOUT, "[1]")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.wait([1])
    timeline.signal()
    await client.wait([1])
    assert (await poll_results(client, 1))[0].success
    timeline.close()


async def test_several_tasks_at_once(client: AsyncOffloadClient) -> None:
    """Each task waits for its own job, while other tasks request the status."""
    _, timeline = await register(client)
    for job in range(8):
        client.transfer_async(job, store(job, job), wait_for=job + 1)
    tasks = [asyncio.create_task(client.wait([job])) for job in range(8)]
    for job in range(8):
        await asyncio.gather(*(client.status() for _ in range(5)))
        timeline.signal()
        await asyncio.wait_for(tasks[job], TIMEOUT)
    assert len(await poll_results(client, 8)) == 8
    timeline.close()


async def test_a_task_that_polls_or_cancels_beside_one_that_waits(
    client: AsyncOffloadClient,
) -> None:
    """If a poll receives the message that another task waits for, that task continues."""
    _, timeline = await register(client)
    for job in range(100):
        client.transfer_async(job, store(job % 8, job % 8))
        waiting = asyncio.create_task(client.wait([job]))
        if job % 2:
            for _ in range(100):  # the daemon handles all of these before the next job
                client.cancel([NEVER])
                await asyncio.sleep(0)
                if waiting.done():
                    break
        await asyncio.gather(waiting, poll_results(client, 1))
    timeline.close()


async def test_an_error_of_another_message_does_not_delay_a_reply(
    client: AsyncOffloadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket signals both messages once, and handling the first one raises."""
    receive, arrived, handled = (
        client._link.connection.receive_messages,
        deque[bytes](),
        list[bytes](),
    )

    def receive_both(handle: Callable[[bytes], None]) -> bool:
        receive(arrived.append)
        both = bool(arrived) and len(handled) + len(arrived) == 2
        while both and arrived:
            handled.append(arrived.popleft())
            handle(handled[-1])
        return both

    monkeypatch.setattr(client._link.connection, "receive_messages", receive_both)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    errors = list[dict[str, Any]]()
    client._link.send(
        encode(wire.Unpin((b"key",)))
    )  # refused with an error, because there is no namespace
    async with asyncio.timeout(TIMEOUT):
        await client.status(timeout=math.inf)
    assert [each["exception"].code for each in errors] == [Code.UNKNOWN_NAMESPACE]


async def test_connecting_without_a_daemon_times_out(
    kvferryd: LocalDaemon, start_kvferryd: StartKvferryd
) -> None:
    directory = kvferryd.directory
    kvferryd.stop()
    with pytest.raises(Gone) as gone:
        await AsyncOffloadClient.connect(directory, timeout=0.2)
    assert gone.value.code == Code.TIMEOUT
    another = start_kvferryd()
    with pytest.raises(Refused):
        await AsyncOffloadClient.connect(another.directory, engine="")
    async with await AsyncOffloadClient.connect(another.directory) as client:
        assert client.daemon.pid == another.pid
        await client.close()
        await client.close()


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
async def test_very_large_timeouts(daemon: LocalDaemon, seconds: float) -> None:
    """Both clients accept them, in every step of a method."""
    async with await AsyncOffloadClient.connect(
        daemon.directory, engine="async", timeout=seconds
    ) as client:
        _, timeline = await register(client)
        client.transfer_async(1, store(3, 0))
        await client.wait([1])
    timeline.close()
    with OffloadClient(daemon.directory, engine="other", timeout=seconds) as other:
        other.register_kv_caches({"layer": shared_empty((8, 64))}, num_blocks=8, host_bytes=512)
        other.transfer_async(1, store(3, 0))
        other.wait([1])
