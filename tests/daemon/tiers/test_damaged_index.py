"""What the disk tier does with an index that is damaged while no process uses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from kvferry.daemon.tiers.base import Result
from kvferry.testing.tier_subjects import NAMESPACE, key_of

from .disk_fixtures import KillableDisk, put_all

OK, MISS = Result.OK, Result.MISS
NUMBERS = range(150)


def fetch_all(disk: KillableDisk) -> list[Result]:
    return [disk.fetch([number])[0] for number in NUMBERS]


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40_000])
def test_a_damaged_index_is_rebuilt(disk: KillableDisk, damage: bytes) -> None:
    put_all(disk, NUMBERS)
    disk.kill()
    (disk.root / NAMESPACE / "index").write_bytes(damage)
    disk.open()
    found = fetch_all(disk)
    assert found == [OK if damage else MISS] * len(NUMBERS)  # an empty file is a new index
    put_all(disk, NUMBERS)
    assert fetch_all(disk) == [OK] * len(NUMBERS)


def spoil_pages(index: Path) -> None:
    """All but the first ones, so that it can be opened."""
    data = index.read_bytes()
    index.write_bytes(data[:16384] + b"\xa5" * (len(data) - 16384))


def insert_entry(key: bytes, value: bytes) -> Callable[[Path], None]:
    def insert(index: Path) -> None:
        with lmdb.open(str(index), subdir=False, max_dbs=2) as env, env.begin(write=True) as txn:
            txn.put(key, value, db=env.open_db(b"keys", txn))

    return insert


@pytest.mark.parametrize(
    "damage",
    [
        spoil_pages,
        insert_entry(b"short", bytes(16)),
        insert_entry(key_of(1), b"\xff" * 16),
        insert_entry(key_of(1), b"short"),
    ],
)
def test_damage_that_is_found_while_the_index_is_loaded(
    disk: KillableDisk, damage: Callable[[Path], None]
) -> None:
    put_all(disk, NUMBERS)
    disk.kill()
    damage(disk.root / NAMESPACE / "index")
    disk.open()
    disk.tier.maintain()
    assert fetch_all(disk) == [OK] * len(NUMBERS)
    assert disk.usage().keys == len(NUMBERS)
