"""A restarted daemon has the blocks whose stores completed, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.client import (
    Code,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    Lookup,
    OffloadClient,
)
from kvferry.testing.engine import until
from support.reconnecting_fixture import wait_reconnected
from support.restarting_fixture import (
    OWN,
    PAGE,
    RestartedService,
    keys,
    verified,
)

from .block_tables import await_committed


@pytest.fixture
def service_on_device(short_path: Path, device: str) -> Iterator[RestartedService]:
    """A restarted service that also runs on a GPU."""
    restarted_service = RestartedService(short_path, device)
    with restarted_service.manager:
        restarted_service.start()
        yield restarted_service


def test_stored_keys_are_hits_after_a_restart(service_on_device: RestartedService) -> None:
    with service_on_device.engine() as engine:
        content = engine.fill(range(8), seed=1)
        assert engine.store(range(8), keys(1, 2, 3, 4)).success
        assert engine.store([8], keys(5)).success  # half of a host block
        await_committed(service_on_device.manager, 5)
    service_on_device.restart()
    with service_on_device.engine("two") as second:
        assert second.opened.reattached
        until(lambda: second.lookup(1, 2, 3, 4) == [Lookup.HIT] * 4)
        assert second.lookup(6) == [Lookup.MISS]
        assert second.load(keys(3, 1), [20, 21, 22, 23]).success
        assert torch.equal(second.read(range(20, 24)), content[[4, 5, 0, 1]])
        half = second.load(keys(5), [24, 25])
        assert half.error is not None
        assert half.error.code == Code.KEY_ABSENT
        until(lambda: verified(second.client))
    assert "region restored" in service_on_device.manager.log()


def test_bytes_that_changed_during_a_restart_are_not_loaded(
    service_on_device: RestartedService,
) -> None:
    with service_on_device.engine() as engine:
        content = engine.fill(range(4), seed=1)
        assert engine.store(range(4), keys(1, 2)).success
        await_committed(service_on_device.manager, 2)
    service_on_device.manager.kill()
    service_on_device.overwrite("pool-00000", OWN + PAGE + 17, b"\x00\x01\x02\x03")
    service_on_device.start()
    with service_on_device.engine() as engine:
        result = engine.load(keys(1), [20, 21])
        assert not result.success
        assert result.error is not None
        assert result.error.code in (Code.CORRUPT_BLOCK, Code.KEY_ABSENT)
        until(lambda: engine.lookup(1) == [Lookup.MISS])
        assert engine.load(keys(2), [20, 21]).success
        assert torch.equal(engine.read(range(20, 22)), content[2:])
        content = engine.fill([0, 1], seed=2)  # the key can be stored again
        assert engine.store([0, 1], keys(1)).success
        assert engine.load(keys(1), [8, 9]).success
        assert torch.equal(engine.read(range(8, 10)), content)


def test_a_block_that_changes_while_the_daemon_runs_is_found_by_the_scrub(tmp_path: Path) -> None:
    restarted_service = RestartedService(tmp_path, integrity_scrub_rate="1GiB")
    with restarted_service.manager:
        restarted_service.start()
        with restarted_service.engine() as engine:
            assert engine.store(range(4), keys(1, 2)).success
            await_committed(restarted_service.manager, 2)
            restarted_service.overwrite("pool-00000", OWN + 5, b"tampered")
            until(lambda: engine.lookup(1, 2) == [Lookup.MISS, Lookup.HIT])
            assert not engine.load(keys(1), range(2)).success
            assert engine.load(keys(2), range(2)).success
            assert engine.client.status().errors[Code.CORRUPT_BLOCK] == 1
            assert engine.store(range(2), keys(1)).success
            until(lambda: engine.lookup(1) == [Lookup.HIT])
        assert "host blocks corrupt" in restarted_service.manager.log()


def test_blocks_by_number_are_loadable_after_a_restart(
    service_on_device: RestartedService,
) -> None:
    with service_on_device.engine(namespace=False) as engine:
        content = engine.fill(range(4), seed=3)
        assert engine.run((GPULoadStoreSpec(range(4)), CPULoadStoreSpec([7, 9]))).success
        await_committed(service_on_device.manager, 2)
    service_on_device.restart()
    with service_on_device.engine(namespace=False) as engine:
        assert engine.region.reattached
        spec = CPULoadStoreSpec([9, 7]), GPULoadStoreSpec(range(10, 14))
        until(lambda: engine.run(spec).success)
        assert torch.equal(engine.read(range(10, 14)), content[[2, 3, 0, 1]])
        undefined = engine.run((CPULoadStoreSpec([7, 8]), GPULoadStoreSpec(range(10, 14))))
        assert undefined.error is not None
        assert undefined.error.code == Code.STALE
        assert engine.run((GPULoadStoreSpec(range(2)), CPULoadStoreSpec([8]))).success
        assert engine.run((CPULoadStoreSpec([7, 8]), GPULoadStoreSpec(range(10, 14)))).success


def test_a_client_reconnects_and_finds_its_keys_and_pins(
    restarted_service: RestartedService,
) -> None:
    with restarted_service.engine() as engine:
        content = engine.fill(range(4), seed=1)
        assert engine.store(range(4), keys(1, 2)).success
        engine.client.pin(keys(1))
        await_committed(restarted_service.manager, 2)
        restarted_service.restart()
        with OffloadClient(restarted_service.directory, engine="observer") as observer:
            # A pin has no effect before the key's block is verified.
            until(lambda: verified(observer))
        wait_reconnected(engine.client)
        assert engine.client.namespace.opened.reattached
        assert engine.lookup(1, 2, 3) == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
        assert engine.client.namespaces()[0].pinned == 1
        assert engine.load(keys(1), [8, 9]).success
        assert torch.equal(engine.read([8, 9]), content[:2])
