"""The tests of tier_conformance.py, which documents how to run them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.base import Result
from kvferry.testing.engine import until
from kvferry.testing.tier_subjects import NAMESPACE, PoolMemory, Subject, TierSetup, open_subject

__all__ = [
    "pool",
    "module_path",
    "tier",
    "test_put_blocks_are_found_and_fetched",
    "test_a_key_put_twice_is_stored_once",
    "test_a_key_is_in_one_store_only",
    "test_a_dropped_store_leaves_others_of_its_namespace",
    "test_dropped_keys_are_missing_and_can_be_put_again",
    "test_no_block_is_read_after_the_deadline",
    "test_the_capacity_is_kept_and_old_keys_are_evicted",
    "test_stores_that_outlived_the_process_are_named",
    "test_another_epoch_is_used_once_it_is_settled",
]

OK, MISS, PRESENT = Result.OK, Result.MISS, Result.PRESENT
LATE, FULL = Result.LATE, Result.FULL
# Seconds for a shared tier to settle an epoch.
TIMEOUT = 30.0
# Half of the bytes that are put into a tier without a capacity.
UNBOUNDED_BYTES = 4 << 20
# A namespace beside NAMESPACE, and an epoch of a namespace that was reset.
OTHER, EPOCH = "f" * 16, (1_700_000_000_000_000 << 10) + 345


@pytest.fixture(params=[16 << 10, 12_345], ids=["pages", "odd"])
def pool(request: pytest.FixtureRequest) -> Iterator[PoolMemory]:
    """A pool whose blocks are whole pages, and one whose blocks cross pages and chunks."""
    pool = PoolMemory(request.param, 0 if request.param % 4096 == 0 else 100)
    yield pool
    pool.files.close()


@pytest.fixture
def module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier's process finds modules where this process does, and in the current directory."""
    path = [*sys.path, os.getcwd()]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


@pytest.fixture
def tier(tier_setup: TierSetup, pool: PoolMemory, module_path: None) -> Iterator[Subject]:
    with open_subject(tier_setup, pool) as opened:
        settle(opened, tier_setup, {NAMESPACE: 0, OTHER: 0})
        yield opened


def settle(tier: Subject, setup: TierSetup, epochs: dict[str, int]) -> None:
    """Settle epochs if it is a shared tier. Other tiers do not know what an epoch is."""
    if setup.shared:
        until(lambda: tier.settle(epochs) == epochs, TIMEOUT)


def test_put_blocks_are_found_and_fetched(tier: Subject) -> None:
    assert tier.contains([1, 2]) == [False, False]
    assert tier.fetch([1]) == [MISS]
    assert tier.put([1, 2, 3]) == [OK] * 3
    assert tier.contains([3, 4, 1]) == [True, False, True]
    assert tier.fetch([3, 4, 1, 2]) == [OK, MISS, OK, OK]


def test_a_key_put_twice_is_stored_once(tier: Subject) -> None:
    tier.put([1])
    before = tier.usage()
    assert set(tier.put([1, 1])) <= {OK, PRESENT}
    after = tier.usage()
    assert (after.keys, after.used_bytes) == (before.keys, before.used_bytes)
    assert tier.fetch([1]) == [OK]


def test_a_key_is_in_one_store_only(tier: Subject) -> None:
    tier.put([1])
    assert tier.contains([1], OTHER) == [False]
    assert tier.fetch([1], OTHER) == [MISS]
    tier.put([1, 2], OTHER)
    tier.drop()
    assert tier.fetch([1, 2], OTHER) == [OK, OK]


def test_a_dropped_store_leaves_others_of_its_namespace(
    tier: Subject, tier_setup: TierSetup
) -> None:
    """Their blocks are composed otherwise. Those of another epoch are a dropped store, mostly."""
    dropped, composed, later = (
        str(StoreName(NAMESPACE, *rest)) for rest in (("a",), ("b",), ("a", EPOCH))
    )
    tier.put([1, 2], dropped)
    tier.put([3], composed)
    tier.drop(store=dropped)
    assert tier.fetch([3], composed) == [OK]
    if not tier_setup.shared:  # other hosts may use what it has
        assert tier.usage().keys == 1
    settle(tier, tier_setup, {NAMESPACE: EPOCH})
    assert tier.fetch([1], later) == [MISS]
    assert tier.put([4], later) == [OK]
    tier.drop(store=dropped)
    tier.drop(store=composed)
    assert tier.fetch([4], later) == [OK]


def test_dropped_keys_are_missing_and_can_be_put_again(tier: Subject) -> None:
    tier.put([1, 2, 3])
    tier.drop([2, 9])
    assert tier.contains([1, 2, 3]) == [True, False, True]
    assert tier.fetch([1, 2, 3]) == [OK, MISS, OK]
    assert tier.put([2]) == [OK]
    assert tier.fetch([1, 2, 3]) == [OK, OK, OK]


def test_no_block_is_read_after_the_deadline(tier: Subject) -> None:
    tier.put([1, 2])
    assert tier.fetch([1, 2], seconds=-1.0) == [LATE, LATE]


def test_the_capacity_is_kept_and_old_keys_are_evicted(
    tier: Subject, tier_setup: TierSetup, pool: PoolMemory
) -> None:
    """The keys used last are kept. A tier that does not report its capacity may be full."""
    capacity = tier_setup.capacity
    total = 2 * (capacity or UNBOUNDED_BYTES) // pool.block_bytes // 16 * 16
    stored = list[int]()
    for first in range(0, total, 16):
        numbers = range(first, first + 16)
        results = tier.put(numbers)
        stored += [n for n, result in zip(numbers, results, strict=True) if result is OK]
        usage = tier.usage()
        if capacity and usage.capacity_bytes:
            assert set(results) == {OK}
            assert usage.used_bytes <= usage.capacity_bytes == capacity
        assert set(results) <= {OK, FULL}
        tier.fetch([0])  # so that key 0 is always among the keys used last
    assert tier.contains([0]) == [True]
    recent = tier.contains(stored[-32:])
    assert sum(recent) > 24
    if capacity and usage.capacity_bytes:
        assert 0.5 * capacity < usage.keys * pool.block_bytes <= capacity
        assert usage.evictions > 0
    found = 0
    for first in range(0, total, 16):
        # Checks the bytes of the blocks that are found.
        found += tier.fetch(range(first, first + 16)).count(OK)
    if capacity:
        assert found < total, f"it has room for more than its capacity of {capacity} bytes"


def test_stores_that_outlived_the_process_are_named(
    tier_setup: TierSetup, pool: PoolMemory, module_path: None
) -> None:
    """The daemon drops the old ones, and learns the epoch of the latest one."""
    if not tier_setup.keeps:
        pytest.skip("it keeps nothing")
    names = [str(StoreName(NAMESPACE, "a", epoch)) for epoch in (0, EPOCH)]
    with open_subject(tier_setup, pool) as tier:
        assert tier.stores() == []
        for name in names:
            assert tier.put([1], name) == [OK]
    with open_subject(tier_setup, pool) as tier:
        assert sorted(tier.stores()) == names
        assert tier.fetch([1], names[1]) == [OK]
        tier.drop(store=names[0])
    with open_subject(tier_setup, pool) as tier:
        assert tier.stores() == names[1:]


def test_another_epoch_is_used_once_it_is_settled(tier: Subject, tier_setup: TierSetup) -> None:
    if not tier_setup.shared:
        pytest.skip("no other host uses it")
    old, new = (str(StoreName(NAMESPACE, "a", epoch)) for epoch in (0, EPOCH))
    assert tier.put([1], old) == [OK]
    assert tier.put([1], new) == [FULL]
    settle(tier, tier_setup, {NAMESPACE: EPOCH})
    assert tier.put([2], new) == [OK]
    assert tier.fetch([1, 2], new) == [MISS, OK]
    assert tier.contains([1], old) == [False]
    assert tier.fetch([1], old) == [MISS]
    assert tier.put([1], old) == [FULL]
    # The storage keeps the later one, which a host that was not reset must adopt.
    until(lambda: tier.settle({NAMESPACE: 0}) == {NAMESPACE: EPOCH}, TIMEOUT)
    assert tier.contains([1], old) == [False]
    settle(tier, tier_setup, {NAMESPACE: EPOCH})
    assert tier.fetch([2], new) == [OK]
