"""Clients whose daemon goes and comes back: they go on, and do nothing for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.client import (
    AsyncOffloadClient,
    Code,
    CPULoadStoreSpec,
    Failed,
    Fingerprint,
    Gone,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    Refused,
    RegistrationState,
    SessionState,
    Timeline,
    TransferResult,
    TransferSpec,
    canonicalize,
    shared_empty,
)
from kvferry.testing.engine import until
from support.block_specs import load, store
from support.eventually import eventually
from support.service_manager import ServiceManager, kvferryd_command

from .block_tables import await_committed

BLOCKS, PAGE = 16, 4096
POOL = 1 << 20
NEVER = 1 << 40
PATIENCE = 20.0
FINGERPRINT = Fingerprint("llama", PAGE, key_bytes=4)
A, B, C = b"aaaa", b"bbbb", b"cccc"


class DaemonService:
    """A daemon that is killed and started again in the same folder."""

    def __init__(self, runtime_dir: Path) -> None:
        self._running, self._runtime_dir = ExitStack(), runtime_dir
        self.start()

    @property
    def directory(self) -> Path:
        return self.daemon.directory

    def start(self, **options: Any) -> None:
        chosen = {"pool_bytes": POOL, "runtime_dir": self._runtime_dir, **options}
        self.daemon = self._running.enter_context(LocalDaemon(**chosen))

    def restart(self, **options: Any) -> None:
        self.daemon.kill()
        self.start(**options)

    def close(self) -> None:
        self._running.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[DaemonService]:
    service = DaemonService(tmp_path)
    yield service
    service.close()


class ReconnectingFixture:
    """An engine in this process: numbered blocks, jobs, and a record of how they ended."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.tensor = shared_empty((BLOCKS, PAGE))
        for block in range(BLOCKS):
            self.tensor[block] = block
        self.timeline = Timeline.create()
        self.job_ids = count(1)
        self.accepted: list[int] = []
        self.history: list[TransferResult] = []

    @property
    def arguments(self) -> dict[str, Any]:
        return {"num_blocks": BLOCKS, "timeline": self.timeline}

    def submit(self, spec: TransferSpec, wait_for: int = 0) -> int:
        job_id = next(self.job_ids)
        self.client.transfer_async(job_id, spec, wait_for)
        self.accepted.append(job_id)
        return job_id

    def poll(self) -> list[TransferResult]:
        self.history += self.client.get_finished()
        return self.history

    def result(self, job_id: int) -> TransferResult:
        until(lambda: any(one.job_id == job_id for one in self.poll()), PATIENCE)
        return next(one for one in self.history if one.job_id == job_id)

    def round_trip(self, gpu: int, host: int, to: int) -> None:
        """Store a block and load it elsewhere."""
        assert self.result(self.submit(store(gpu, host))).success
        assert self.result(self.submit(load(host, to))).success
        assert bool((self.tensor[to] == self.tensor[gpu]).all())

    def check_each_ended_once(self) -> None:
        until(lambda: len(self.poll()) >= len(self.accepted), PATIENCE)
        assert sorted(one.job_id for one in self.history) == self.accepted


@pytest.fixture
def engine(service: DaemonService) -> Iterator[ReconnectingFixture]:
    """Registered, with a region of the pool."""
    with OffloadClient(service.directory, engine="engine", timeout=PATIENCE) as client:
        engine = ReconnectingFixture(client)
        client.register_kv_caches({"layer": engine.tensor}, host_bytes=8 * PAGE, **engine.arguments)
        yield engine
    engine.timeline.close()


def back(client: OffloadClient | AsyncOffloadClient, incarnation: int = 2) -> None:
    """Poll until the client is back."""

    def returned() -> bool:
        client.get_finished()
        return client.connected and client.incarnation == incarnation

    until(returned, PATIENCE)


# One engine


def test_a_daemon_is_killed_and_restarted_under_a_client_that_submits(
    service: DaemonService, engine: ReconnectingFixture
) -> None:
    """The loop below is all that the caller does."""
    began, restarted, said = time.monotonic(), False, set()
    while engine.client.incarnation < 2 or time.monotonic() < began + 1:
        try:
            engine.submit(store(len(engine.accepted) % BLOCKS, len(engine.accepted) % 8))
        except (Gone, Refused) as error:
            said.add(error.code)
        engine.poll()
        if not restarted and time.monotonic() > began + 0.2:
            service.restart()
            restarted = True
        assert time.monotonic() < began + PATIENCE
        time.sleep(0.001)
    engine.check_each_ended_once()
    assert {one.outcome for one in engine.history} <= {"done", "lost"}
    engine.round_trip(3, 0, 9)
    assert said <= {Code.DAEMON_GONE, Code.BUSY}
    assert engine.client.daemon.pid == service.daemon.pid


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_daemon_that_is_away(
    service: DaemonService, engine: ReconnectingFixture, how: str
) -> None:
    """Nothing waits meanwhile, and what is held ends as lost."""
    held = engine.submit(store(1, 1), wait_for=NEVER)
    engine.client.status()
    if how == "kill":
        service.daemon.kill()
    else:
        service.daemon.stop()
    assert engine.result(held).outcome == ("lost" if how == "kill" else "cancelled")
    until(lambda: bool(engine.client.get_finished()) or not engine.client.connected, PATIENCE)
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
    assert time.monotonic() - began < 8
    service.start()
    assert engine.client.status().pid == service.daemon.pid  # waits until it is back
    assert engine.client.incarnation == 2
    engine.round_trip(4, 2, 9)


def test_the_bytes_of_a_daemon_that_was_killed_are_not_loaded(
    service: DaemonService, engine: ReconnectingFixture
) -> None:
    engine.round_trip(3, 0, 9)
    service.restart()
    back(engine.client)
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
    service: DaemonService, engine: ReconnectingFixture
) -> None:
    os.kill(service.daemon.pid, signal.SIGSTOP)
    job = engine.submit(store(3, 0))
    until_then = time.monotonic() + 0.5
    while time.monotonic() < until_then:
        assert engine.poll() == []
    os.kill(service.daemon.pid, signal.SIGCONT)
    assert engine.result(job).success
    assert (engine.client.incarnation, engine.client.gone) == (1, None)


def test_a_restarted_daemon_that_hangs_does_not_block_polls(
    service: DaemonService, engine: ReconnectingFixture
) -> None:
    service.restart()
    os.kill(service.daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        while time.monotonic() < began + 0.5:
            called = time.monotonic()
            engine.poll()
            assert time.monotonic() - called < 8
        assert not engine.client.connected
    finally:
        os.kill(service.daemon.pid, signal.SIGCONT)
    back(engine.client)
    engine.round_trip(3, 0, 9)


def test_a_client_that_starts_without_a_daemon(service: DaemonService) -> None:
    """With a state to restore, the constructor does not wait; polling connects."""
    directory = service.directory
    service.daemon.stop()
    tensor, timeline = shared_empty((BLOCKS, PAGE)), Timeline.create()
    caches = canonicalize({"layer": tensor}, num_blocks=BLOCKS)
    state = SessionState.of_namespace(
        FINGERPRINT,
        cpu_bytes_to_use=8 * PAGE,
        registration=RegistrationState(caches, None, timeline),
    )
    began = time.monotonic()
    client = OffloadClient(lambda: directory, engine="early", state=state)
    with client:
        assert client.lookup(A) is Lookup.MISS
        assert client.get_finished() == []
        with pytest.raises(Gone, match="not connected"):
            client.transfer_async(1, (GPULoadStoreSpec([3]), KeyLoadStoreSpec((A,))))
        assert time.monotonic() - began < 8  # nothing waited for the timeout of 10 s
        with pytest.raises(Gone):
            client.wait_connected(timeout=0.1)
        service.start()
        client.wait_connected(PATIENCE)
        assert client.incarnation == 1
        assert client.namespace.opened.num_blocks == 8
        client.transfer_async(1, (GPULoadStoreSpec([3]), KeyLoadStoreSpec((A,))))
        client.wait([1])
        assert [result.success for result in client.get_finished()] == [True]
        until(lambda: client.lookup(A) is Lookup.HIT, PATIENCE)
    timeline.close()


# What cannot come back


def test_tensors_that_cannot_be_shared_again_raise_nothing_in_a_poll(
    service: DaemonService, engine: ReconnectingFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is in `gone`, and the next attempts may succeed."""

    def fail(*_: object) -> None:
        raise OSError("too many open files")

    with monkeypatch.context() as broken:
        broken.setattr("kvferry.client.tensors.sharing.export_tensors", fail)
        service.restart()
        until(lambda: bool(engine.poll()) or _refused(engine.client), PATIENCE)
        assert engine.client.gone is not None
        cause = engine.client.gone.__cause__
        assert isinstance(cause, Failed)
        assert cause.code == Code.MAP_FAILED
        assert "too many open files" in str(cause)
    back(engine.client)
    engine.round_trip(3, 0, 9)


def _refused(client: OffloadClient) -> bool:
    return client.gone is not None and client.gone.__cause__ is not None


def test_tensors_of_a_daemon_are_the_engine_s_own_for_the_next_one(
    service: DaemonService, engine: ReconnectingFixture
) -> None:
    from support.raw_client import one_tensor

    with OffloadClient(service.directory, engine="other") as client:
        (tensor,) = client.allocate_kv_caches(one_tensor(), host_bytes=512).tensors
        tensor[:] = 0
        for generation in range(2):
            tensor[0] = 3 + generation
            service.restart()
            assert client.status().engines
            specs = GPULoadStoreSpec([0]), CPULoadStoreSpec([1])
            client.transfer_async(1, specs)
            client.wait([1])
            client.transfer_async(2, (specs[1], GPULoadStoreSpec([5])))
            client.wait([2])
            assert all(result.success for result in client.get_finished())
            assert bool((tensor[5] == 3 + generation).all())
        assert client.incarnation == 3


def test_a_closed_timeline_is_the_reason_in_gone(
    service: DaemonService, engine: ReconnectingFixture
) -> None:
    engine.timeline.close()
    service.restart()
    until(lambda: bool(engine.client.get_finished()) or _refused(engine.client), PATIENCE)
    assert "timeline is closed" in str(engine.client.gone)


@pytest.mark.parametrize("state", ["away", "coming"])
def test_closing_while_the_daemon_is_away(service: DaemonService, state: str) -> None:
    client = OffloadClient(service.directory)
    service.daemon.kill()
    until(lambda: bool(client.get_finished()) or not client.connected)
    if state == "coming":
        service.start()
        client.get_finished()
    began = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - began < 8
    assert not client.connecting


# Two clients of an engine


def test_a_scheduler_and_a_worker(service: DaemonService, engine: ReconnectingFixture) -> None:
    """Only one registers; the other submits, and finds its jobs done again."""
    with OffloadClient(service.directory, engine="engine") as scheduler:
        schedule = ReconnectingFixture(scheduler)
        schedule.tensor = engine.tensor
        schedule.round_trip(3, 0, 9)
        service.restart()
        back(scheduler)
        assert scheduler.region is None
        early = schedule.result(schedule.submit(store(3, 0)))
        assert early.error is not None
        assert early.error.code == Code.NOT_REGISTERED
        back(engine.client)
        schedule.round_trip(5, 0, 9)
        stale = schedule.result(schedule.submit(load(1, 9)))
        assert stale.error is not None
        assert stale.error.code == Code.STALE
        schedule.timeline.close()


# A namespace


@pytest.fixture
def engine_in_namespace(service: DaemonService) -> Iterator[ReconnectingFixture]:
    with OffloadClient(service.directory, engine="engine", timeout=PATIENCE) as client:
        client.open_namespace(FINGERPRINT, eviction_policy="arc", cpu_bytes_to_use=8 * PAGE)
        engine = ReconnectingFixture(client)
        client.register_kv_caches({"layer": engine.tensor}, **engine.arguments)
        yield engine
    engine.timeline.close()


def keep(engine: ReconnectingFixture, gpu: int, key: bytes) -> None:
    """Store a block under a key, and see it there."""
    assert engine.result(engine.submit((GPULoadStoreSpec([gpu]), KeyLoadStoreSpec((key,))))).success
    until(lambda: engine.client.lookup(key) is Lookup.HIT, PATIENCE)


def fetch(engine: ReconnectingFixture, key: bytes, gpu: int) -> TransferResult:
    return engine.result(engine.submit((KeyLoadStoreSpec((key,)), GPULoadStoreSpec([gpu]))))


def test_after_a_restart_keys_of_others_are_hits_and_pins_are_restored(
    service: DaemonService, engine_in_namespace: ReconnectingFixture
) -> None:
    """The other client is back first, and stores a key that this one has pinned."""
    client = engine_in_namespace.client
    keep(engine_in_namespace, 3, A)
    client.pin([A, A, C])
    service.restart()
    with OffloadClient(service.directory, engine="other") as other:
        other.open_namespace(FINGERPRINT, cpu_bytes_to_use=8 * PAGE)
        engine = ReconnectingFixture(other)
        other.register_kv_caches({"layer": engine.tensor}, **engine.arguments)
        keep(engine, 5, A)
        back(client)
        assert client.lookup(A) is Lookup.HIT
        until(lambda: other.namespaces()[0].pinned == 1, PATIENCE)
        client.unpin([A])
        assert client.namespaces()[0].pinned == 1
        client.unpin([A, C])
        assert client.namespaces()[0].pinned == 0
        assert fetch(engine_in_namespace, A, 9).success
        assert bool((engine_in_namespace.tensor[9] == 5).all())
        engine.timeline.close()


def test_a_manager_continues_after_a_restart_of_the_daemon(
    service: DaemonService, engine_in_namespace: ReconnectingFixture
) -> None:
    with OffloadingManager.connect(
        [service.directory], engine="engine", fingerprint=FINGERPRINT, events=True
    ) as manager:
        keep(engine_in_namespace, 3, A)
        until(lambda: manager.lookup(A) is Lookup.HIT, PATIENCE)
        assert [event.removed for event in manager.take_events()] == [False]
        service.daemon.kill()
        until(lambda: manager.lookup(A) is Lookup.MISS, PATIENCE)
        assert [event.removed for event in manager.take_events()] == [True]
        output = manager.prepare_store([B])
        assert output is not None
        assert output.keys_to_store == ()
        service.start()
        back(engine_in_namespace.client)
        until(lambda: bool(manager.take_events()) or manager.gone is None, PATIENCE)
        output = manager.prepare_store([A, B])
        assert output is not None
        assert output.keys_to_store == (A, B)
        assert engine_in_namespace.result(
            engine_in_namespace.submit((GPULoadStoreSpec([5, 6]), output.store_spec))
        ).success
        manager.complete_store([A, B])
        until(lambda: manager.lookup(B) is Lookup.HIT, PATIENCE)
        (event,) = manager.take_events()
        assert set(event.keys) == {A, B}


# A daemon whose service manager kept its pool


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[ServiceManager]:
    command = kvferryd_command(tmp_path / "run", pool_chunk=4 << 20)
    with ServiceManager(command, tmp_path / "notify", log=tmp_path / "kvferryd.log") as manager:
        manager.start(ready=False)
        yield manager


def test_keys_and_pins_outlive_a_daemon_that_keeps_its_pool(
    kept: ServiceManager, tmp_path: Path
) -> None:
    with OffloadClient(tmp_path / "run" / "cpu", engine="engine", timeout=PATIENCE) as client:
        client.open_namespace(FINGERPRINT, cpu_bytes_to_use=8 * PAGE)
        engine = ReconnectingFixture(client)
        client.register_kv_caches({"layer": engine.tensor}, **engine.arguments)
        keep(engine, 3, A)
        keep(engine, 4, B)
        client.pin([A])
        await_committed(kept, 2)
        kept.kill()
        kept.start(ready=False)
        with OffloadClient(tmp_path / "run" / "cpu", engine="observer") as observer:
            # A pin of a key whose block is not verified yet keeps nothing.
            until(lambda: observer.namespaces()[0].unverified == 0, PATIENCE)
        back(client)
        assert client.namespace.opened.reattached
        assert [client.lookup(key) for key in (A, B, C)] == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
        assert client.namespaces()[0].pinned == 1
        assert fetch(engine, A, 9).success
        assert bool((engine.tensor[9] == 3).all())
        engine.timeline.close()


# asyncio


async def registered(service: DaemonService) -> tuple[AsyncOffloadClient, ReconnectingFixture]:
    client = await AsyncOffloadClient.connect(service.directory, engine="async", timeout=PATIENCE)
    engine = ReconnectingFixture(client)
    await client.register_kv_caches(
        {"layer": engine.tensor}, host_bytes=8 * PAGE, **engine.arguments
    )
    return client, engine


async def test_an_asyncio_client_reconnects_by_itself(service: DaemonService) -> None:
    """Nothing is called meanwhile."""
    client, engine = await registered(service)
    held = engine.submit(store(1, 1), wait_for=NEVER)
    waiting = asyncio.create_task(client.wait([held]))
    await client.status()
    await asyncio.to_thread(service.restart)
    await waiting
    await eventually(lambda: client.connected)
    assert client.incarnation == 2
    assert (await client.status()).pid == service.daemon.pid
    job = engine.submit(store(3, 0))
    await client.wait([job])
    job = engine.submit(load(0, 9))
    await client.wait([job])
    assert torch.equal(engine.tensor[9], engine.tensor[3])
    engine.check_each_ended_once()
    assert [one.outcome for one in engine.history] == ["lost", "done", "done"]
    await client.close()
    engine.timeline.close()


async def test_an_asyncio_verb_waits_for_the_daemon(service: DaemonService) -> None:
    client, engine = await registered(service)
    service.daemon.kill()
    await eventually(lambda: client.connecting)
    with pytest.raises(Gone) as gone:
        await client.status(timeout=0.2)
    assert gone.value.code == Code.DAEMON_GONE
    asking = asyncio.create_task(client.status())
    await asyncio.to_thread(service.start)
    assert (await asking).pid == service.daemon.pid
    await client.close()
    engine.timeline.close()


async def test_closing_an_asyncio_client_while_the_daemon_is_away(service: DaemonService) -> None:
    client, engine = await registered(service)
    service.daemon.kill()
    await eventually(lambda: client.connecting)
    async with asyncio.timeout(8):
        await client.close()
    assert not client.connecting
    await asyncio.sleep(0.1)
    engine.timeline.close()
