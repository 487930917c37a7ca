"""A registration belongs to its session: one without a reply ends it, and the next begins another.

A DaemonStopper stops the daemon at the request (SIGSTOP) and continues it after the timeout.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
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
from support.raw_client import RawClient, one_tensor

LAYOUT = one_tensor()
SPEC = GPULoadStoreSpec([3]), CPULoadStoreSpec([0])


class DaemonStopper:
    """Stops a daemon right before a client sends its next registration."""

    def __init__(self, daemon: LocalDaemon) -> None:
        self._process = daemon.process

    def stop_at_registration(self, client: NonBlockingClient) -> None:
        send = client._link.send

        def stop_and_send(data: bytes) -> None:
            if b"kvcaches" in data:
                self._process.send_signal(signal.SIGSTOP)
                client._link.send = send  # type: ignore[method-assign]
            send(data)

        client._link.send = stop_and_send  # type: ignore[method-assign]

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


def can_store(client: OffloadClient, wait_for: int = 0) -> bool:
    client.transfer_async(1, SPEC, wait_for)
    client.wait([1])
    return [result.success for result in client.get_finished()] == [True]


@pytest.mark.parametrize("method", [register, allocate])
def test_a_registration_that_times_out_ends_its_session(
    kvferryd: LocalDaemon, stopper: DaemonStopper, method: Any
) -> None:
    """The next one belongs to another session, also if the daemon has received the first."""
    timeline = Timeline.create()
    with OffloadClient(kvferryd.directory, engine="late") as client:
        stopper.stop_at_registration(client)
        late = {"host_bytes": 1024, "timeline": timeline, "timeout": 0.2}
        with pytest.raises(Gone) as gone:
            method(client, shared_empty((8, 64)), **late)
        assert gone.value.code == Code.TIMEOUT
        assert timeline.revoked
        assert client.connecting
        with pytest.raises(Gone, match="register them again"):
            method(client, shared_empty((8, 64)), **late)
        stopper.continue_daemon()
        method(client, shared_empty((8, 64)), host_bytes=512, timeline=timeline)
        assert client.region is not None
        assert (client.region.num_blocks, client.incarnation) == (8, 2)
        (engine,) = client.status().engines
        assert (engine.name, engine.host_blocks) == ("late", 8)
        assert can_store(client, wait_for=timeline.signal())
        with pytest.raises(Refused, match="this client has already registered"):
            method(client, shared_empty((8, 64)), host_bytes=512)
    timeline.close()


def test_tensors_of_a_call_without_reply_do_not_count_as_kept(
    kvferryd: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon has mapped them, but no engine has written them."""
    with OffloadClient(kvferryd.directory, engine="late") as client:
        client.status()
        with monkeypatch.context() as patch:
            patch.setattr(client._link, "receive_messages", lambda: False)
            with pytest.raises(Gone):
                client.allocate_kv_caches(LAYOUT, keep=True, timeout=0.5)
        assert not client.allocate_kv_caches(LAYOUT, keep=True).kept
        assert client.incarnation == 2
    with OffloadClient(kvferryd.directory, engine="late") as next_client:
        assert next_client.allocate_kv_caches(LAYOUT, keep=True).kept


def test_a_daemon_that_has_not_noticed_the_end_of_the_last_session(kvferryd: LocalDaemon) -> None:
    """Another session has the name until then; the client asks again."""
    tensor = shared_empty((8, 64))
    last_session = RawClient(kvferryd.directory, "late")
    last_session.register()
    with OffloadClient(kvferryd.directory, engine="late") as client:
        with pytest.raises(Refused) as refused:
            register(client, tensor, host_bytes=512)
        assert refused.value.code == Code.ALREADY_REGISTERED
        client._session.registration_left = True
        closing = threading.Timer(0.2, last_session.drop)
        closing.start()
        register(client, tensor, host_bytes=512)
        closing.join()
        assert can_store(client)
        assert client.incarnation == 1  # a refusal has not ended its session


def test_an_interrupt(kvferryd: LocalDaemon, stopper: DaemonStopper) -> None:
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
                register(client, tensor, host_bytes=512)
            except KeyboardInterrupt:
                stopper.continue_daemon()
                register(client, tensor, host_bytes=512)
            assert can_store(client)
    finally:
        signal.signal(signal.SIGALRM, before)


async def test_a_task_that_was_cancelled(kvferryd: LocalDaemon, stopper: DaemonStopper) -> None:
    tensor = shared_empty((8, 64))
    async with await AsyncOffloadClient.connect(kvferryd.directory, engine="late") as client:
        stopper.stop_at_registration(client)
        task = asyncio.create_task(register(client, tensor, host_bytes=512))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.connecting
        stopper.continue_daemon()
        await register(client, tensor, host_bytes=512)
        assert client.incarnation == 2
        client.transfer_async(1, SPEC)
        await client.wait([1])
        assert [result.success for result in client.get_finished()] == [True]


async def test_two_tasks_at_once(kvferryd: LocalDaemon, stopper: DaemonStopper) -> None:
    """One task registers, and the other is refused; the session stays."""
    tensor = shared_empty((8, 64))
    async with await AsyncOffloadClient.connect(kvferryd.directory, engine="late") as client:
        stopper.stop_at_registration(client)
        both = [asyncio.create_task(register(client, tensor, host_bytes=512)) for _ in range(2)]
        await asyncio.sleep(0.1)
        stopper.continue_daemon()
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
        assert [error.code for error in refused] == [Code.ALREADY_REGISTERED]
        client.transfer_async(1, SPEC)
        await client.wait([1])
        assert [result.success for result in client.get_finished()] == [True]
        assert client.incarnation == 1
