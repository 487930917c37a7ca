"""How namespaces share the bound of a disk tier."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvferry.daemon.tiers.base import IN_TIER, Result
from kvferry.daemon.tiers.disk import namespace_store
from kvferry.daemon.tiers.disk.meta import META
from kvferry.daemon.tiers.disk.shares import SHARE_SECONDS
from kvferry.testing.engine import until
from kvferry.testing.tier_subjects import NAMESPACE, PoolMemory

from .disk_fixtures import SIZE, KillableDisk

OTHER = "b" * 16


@pytest.fixture
def disk(
    pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KillableDisk]:
    monkeypatch.setattr(namespace_store, "RETRY_SLAB", 0.01)
    disk = KillableDisk(pool, tmp_path / "tier")
    yield disk
    disk.close()


def fill(disk: KillableDisk, name: str) -> None:
    for number in range(300):
        assert disk.put([number], name)[0] in IN_TIER
        assert disk.usage().used_bytes <= SIZE


def is_written(disk: KillableDisk, name: str) -> bool:
    disk.tier.maintain()
    return disk.put([1], name)[0] in IN_TIER


def age(disk: KillableDisk, name: str, seconds: float = 2 * SHARE_SECONDS) -> None:
    """Restart the tier as if a namespace was used so long ago; in the future if negative."""
    disk.kill()
    then = time.time() - seconds
    os.utime(disk.root / name / META, (then, then))
    disk.open()


@pytest.mark.parametrize("in_use", [True, False])
def test_namespaces_share_the_bound(disk: KillableDisk, in_use: bool) -> None:
    """A full namespace gives a new one slabs until the new one has its share. in_use: the full one;
    if not, it keeps a share, so that the blocks of an engine outlive its restart."""
    fill(disk, NAMESPACE)
    if not in_use:
        disk.tier.note_used([OTHER])
    fill(disk, OTHER)
    mine, theirs = (disk.tier._stores[name].nbytes for name in (NAMESPACE, OTHER))
    assert 0.6 < mine / theirs < 1.7
    kept = disk.contains(range(300)), disk.contains(range(300), OTHER)
    assert min(map(sum, kept)) > 50


def test_a_namespace_that_was_not_used_for_long_gives_everything(disk: KillableDisk) -> None:
    fill(disk, NAMESPACE)
    age(disk, NAMESPACE)
    fill(disk, OTHER)
    assert list(disk.tier._stores) == [OTHER]
    assert sum(disk.contains(range(300), OTHER)) > 120


def test_a_namespace_that_is_searched_keeps_its_share(disk: KillableDisk) -> None:
    """Also over a restart."""
    fill(disk, NAMESPACE)
    age(disk, NAMESPACE)
    disk.contains([1])
    disk.close()
    disk.open()
    fill(disk, OTHER)
    assert sum(disk.contains(range(300))) > 50


def test_a_last_use_in_the_future_counts_as_now(disk: KillableDisk) -> None:
    """The clock was ahead, and was set right. A day later the namespace has no share."""
    fill(disk, NAMESPACE)
    age(disk, NAMESPACE, -1e9)
    store = disk.tier._stores[NAMESPACE]
    assert time.monotonic() - 60 < store.last_used <= time.monotonic()
    store.sync()
    assert (disk.root / NAMESPACE / META).stat().st_mtime <= time.time()


def test_namespaces_that_are_not_in_use_take_nothing_from_one_that_is(disk: KillableDisk) -> None:
    """Without any, the first one takes its first slab. The next ones take that."""
    disk.tier.note_used([NAMESPACE])
    fill(disk, NAMESPACE)
    store = disk.tier._stores[NAMESPACE]
    least = namespace_store.SMALL_FILES + store.growth
    before = store.nbytes
    for number in range(20):
        name = f"{number:016}"
        disk.put(range(30), f"{name}-now")
        until(lambda name=name: is_written(disk, name))  # type: ignore[misc]
        disk.put(range(30), name)
    assert store.nbytes >= before - least - store.meta.slab_bytes


def test_namespaces_that_are_not_in_use_have_one_share_together(disk: KillableDisk) -> None:
    for number in range(4):
        disk.put(range(30), f"{number:016}")
    disk.tier.note_used([NAMESPACE])
    until(lambda: is_written(disk, NAMESPACE))
    numbers = count(100)

    def has_its_share() -> bool:
        disk.tier.maintain()
        disk.put([next(numbers)], NAMESPACE)
        return disk.tier._stores[NAMESPACE].nbytes > 0.45 * SIZE

    until(has_its_share)


def test_a_tier_that_is_smaller_than_a_block_says_so(pool: PoolMemory, tmp_path: Path) -> None:
    disk = KillableDisk(pool, tmp_path / "tier", 64 << 10)
    assert disk.put([1]) == [Result.FULL]
    assert "tiers.disk.size 64 KiB is below the" in disk.usage().read_only
    disk.close()


def test_there_is_always_room_for_another_namespace(disk: KillableDisk) -> None:
    """Also if the share of each is less than a slab: the one used least recently is dropped."""
    names = [f"{number:016}" for number in range(60)]
    for name in names:
        until(lambda name=name: is_written(disk, name))  # type: ignore[misc]
        assert disk.fetch([1], name) == [Result.OK]
        assert disk.usage().used_bytes <= SIZE
    assert names[0] not in disk.tier._stores
