"""The tests of tier_conformance.py, which documents how to run them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from kvferry.daemon.tiers.base import Result
from kvferry.testing.tier_subjects import NAMESPACE, PoolMemory, Subject, TierSetup, open_subject

__all__ = [
    "pool",
    "tier",
    "test_put_blocks_are_found_and_fetched",
    "test_a_key_put_twice_is_stored_once",
    "test_a_key_is_in_one_namespace_only",
    "test_a_drop_includes_the_parts_of_a_namespace",
    "test_dropped_keys_are_missing_and_can_be_put_again",
    "test_no_block_is_read_after_the_deadline",
    "test_the_capacity_is_kept_and_old_keys_are_evicted",
]

OK, MISS, PRESENT = Result.OK, Result.MISS, Result.PRESENT
LATE, FULL = Result.LATE, Result.FULL
# Half of the bytes that are put into a tier without a capacity.
UNBOUNDED_BYTES = 4 << 20


@pytest.fixture(params=[16 << 10, 12_345], ids=["pages", "odd"])
def pool(request: pytest.FixtureRequest) -> Iterator[PoolMemory]:
    """A pool whose blocks are whole pages, and one whose blocks cross pages and chunks."""
    pool = PoolMemory(request.param, 0 if request.param % 4096 == 0 else 100)
    yield pool
    pool.files.close()


@pytest.fixture
def tier(
    tier_setup: TierSetup, pool: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Subject]:
    """The tier's process finds modules where this process does, and in the current directory."""
    path = [*sys.path, os.getcwd()]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    with open_subject(tier_setup, pool) as opened:
        yield opened


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


def test_a_key_is_in_one_namespace_only(tier: Subject) -> None:
    other = "f" * 16
    tier.put([1])
    assert tier.contains([1], other) == [False]
    assert tier.fetch([1], other) == [MISS]
    tier.put([1, 2], other)
    tier.drop(namespace=NAMESPACE)
    assert tier.contains([1, 2], NAMESPACE) == [False, False]
    assert tier.fetch([1, 2], other) == [OK, OK]


def test_a_drop_includes_the_parts_of_a_namespace(tier: Subject) -> None:
    parts, other = (NAMESPACE, f"{NAMESPACE}-a", f"{NAMESPACE}-b"), f"{NAMESPACE}2"
    for name in (*parts, other):
        tier.put([1], name)
    tier.drop(namespace=NAMESPACE)
    assert [tier.contains([1], name) for name in parts] == [[False]] * 3
    assert tier.fetch([1], other) == [OK]


def test_dropped_keys_are_missing_and_can_be_put_again(tier: Subject) -> None:
    tier.put([1, 2, 3])
    tier.drop([2, 9])
    assert tier.fetch([1, 2, 3]) == [OK, MISS, OK]
    tier.drop()
    assert tier.contains([1, 2, 3]) == [False] * 3
    assert tier.fetch([1, 2, 3]) == [MISS] * 3
    assert tier.put([1, 2]) == [OK, OK]
    assert tier.fetch([1, 2, 3]) == [OK, OK, MISS]


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
