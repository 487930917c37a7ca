"""A restarted daemon has the blocks that were stored, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.client import (
    Code,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    Lookup,
    OffloadClient,
)
from kvferry.testing.engine import until
from support.restarting_fixture import (
    LAYOUT,
    OWN,
    PAGE,
    RestartedService,
    keys,
    verified,
)

from .block_tables import await_committed


@pytest.fixture
def service_on_device(short_path: Path, device: str) -> Iterator[RestartedService]:
    """On a GPU as well."""
    restarted_service = RestartedService(short_path, device)
    with restarted_service.manager:
        restarted_service.start()
        yield restarted_service


def test_stored_keys_are_hits_after_a_restart(service_on_device: RestartedService) -> None:
    with service_on_device.engine() as one:
        content = one.fill(range(8), seed=1)
        assert one.store(range(8), keys(1, 2, 3, 4)).success
        assert one.store([8], keys(5)).success  # half of a host block
        await_committed(service_on_device.manager, 5)
    service_on_device.restart()
    with service_on_device.engine("two") as two:
        assert two.opened.reattached
        until(lambda: two.lookup(1, 2, 3, 4) == [Lookup.HIT] * 4, 20)
        assert two.lookup(6) == [Lookup.MISS]
        assert two.load(keys(3, 1), [20, 21, 22, 23]).success
        assert torch.equal(two.read(range(20, 24)), content[[4, 5, 0, 1]])
        half = two.load(keys(5), [24, 25])
        assert half.error is not None
        assert half.error.code == Code.KEY_ABSENT
        until(lambda: verified(two.client), 20)
    assert "region restored" in service_on_device.manager.log()


def test_stores_between_restarts_accumulate(
    restarted_service: RestartedService,
) -> None:
    contents: dict[int, torch.Tensor] = {}
    for round_ in range(3):
        with restarted_service.engine() as engine:
            until(lambda: engine.lookup(*range(round_)) == [Lookup.HIT] * round_, 20)  # noqa: B023
            for number in range(round_):
                assert engine.load(keys(number), [0, 1]).success
                assert torch.equal(engine.read(range(2)), contents[number])
            contents[round_] = engine.fill([4, 5], seed=round_)
            assert engine.store([4, 5], keys(round_)).success
            await_committed(restarted_service.manager, round_ + 1)
        restarted_service.restart()


def test_a_store_that_was_in_flight_is_not_resident(tmp_path: Path) -> None:
    restarted_service = RestartedService(tmp_path)
    with restarted_service.manager:
        restarted_service.start()
        with restarted_service.engine() as one:
            assert one.store([0, 1], keys(1)).success
            await_committed(restarted_service.manager, 1)
        restarted_service.restart(reference_stall=0.5)
        with restarted_service.engine() as one:
            one.submit((GPULoadStoreSpec(range(16)), KeyLoadStoreSpec(keys(*range(2, 10)))))
            until(lambda: one.client.namespaces()[0].pending == 8)
            restarted_service.restart()
        with restarted_service.engine() as one:
            one.await_verified()
            assert one.lookup(*range(1, 10)) == [Lookup.HIT] + [Lookup.MISS] * 8


def test_keys_that_were_evicted_or_reset_stay_away(restarted_service: RestartedService) -> None:
    with restarted_service.engine() as one:
        blocks = one.opened.num_blocks
        for first in range(0, blocks + 16, 16):
            assert one.store(range(32), keys(*range(first, first + 16))).success
        await_committed(restarted_service.manager, blocks)
    restarted_service.restart()
    with restarted_service.engine() as one:
        one.await_verified()
        assert one.lookup(0, 15, 16, blocks + 15) == [Lookup.MISS] * 2 + [Lookup.HIT] * 2
        one.client.reset()
    restarted_service.restart()
    with restarted_service.engine() as one:
        assert one.opened.reattached
        assert one.lookup(16, blocks + 15) == [Lookup.MISS] * 2
        assert one.opened.generation == 2


def test_the_order_of_use_is_kept_over_a_restart(restarted_service: RestartedService) -> None:
    with restarted_service.engine() as one:
        blocks = one.opened.num_blocks
        for first in range(0, blocks, 16):
            assert one.store(range(32), keys(*range(first, first + 16))).success
        await_committed(restarted_service.manager, blocks)
        assert one.load(keys(3), [0, 1]).success
    restarted_service.restart()
    with restarted_service.engine() as one:
        one.await_verified()
        assert one.store(range(32), keys(*range(9000, 9016))).success
        assert one.lookup(3, 16) == [Lookup.HIT] * 2
        assert one.lookup(0, 15) == [Lookup.MISS] * 2


def test_bytes_that_changed_meanwhile_are_never_loaded(service_on_device: RestartedService) -> None:
    with service_on_device.engine() as one:
        content = one.fill(range(4), seed=1)
        assert one.store(range(4), keys(1, 2)).success
        await_committed(service_on_device.manager, 2)
    service_on_device.manager.kill()
    service_on_device.change("pool-00000", OWN + PAGE + 17, b"\x00\x01\x02\x03")
    service_on_device.start()
    with service_on_device.engine() as one:
        result = one.load(keys(1), [20, 21])
        assert not result.success
        assert result.error is not None
        assert result.error.code in (Code.CORRUPT_BLOCK, Code.KEY_ABSENT)
        until(lambda: one.lookup(1) == [Lookup.MISS])
        assert one.load(keys(2), [20, 21]).success
        assert torch.equal(one.read(range(20, 22)), content[2:])
        content = one.fill([0, 1], seed=2)  # and it can be stored anew
        assert one.store([0, 1], keys(1)).success
        assert one.load(keys(1), [8, 9]).success
        assert torch.equal(one.read(range(8, 10)), content)


def test_a_block_that_changes_while_the_daemon_runs_is_found_by_the_scrub(tmp_path: Path) -> None:
    restarted_service = RestartedService(tmp_path, integrity_scrub_rate="1GiB")
    with restarted_service.manager:
        restarted_service.start()
        with restarted_service.engine() as one:
            assert one.store(range(4), keys(1, 2)).success
            await_committed(restarted_service.manager, 2)
            restarted_service.change("pool-00000", OWN + 5, b"tampered")
            until(lambda: one.lookup(1, 2) == [Lookup.MISS, Lookup.HIT])
            assert not one.load(keys(1), range(2)).success
            assert one.load(keys(2), range(2)).success
            assert one.client.status().errors[Code.CORRUPT_BLOCK] == 1
        assert "host blocks corrupt" in restarted_service.manager.log()


def test_blocks_by_number_are_loadable_after_a_restart(
    service_on_device: RestartedService,
) -> None:
    with service_on_device.engine(namespace=False) as one:
        content = one.fill(range(4), seed=3)
        assert one.run((GPULoadStoreSpec(range(4)), CPULoadStoreSpec([7, 9]))).success
        await_committed(service_on_device.manager, 2)
    service_on_device.restart()
    with service_on_device.engine(namespace=False) as one:
        assert one.region.reattached
        back = CPULoadStoreSpec([9, 7]), GPULoadStoreSpec(range(10, 14))
        until(lambda: one.run(back).success, 20)
        assert torch.equal(one.read(range(10, 14)), content[[2, 3, 0, 1]])
        never = one.run((CPULoadStoreSpec([7, 8]), GPULoadStoreSpec(range(10, 14))))
        assert never.error is not None
        assert never.error.code == Code.STALE
        assert one.run((GPULoadStoreSpec(range(2)), CPULoadStoreSpec([8]))).success
        assert one.run((CPULoadStoreSpec([7, 8]), GPULoadStoreSpec(range(10, 14)))).success


def test_a_freed_region_is_not_restored(restarted_service: RestartedService) -> None:
    with restarted_service.engine("old", namespace=False) as old:
        assert old.run((GPULoadStoreSpec(range(2)), CPULoadStoreSpec([0]))).success
        await_committed(restarted_service.manager, 1)
    with OffloadClient(restarted_service.directory, engine="new") as new:
        until(lambda: not any(engine.present for engine in new.status().engines))
        new.allocate_kv_caches(LAYOUT, host_bytes=16 << 20)
        until(
            lambda: (
                len([n for n in restarted_service.manager.names if n.startswith("block-table-")])
                == 1
            )
        )
    restarted_service.restart()
    with restarted_service.engine("old", namespace=False) as old:
        assert not old.region.reattached
