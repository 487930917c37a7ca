"""Clients reconnect by themselves when their daemon is killed and restarted."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from kvferry.client import (
    Code,
    CPULoadStoreSpec,
    Failed,
    Gone,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    Lookup,
    OffloadClient,
    Refused,
    RegistrationState,
    SessionState,
    Timeline,
    canonicalize,
    shared_empty,
)
from kvferry.testing.engine import until
from support.block_specs import load, store
from support.reconnecting_fixture import (
    BLOCKS,
    FINGERPRINT,
    NEVER,
    PAGE,
    A,
    DaemonService,
    ReconnectingFixture,
    wait_reconnected,
)
from support.time_limits import PROMPTLY, TIMEOUT


@pytest.fixture
def engine(daemon_service: DaemonService) -> Iterator[ReconnectingFixture]:
    """An engine that is registered and has a region of the pool."""
    with OffloadClient(daemon_service.directory, engine="engine", timeout=TIMEOUT) as client:
        engine = ReconnectingFixture(client)
        client.register_kv_caches({"layer": engine.tensor}, host_bytes=8 * PAGE, **engine.arguments)
        yield engine
    engine.timeline.close()


# One engine


def test_a_daemon_is_killed_and_restarted_under_a_client_that_submits(
    daemon_service: DaemonService, engine: ReconnectingFixture
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
            daemon_service.restart()
            restarted = True
        assert time.monotonic() < began + TIMEOUT
        time.sleep(0.001)
    engine.check_each_ended_once()
    assert {result.outcome for result in engine.history} <= {"done", "lost"}
    engine.round_trip(3, 0, 9)
    assert codes <= {Code.DAEMON_GONE, Code.BUSY}
    assert engine.client.daemon.pid == daemon_service.daemon.pid


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_client_without_a_daemon_raises_gone_and_reconnects(
    daemon_service: DaemonService, engine: ReconnectingFixture, how: str
) -> None:
    """No call blocks meanwhile, and the waiting job ends as lost or cancelled."""
    held = engine.submit(store(1, 1), wait_for=NEVER)
    engine.client.status()
    if how == "kill":
        daemon_service.daemon.kill()
    else:
        daemon_service.daemon.stop()
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
    daemon_service.start()
    assert engine.client.status().pid == daemon_service.daemon.pid  # waits until it is connected
    assert engine.client.incarnation == 2
    engine.round_trip(4, 2, 9)


def test_bytes_stored_before_the_kill_are_not_loaded(
    daemon_service: DaemonService, engine: ReconnectingFixture
) -> None:
    engine.round_trip(3, 0, 9)
    daemon_service.restart()
    wait_reconnected(engine.client)
    assert engine.client.region is not None
    assert not engine.client.region.reattached
    stale = engine.result(engine.submit(load(0, 9)))
    assert stale.error is not None
    assert (stale.error.code, stale.error.value) == (Code.STALE, "0")
    engine.round_trip(5, 0, 9)
    both = engine.result(engine.submit((CPULoadStoreSpec([0, 1]), GPULoadStoreSpec([1, 2]))))
    assert both.error is not None
    assert (both.error.code, both.error.value) == (Code.STALE, "1")


def test_a_daemon_that_continues_after_sigstop_stays_connected(
    daemon_service: DaemonService, engine: ReconnectingFixture
) -> None:
    os.kill(daemon_service.daemon.pid, signal.SIGSTOP)
    job = engine.submit(store(3, 0))
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert engine.poll() == []
    os.kill(daemon_service.daemon.pid, signal.SIGCONT)
    assert engine.result(job).success
    assert (engine.client.incarnation, engine.client.gone) == (1, None)


def test_a_client_that_starts_without_a_daemon(daemon_service: DaemonService) -> None:
    """With a state to restore, the constructor does not wait. Polling connects."""
    directory = daemon_service.directory
    daemon_service.daemon.stop()
    tensor, timeline = shared_empty((BLOCKS, PAGE)), Timeline.create()
    caches = canonicalize({"layer": tensor}, num_blocks=BLOCKS)
    state = SessionState.of_namespace(
        FINGERPRINT,
        cpu_bytes_to_use=8 * PAGE,
        registration=RegistrationState(caches, None, timeline),
    )
    began = time.monotonic()
    client = OffloadClient(lambda: directory, engine="early", state=state, timeout=TIMEOUT)
    with client:
        assert client.lookup(A) is Lookup.MISS
        assert client.get_finished() == []
        with pytest.raises(Gone, match="not connected"):
            client.transfer_async(1, (GPULoadStoreSpec([3]), KeyLoadStoreSpec((A,))))
        assert time.monotonic() - began < PROMPTLY  # no call waited for the timeout
        with pytest.raises(Gone):
            client.wait_connected(timeout=0.1)
        daemon_service.start()
        client.wait_connected(TIMEOUT)
        assert client.incarnation == 1
        assert client.namespace.opened.num_blocks == 8
        client.transfer_async(1, (GPULoadStoreSpec([3]), KeyLoadStoreSpec((A,))))
        client.wait([1])
        assert [result.success for result in client.get_finished()] == [True]
        until(lambda: client.lookup(A) is Lookup.HIT)
    timeline.close()


# State that cannot be restored


def test_tensors_that_cannot_be_shared_again_raise_nothing_in_a_poll(
    daemon_service: DaemonService, engine: ReconnectingFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gone` has the reason, and a later attempt succeeds."""

    def fail(*_: object) -> None:
        raise OSError("too many open files")

    with monkeypatch.context() as broken:
        broken.setattr("kvferry.client.tensors.sharing.export_tensors", fail)
        daemon_service.restart()
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
    daemon_service: DaemonService, engine: ReconnectingFixture
) -> None:
    from support.raw_client import one_tensor

    with OffloadClient(daemon_service.directory, engine="other") as client:
        (tensor,) = client.allocate_kv_caches(one_tensor(), host_bytes=512).tensors
        tensor[:] = 0
        for generation in range(2):
            tensor[0] = 3 + generation
            daemon_service.restart()
            assert client.status().engines
            specs = GPULoadStoreSpec([0]), CPULoadStoreSpec([1])
            client.transfer_async(1, specs)
            client.wait([1])
            client.transfer_async(2, (specs[1], GPULoadStoreSpec([5])))
            client.wait([2])
            assert all(result.success for result in client.get_finished())
            assert bool((tensor[5] == 3 + generation).all())
        assert client.incarnation == 3


@pytest.mark.parametrize("state", ["disconnected", "connecting"])
def test_closing_while_the_daemon_is_down(daemon_service: DaemonService, state: str) -> None:
    client = OffloadClient(daemon_service.directory, timeout=TIMEOUT)
    daemon_service.daemon.kill()
    until(lambda: bool(client.get_finished()) or not client.connected)
    if state == "connecting":
        daemon_service.start()
        client.get_finished()
    began = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - began < PROMPTLY
    assert not client.connecting


# Two clients of an engine


def test_a_scheduler_and_a_worker(
    daemon_service: DaemonService, engine: ReconnectingFixture
) -> None:
    """Only the worker registers. The scheduler's jobs are done again after both reconnected."""
    with OffloadClient(daemon_service.directory, engine="engine") as scheduler:
        schedule = ReconnectingFixture(scheduler)
        schedule.tensor = engine.tensor
        schedule.round_trip(3, 0, 9)
        daemon_service.restart()
        wait_reconnected(scheduler)
        assert scheduler.region is None
        early = schedule.result(schedule.submit(store(3, 0)))
        assert early.error is not None
        assert early.error.code == Code.NOT_REGISTERED
        wait_reconnected(engine.client)
        schedule.round_trip(5, 0, 9)
        stale = schedule.result(schedule.submit(load(1, 9)))
        assert stale.error is not None
        assert stale.error.code == Code.STALE
        schedule.timeline.close()
