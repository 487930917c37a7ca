"""Keys, pins and managers of a client whose daemon is killed and restarted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.client import (
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    Lookup,
    OffloadClient,
    OffloadingManager,
    TransferResult,
)
from kvferry.testing.engine import until
from support.reconnecting_fixture import (
    FINGERPRINT,
    PAGE,
    A,
    B,
    C,
    DaemonService,
    ReconnectingFixture,
    wait_reconnected,
)
from support.service_manager import ServiceManager, kvferryd_command
from support.time_limits import TIMEOUT

from .block_tables import await_committed


@pytest.fixture
def engine_in_namespace(daemon_service: DaemonService) -> Iterator[ReconnectingFixture]:
    with OffloadClient(daemon_service.directory, engine="engine", timeout=TIMEOUT) as client:
        client.open_namespace(FINGERPRINT, eviction_policy="arc", cpu_bytes_to_use=8 * PAGE)
        engine = ReconnectingFixture(client)
        client.register_kv_caches({"layer": engine.tensor}, **engine.arguments)
        yield engine
    engine.timeline.close()


def store_key(engine: ReconnectingFixture, gpu: int, key: bytes) -> None:
    """Store a block under a key, and wait until the lookup is a hit."""
    assert engine.result(engine.submit((GPULoadStoreSpec([gpu]), KeyLoadStoreSpec((key,))))).success
    until(lambda: engine.client.lookup(key) is Lookup.HIT)


def load_key(engine: ReconnectingFixture, key: bytes, gpu: int) -> TransferResult:
    return engine.result(engine.submit((KeyLoadStoreSpec((key,)), GPULoadStoreSpec([gpu]))))


def test_after_a_restart_keys_of_others_are_hits_and_pins_are_restored(
    daemon_service: DaemonService, engine_in_namespace: ReconnectingFixture
) -> None:
    """The other client reconnects first, and stores a key that this one has pinned."""
    client = engine_in_namespace.client
    store_key(engine_in_namespace, 3, A)
    client.pin([A, A, C])
    daemon_service.restart()
    with OffloadClient(daemon_service.directory, engine="other") as other:
        other.open_namespace(FINGERPRINT, cpu_bytes_to_use=8 * PAGE)
        engine = ReconnectingFixture(other)
        other.register_kv_caches({"layer": engine.tensor}, **engine.arguments)
        store_key(engine, 5, A)
        wait_reconnected(client)
        assert client.lookup(A) is Lookup.HIT
        until(lambda: other.namespaces()[0].pinned == 1)
        client.unpin([A])
        assert client.namespaces()[0].pinned == 1
        client.unpin([A, C])
        assert client.namespaces()[0].pinned == 0
        assert load_key(engine_in_namespace, A, 9).success
        assert bool((engine_in_namespace.tensor[9] == 5).all())
        engine.timeline.close()


def test_a_manager_continues_after_a_restart_of_the_daemon(
    daemon_service: DaemonService, engine_in_namespace: ReconnectingFixture
) -> None:
    with OffloadingManager.connect(
        [daemon_service.directory], engine="engine", fingerprint=FINGERPRINT, events=True
    ) as manager:
        store_key(engine_in_namespace, 3, A)
        until(lambda: manager.lookup(A) is Lookup.HIT)
        assert [event.removed for event in manager.take_events()] == [False]
        daemon_service.daemon.kill()
        until(lambda: manager.lookup(A) is Lookup.MISS)
        assert [event.removed for event in manager.take_events()] == [True]
        output = manager.prepare_store([B])
        assert output is not None
        assert output.keys_to_store == ()
        daemon_service.start()
        wait_reconnected(engine_in_namespace.client)
        until(lambda: bool(manager.take_events()) or manager.gone is None)
        output = manager.prepare_store([A, B])
        assert output is not None
        assert output.keys_to_store == (A, B)
        assert engine_in_namespace.result(
            engine_in_namespace.submit((GPULoadStoreSpec([5, 6]), output.store_spec))
        ).success
        manager.complete_store([A, B])
        until(lambda: manager.lookup(B) is Lookup.HIT)
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
    with OffloadClient(tmp_path / "run" / "cpu", engine="engine", timeout=TIMEOUT) as client:
        client.open_namespace(FINGERPRINT, cpu_bytes_to_use=8 * PAGE)
        engine = ReconnectingFixture(client)
        client.register_kv_caches({"layer": engine.tensor}, **engine.arguments)
        store_key(engine, 3, A)
        store_key(engine, 4, B)
        client.pin([A])
        await_committed(kept, 2)
        kept.kill()
        kept.start(ready=False)
        with OffloadClient(tmp_path / "run" / "cpu", engine="observer") as observer:
            # A pin has no effect before the key's block is verified.
            until(lambda: observer.namespaces()[0].unverified == 0)
        wait_reconnected(client)
        assert client.namespace.opened.reattached
        assert [client.lookup(key) for key in (A, B, C)] == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
        assert client.namespaces()[0].pinned == 1
        assert load_key(engine, A, 9).success
        assert bool((engine.tensor[9] == 3).all())
        engine.timeline.close()
