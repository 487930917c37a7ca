"""The disk tier with a damaged hint file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.disk.hints import FREE, RETIRED, UNKNOWN, HintFile
from kvferry.testing.tier_subjects import NAMESPACE, key_of

from .disk_fixtures import KillableDisk, put_all

OK, MISS = Result.OK, Result.MISS
NUMBERS = range(150)
# Bytes of a record: key, generation, CRC.
RECORD = len(key_of(0)) + 12
Damage = Callable[[bytes], bytes]


def fetch_all(disk: KillableDisk) -> list[Result]:
    return [disk.fetch([number])[0] for number in NUMBERS]


def flip_bits(data: bytes) -> bytes:
    """One in every third record."""
    damaged = np.frombuffer(data, np.uint8).copy()
    records = damaged.reshape(-1, RECORD)[::3]
    random = np.random.default_rng(7)
    records[np.arange(len(records)), random.integers(0, RECORD, len(records))] ^= 1
    return damaged.tobytes()


def replace(file: Damage, disk: KillableDisk) -> None:
    disk.kill()
    for path in disk.hint_files():
        path.write_bytes(file(path.read_bytes()))
    disk.open()


@pytest.mark.parametrize(
    "damage",
    [
        flip_bits,
        lambda _: b"",
        lambda data: data[: len(data) // 2 + 1],
        lambda data: b"\xff" * len(data),
        lambda data: bytes(len(data) // 2) + data[len(data) // 2 :],
        lambda data: data + b"\xa5" * 10_000,
    ],
    ids=["bits", "empty", "short", "overwritten", "zeros", "long"],
)
def test_blocks_without_a_good_hint_are_found_by_their_headers(
    disk: KillableDisk, damage: Damage
) -> None:
    put_all(disk, NUMBERS)
    before = disk.usage()
    replace(damage, disk)
    assert fetch_all(disk) == [OK] * len(NUMBERS)
    assert disk.usage() == before


def test_a_hint_that_leads_to_another_block_is_a_miss(disk: KillableDisk) -> None:
    """The records have changed places. Then the slots are used again."""
    put_all(disk, NUMBERS)
    replace(lambda data: np.frombuffer(data, f"V{RECORD}")[::-1].tobytes(), disk)
    found = fetch_all(disk)
    assert set(found) <= {OK, MISS}
    assert found.count(MISS) > 0.9 * len(NUMBERS)
    put_all(disk, NUMBERS)
    disk.restart()
    assert fetch_all(disk) == [OK] * len(NUMBERS)


def test_the_later_one_of_two_hints_for_a_key_counts(disk: KillableDisk) -> None:
    """After a power cut the slot of a block that was dropped may have its hint again."""
    put_all(disk, range(3))
    disk.kill()
    (path,) = disk.hint_files()
    slots = range(path.stat().st_size // RECORD)
    file = HintFile(path, len(key_of(0)))
    before = file.read(slots)
    kept, free = before.keys.index(key_of(2)), before.generations.tolist().index(FREE)
    file.write(free, int(before.generations[kept]) - 1, key_of(2))
    disk.open()
    assert disk.usage().keys == 3
    assert disk.fetch([0, 1, 2]) == [OK] * 3
    assert file.read(slots).generations.tolist() == before.generations.tolist()
    assert free in disk.tier._stores[NAMESPACE].catalog.table.take_free(len(slots))
    file.close()


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = HintFile(tmp_path / "hints", 4)
    file.add_slots(range(4))
    file.write(1, 77, b"keys")
    file.write(2, RETIRED)
    hints = file.read(range(1, 6))
    assert hints.generations.tolist() == [77, RETIRED, FREE, UNKNOWN, UNKNOWN]
    assert hints.keys[0] == b"keys"
    file.resize(2)
    assert file.read(range(3)).generations.tolist() == [FREE, 77, UNKNOWN]
    assert file.nbytes == (tmp_path / "hints").stat().st_size == 2 * 16
    file.close()
