"""Clients reconnect by themselves when their daemon is killed and restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from kvferry.client import (
    AsyncOffloadClient,
    Code,
    CPULoadStoreSpec,
    Failed,
    Gone,
    GPULoadStoreSpec,
    OffloadClient,
    Refused,
)
from kvferry.testing.engine import until
from support.block_specs import load, store
from support.eventually import eventually
from support.raw_client import one_tensor
from support.reconnecting_fixture import (
    BLOCKS,
    NEVER,
    PAGE,
    ReconnectingFixture,
    wait_reconnected,
)
from support.restarting_daemons import RestartingDaemons
from support.time_limits import PROMPTLY, TIMEOUT


@pytest.fixture
def engine(daemons: RestartingDaemons) -> Iterator[ReconnectingFixture]:
    """An engine that is registered and has a region of the pool."""
    with OffloadClient(daemons.directory, engine="engine", timeout=TIMEOUT) as client:
        engine = ReconnectingFixture(client)
        client.register_kv_caches({"layer": engine.tensor}, host_bytes=8 * PAGE, **engine.arguments)
        yield engine
    engine.timeline.close()


def test_a_daemon_is_killed_and_restarted_under_a_client_that_submits(
    daemons: RestartingDaemons, engine: ReconnectingFixture
) -> None:
    """The caller only submits and polls."""
    began, restarted, codes = time.monotonic(), False, set()
    while engine.client.incarnation < 2 or time.monotonic() < began + 1:
        try:
            engine.submit(store(len(engine.accepted) % BLOCKS, len(engine.accepted) % 8))
        except (Gone, Refused) as error:
            codes.add(error.code)
        engine.poll()
        if not restarted and time.monotonic() > began + 0.2:
            daemons.replace()
            restarted = True
        assert time.monotonic() < began + TIMEOUT
        time.sleep(0.001)
    engine.check_each_ended_once()
    assert {result.outcome for result in engine.history} <= {"done", "lost"}
    engine.round_trip(3, 0, 9)
    assert codes <= {Code.DAEMON_GONE, Code.BUSY}
    assert engine.client.daemon.pid == daemons.pid


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_client_without_a_daemon_raises_gone_and_reconnects(
    daemons: RestartingDaemons, engine: ReconnectingFixture, how: str
) -> None:
    """No call blocks meanwhile, and the waiting job ends as lost or cancelled."""
    held = engine.submit(store(1, 1), wait_for=NEVER)
    engine.client.status()
    if how == "kill":
        daemons.kill()
    else:
        daemons.stop()
    assert engine.result(held).outcome == ("lost" if how == "kill" else "cancelled")
    until(lambda: bool(engine.client.get_finished()) or not engine.client.connected)
    assert engine.client.connecting
    assert "reconnecting" in str(engine.client.gone)
    began = time.monotonic()
    with pytest.raises(Gone, match="reconnecting") as gone:
        engine.submit(store(1, 1))
    assert gone.value.code == Code.DAEMON_GONE
    assert engine.client.get_finished() == []
    engine.client.wait([held])
    with pytest.raises(Gone) as gone:
        engine.client.status(timeout=0.3)
    assert gone.value.code == Code.DAEMON_GONE
    assert time.monotonic() - began < PROMPTLY
    daemons.start()
    assert engine.client.status().pid == daemons.pid  # waits until it is connected
    assert engine.client.incarnation == 2
    engine.round_trip(4, 2, 9)


def test_tensors_that_cannot_be_shared_again_raise_nothing_in_a_poll(
    daemons: RestartingDaemons, engine: ReconnectingFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gone` has the reason, and a later attempt succeeds."""

    def fail(*_: object) -> None:
        raise OSError("too many open files")

    with monkeypatch.context() as broken:
        broken.setattr("kvferry.client.tensors.sharing.export_tensors", fail)
        daemons.replace()
        until(lambda: bool(engine.poll()) or _refused(engine.client))
        assert engine.client.gone is not None
        cause = engine.client.gone.__cause__
        assert isinstance(cause, Failed)
        assert cause.code == Code.MAP_FAILED
        assert "too many open files" in str(cause)
    wait_reconnected(engine.client)
    engine.round_trip(3, 0, 9)


def _refused(client: OffloadClient) -> bool:
    return client.gone is not None and client.gone.__cause__ is not None


def test_tensors_of_a_daemon_are_registered_with_the_next_one(
    daemons: RestartingDaemons, engine: ReconnectingFixture
) -> None:
    with OffloadClient(daemons.directory, engine="other") as client:
        (tensor,) = client.allocate_kv_caches(one_tensor(), host_bytes=512).tensors
        tensor[:] = 0
        for generation in range(2):
            tensor[0] = 3 + generation
            daemons.replace()
            assert client.status().engines
            specs = GPULoadStoreSpec([0]), CPULoadStoreSpec([1])
            client.transfer_async(1, specs)
            client.wait([1])
            client.transfer_async(2, (specs[1], GPULoadStoreSpec([5])))
            client.wait([2])
            assert all(result.success for result in client.get_finished())
            assert bool((tensor[5] == 3 + generation).all())
        assert client.incarnation == 3


def test_closing_while_connecting(daemons: RestartingDaemons) -> None:
    client = OffloadClient(daemons.directory, timeout=TIMEOUT)
    daemons.kill()
    until(lambda: bool(client.get_finished()) or not client.connected)
    daemons.start()
    client.get_finished()
    began = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - began < PROMPTLY
    assert not client.connecting


async def test_an_asyncio_client_reconnects_by_itself(daemons: RestartingDaemons) -> None:
    """The caller calls nothing meanwhile. A request that needs a daemon waits for it."""
    async with await AsyncOffloadClient.connect(
        daemons.directory, engine="async", timeout=TIMEOUT
    ) as client:
        engine = ReconnectingFixture(client)
        await client.register_kv_caches(
            {"layer": engine.tensor}, host_bytes=8 * PAGE, **engine.arguments
        )
        held = engine.submit(store(1, 1), wait_for=NEVER)
        waiting = asyncio.create_task(client.wait([held]))
        await client.status()
        daemons.kill()
        await waiting
        await eventually(lambda: client.connecting)
        with pytest.raises(Gone) as gone:
            await client.status(timeout=0.2)
        assert gone.value.code == Code.DAEMON_GONE
        request = asyncio.create_task(client.status())
        await asyncio.to_thread(daemons.start)
        await eventually(lambda: client.connected)
        assert client.incarnation == 2
        assert (await request).pid == daemons.pid
        for spec in (store(3, 0), load(0, 9)):
            await client.wait([engine.submit(spec)])
        assert bool((engine.tensor[9] == 3).all())
        engine.check_each_ended_once()
        assert [result.outcome for result in engine.history] == ["lost", "done", "done"]
    engine.timeline.close()
