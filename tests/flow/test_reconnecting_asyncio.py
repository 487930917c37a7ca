"""Asyncio clients whose daemon is killed and restarted."""

from __future__ import annotations

import asyncio

import pytest
import torch

from kvferry.client import (
    AsyncOffloadClient,
    Code,
    Gone,
)
from support.block_specs import load, store
from support.eventually import eventually
from support.reconnecting_fixture import (
    NEVER,
    PAGE,
    DaemonService,
    ReconnectingFixture,
)
from support.time_limits import TIMEOUT


async def connect_and_register(
    daemon_service: DaemonService,
) -> tuple[AsyncOffloadClient, ReconnectingFixture]:
    client = await AsyncOffloadClient.connect(
        daemon_service.directory, engine="async", timeout=TIMEOUT
    )
    engine = ReconnectingFixture(client)
    await client.register_kv_caches(
        {"layer": engine.tensor}, host_bytes=8 * PAGE, **engine.arguments
    )
    return client, engine


async def test_an_asyncio_client_reconnects_by_itself(daemon_service: DaemonService) -> None:
    """The caller calls nothing meanwhile. A request that needs a daemon waits for it."""
    client, engine = await connect_and_register(daemon_service)
    held = engine.submit(store(1, 1), wait_for=NEVER)
    waiting = asyncio.create_task(client.wait([held]))
    await client.status()
    daemon_service.daemon.kill()
    await waiting
    await eventually(lambda: client.connecting)
    with pytest.raises(Gone) as gone:
        await client.status(timeout=0.2)
    assert gone.value.code == Code.DAEMON_GONE
    request = asyncio.create_task(client.status())
    await asyncio.to_thread(daemon_service.start)
    await eventually(lambda: client.connected)
    assert client.incarnation == 2
    assert (await request).pid == daemon_service.daemon.pid
    job = engine.submit(store(3, 0))
    await client.wait([job])
    job = engine.submit(load(0, 9))
    await client.wait([job])
    assert torch.equal(engine.tensor[9], engine.tensor[3])
    engine.check_each_ended_once()
    assert [result.outcome for result in engine.history] == ["lost", "done", "done"]
    await client.close()
    engine.timeline.close()


async def test_closing_an_asyncio_client_while_the_daemon_is_down(
    daemon_service: DaemonService,
) -> None:
    client, engine = await connect_and_register(daemon_service)
    daemon_service.daemon.kill()
    await eventually(lambda: client.connecting)
    async with asyncio.timeout(TIMEOUT):
        await client.close()
    assert not client.connecting
    await asyncio.sleep(0.1)
    engine.timeline.close()
