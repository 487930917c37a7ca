"""What every tier must do, over all implementations, in this process and through their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.daemon.tiers.base import Result

from .subjects import NAMESPACE, PoolMemory, Subject, subject

SIZE = 4 << 20
OK, MISS, LATE = Result.OK, Result.MISS, Result.LATE


@pytest.fixture(params=[16 << 10, 12_345], ids=["pages", "odd"])
def pool(request: pytest.FixtureRequest) -> Iterator[PoolMemory]:
    """Blocks of whole pages, and blocks that lie across pages and chunks."""
    pool = PoolMemory(request.param, 0 if request.param % 4096 == 0 else 100)
    yield pool
    pool.files.close()


@pytest.fixture(params=["memory", "disk", "memory-process", "disk-process"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, pool: PoolMemory) -> Iterator[Subject]:
    with subject(request.param, tmp_path / "tier", pool, SIZE) as made:
        yield made


def test_what_was_put_is_found_and_fetched(tier: Subject) -> None:
    assert tier.contains([1, 2]) == [False, False]
    assert tier.fetch([1]) == [MISS]
    assert tier.put([1, 2, 3]) == [OK] * 3
    assert tier.contains([3, 4, 1]) == [True, False, True]
    assert tier.fetch([3, 4, 1, 2]) == [OK, MISS, OK, OK]


def test_a_key_that_is_put_twice_is_stored_once(tier: Subject) -> None:
    tier.put([1])
    used = tier.usage().used_bytes
    assert tier.put([1, 1]) == [OK, OK]
    assert (tier.usage().keys, tier.usage().used_bytes) == (1, used)
    assert tier.fetch([1]) == [OK]


def test_namespaces_do_not_see_each_others_keys(tier: Subject) -> None:
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


def test_after_its_deadline_nothing_is_read(tier: Subject) -> None:
    tier.put([1, 2])
    assert tier.fetch([1, 2], seconds=-1.0) == [LATE, LATE]


def test_the_bound_is_kept_and_old_keys_make_room(tier: Subject, pool: PoolMemory) -> None:
    """The keys used last are still there."""
    total = 2 * SIZE // pool.block_bytes
    for first in range(0, total, 16):
        assert set(tier.put(range(first, first + 16))) == {OK}
        usage = tier.usage()
        assert usage.used_bytes <= usage.capacity_bytes == SIZE
        tier.fetch([0])  # it is in use all the time
    assert tier.contains([0]) == [True]
    recent = tier.contains(range(total - 32, total))
    assert sum(recent) > 24
    assert 0.5 * SIZE < usage.keys * pool.block_bytes <= SIZE
    assert usage.evictions > 0
    for first in range(0, total, 16):
        tier.fetch(range(first, first + 16))  # checks the bytes of what is there
