"""Registering again after a call that timed out, when the daemon may have registered the tensors.

A DaemonStopper stops the daemon at the request (SIGSTOP) and continues it after the timeout.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.client import (
    AsyncOffloadClient,
    Code,
    CPULoadStoreSpec,
    Gone,
    GPULoadStoreSpec,
    LocalDaemon,
    OffloadClient,
    Refused,
    Timeline,
    shared_empty,
)
from kvferry.client.nonblocking import NonBlockingClient
from kvferry.testing.plugin import StartKvferryd
from support.raw_client import one_tensor

LAYOUT = one_tensor()
SPEC = GPULoadStoreSpec([3]), CPULoadStoreSpec([0])


class DaemonStopper:
    """Stops a daemon right before a client sends its next registration."""

    def __init__(self, daemon: LocalDaemon) -> None:
        self._process = daemon.process

    def stop_at_registration(self, client: NonBlockingClient) -> None:
        send = client._send

        def stop_and_send(data: bytes) -> None:
            if b"kvcaches" in data:
                self._process.send_signal(signal.SIGSTOP)
                client._send = send  # type: ignore[method-assign]
            send(data)

        client._send = stop_and_send  # type: ignore[method-assign]

    def continue_daemon(self) -> None:
        self._process.send_signal(signal.SIGCONT)


@pytest.fixture
def stopper(kvferryd: LocalDaemon) -> Iterator[DaemonStopper]:
    stopper = DaemonStopper(kvferryd)
    yield stopper
    stopper.continue_daemon()


def register(client: Any, tensor: torch.Tensor, **options: Any) -> Any:
    return client.register_kv_caches({"layer": tensor}, num_blocks=8, **options)


def allocate(client: Any, _: torch.Tensor, **options: Any) -> Any:
    return client.allocate_kv_caches(LAYOUT, **options)


METHOD = pytest.mark.parametrize("method", [register, allocate])
RECONNECTS = pytest.mark.parametrize("reconnects", [True, False])


def check_timeout(method: Callable[[], Any]) -> None:
    with pytest.raises(Gone) as gone:
        method()
    assert gone.value.code == Code.TIMEOUT


def can_store(client: OffloadClient) -> bool:
    client.transfer_async(1, SPEC)
    client.wait([1])
    return [result.success for result in client.get_finished()] == [True]


@METHOD
def test_the_same_registration_continues_the_first(
    kvferryd: LocalDaemon, stopper: DaemonStopper, method: Any
) -> None:
    """The tensors are registered once, and the client stays connected."""
    tensor, timeline = shared_empty((8, 64)), Timeline.create()
    with OffloadClient(kvferryd.directory, engine="late") as client:
        stopper.stop_at_registration(client)
        check_timeout(
            lambda: method(client, tensor, host_bytes=512, timeline=timeline, timeout=0.2)
        )
        check_timeout(
            lambda: method(client, tensor, host_bytes=512, timeline=timeline, timeout=0.2)
        )
        stopper.continue_daemon()
        method(client, tensor, host_bytes=512, timeline=timeline)
        assert client.region is not None
        assert client.region.num_blocks == 8
        assert client.incarnation == 1
        assert can_store(client)
        with pytest.raises(Refused, match="this client has already registered") as refused:
            method(client, tensor, host_bytes=512, timeline=timeline)
        assert refused.value.code == Code.ALREADY_REGISTERED
        assert not client.status().errors
    timeline.close()


@METHOD
@RECONNECTS
def test_another_registration_replaces_the_unanswered_one(
    kvferryd: LocalDaemon, stopper: DaemonStopper, method: Any, reconnects: bool
) -> None:
    with OffloadClient(kvferryd.directory, engine="late", reconnect=reconnects) as client:
        stopper.stop_at_registration(client)
        check_timeout(lambda: method(client, shared_empty((8, 64)), host_bytes=1024, timeout=0.2))
        stopper.continue_daemon()
        method(client, shared_empty((8, 64)), host_bytes=512)
        assert client.region is not None
        assert client.region.num_blocks == 8
        assert can_store(client)
        (engine,) = client.status().engines
        assert (engine.name, engine.host_blocks) == ("late", 8)
        kvferryd.kill()
        with pytest.raises(Gone):
            client.status(timeout=0.2)
        assert client.connecting is reconnects


@METHOD
def test_after_a_refusal_the_next_request_is_sent(
    kvferryd: LocalDaemon, stopper: DaemonStopper, method: Any
) -> None:
    with OffloadClient(kvferryd.directory, engine="late") as client:
        stopper.stop_at_registration(client)
        check_timeout(
            lambda: method(client, shared_empty((8, 64)), host_bytes=1 << 40, timeout=0.2)
        )
        stopper.continue_daemon()
        method(client, shared_empty((8, 64)), host_bytes=512)
        assert can_store(client)
        assert client.incarnation == 1


@METHOD
def test_an_interrupt(kvferryd: LocalDaemon, stopper: DaemonStopper, method: Any) -> None:
    """A reference to the exception does not prevent the next registration."""
    tensor = shared_empty((8, 64))

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with OffloadClient(kvferryd.directory, engine="late") as client:
            stopper.stop_at_registration(client)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                method(client, tensor, host_bytes=512)
            except KeyboardInterrupt:
                stopper.continue_daemon()
                method(client, tensor, host_bytes=512)
            assert can_store(client)
    finally:
        signal.signal(signal.SIGALRM, before)


@METHOD
def test_the_request_is_sent_again_to_a_restarted_daemon(
    start_kvferryd: StartKvferryd, short_path: Path, method: Any
) -> None:
    tensor = shared_empty((8, 64))
    daemon = start_kvferryd(runtime_dir=short_path)
    with OffloadClient(daemon.directory, engine="late") as client:
        DaemonStopper(daemon).stop_at_registration(client)
        check_timeout(lambda: method(client, tensor, host_bytes=512, timeout=0.2))
        daemon.kill()
        start_kvferryd(runtime_dir=short_path)
        method(client, tensor, host_bytes=512)
        assert can_store(client)
        assert client.incarnation == 2


@METHOD
@pytest.mark.parametrize("same", [True, False])
async def test_a_task_that_was_cancelled(
    kvferryd: LocalDaemon, stopper: DaemonStopper, method: Any, same: bool
) -> None:
    tensor = shared_empty((8, 64))
    async with await AsyncOffloadClient.connect(kvferryd.directory, engine="late") as client:
        stopper.stop_at_registration(client)
        task = asyncio.create_task(method(client, tensor, host_bytes=512))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Gone) as gone:
            await method(client, tensor, host_bytes=512, timeout=0.2)
        assert gone.value.code == Code.TIMEOUT
        stopper.continue_daemon()
        await method(client, tensor, host_bytes=512 if same else 256)
        assert client.region is not None
        assert client.region.num_blocks == (8 if same else 4)
        client.transfer_async(1, SPEC)
        await client.wait([1])
        assert [result.success for result in client.get_finished()] == [True]
        assert client.incarnation == (1 if same else 2)


@METHOD
async def test_two_tasks_at_once(
    kvferryd: LocalDaemon, stopper: DaemonStopper, method: Any
) -> None:
    """One task registers and the other is refused, also if both continue an earlier request."""
    tensor = shared_empty((8, 64))
    async with await AsyncOffloadClient.connect(kvferryd.directory, engine="late") as client:
        stopper.stop_at_registration(client)
        with pytest.raises(Gone):
            await method(client, tensor, host_bytes=512, timeout=0.2)
        both = [asyncio.create_task(method(client, tensor, host_bytes=512)) for _ in range(2)]
        await asyncio.sleep(0.1)
        stopper.continue_daemon()
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
        assert [error.code for error in refused] == [Code.ALREADY_REGISTERED]
        client.transfer_async(1, SPEC)
        await client.wait([1])
        assert [result.success for result in client.get_finished()] == [True]
