"""Blocks that the disk tier finds again after its process, or the system, has ended."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.disk.hints import HintFile
from kvferry.daemon.tiers.disk.namespace_store import NamespaceStore
from kvferry.daemon.tiers.disk.slot_table import Entry
from kvferry.daemon.tiers.disk.tier import DiskTier
from kvferry.testing.tier_subjects import NAMESPACE, key_of

from .disk_fixtures import BLOCK, SIZE, KillableDisk, fetch_all, put_all

OK, MISS, CORRUPT = Result.OK, Result.MISS, Result.CORRUPT
MANY = range(40)


@pytest.mark.parametrize(("key", "other"), [(3, 4), (4, 3)])
def test_of_two_blocks_of_a_key_the_later_one_is_found(
    disk: KillableDisk, key: int, other: int
) -> None:
    put_all(disk, MANY)
    store = disk.tier._stores[NAMESPACE]
    (older,) = store.catalog.table.find([key_of(key)])
    assert older is not None
    disk.drop([key, other])
    disk.put([key])  # into the slot that was freed last
    assert store.catalog.table.find([key_of(key)]) != [older]
    slab, at = store.slabs.place(older)
    disk.lose_hints()
    with slab.path.open("r+b") as file:
        file.seek((at + 1) * slab.slot_bytes - 1)
        file.write(b"\xa5")
    disk.open()
    assert disk.fetch([key, other]) == [OK, MISS]


def test_headers_are_read_by_the_next_process_if_one_dies_before(disk: KillableDisk) -> None:
    put_all(disk, MANY)
    disk.lose_hints()
    disk.tier = DiskTier(str(disk.root), SIZE)
    assert not disk.tier._stores[NAMESPACE].give_up_slab()  # its blocks are not known yet
    disk.kill()  # before anything was read
    disk.open()
    assert fetch_all(disk, MANY) == [OK] * len(MANY)
    disk.restart()
    assert fetch_all(disk, MANY) == [OK] * len(MANY)


def test_a_namespace_is_dropped_while_its_headers_are_read(
    disk: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(disk, MANY)
    read_header = NamespaceStore._read_header

    def drop_meanwhile(store: NamespaceStore, slot: int) -> Entry | None:
        if slot == 7:
            disk.drop()
        return read_header(store, slot)

    monkeypatch.setattr(NamespaceStore, "_read_header", drop_meanwhile)
    disk.lose_hints()
    disk.open()
    assert fetch_all(disk, MANY) == [MISS] * len(MANY)
    put_all(disk, MANY)
    assert fetch_all(disk, MANY) == [OK] * len(MANY)


def test_a_truncated_slab_is_replaced(disk: KillableDisk) -> None:
    put_all(disk, MANY)
    os.truncate(disk.slabs()[0], 1000)
    results = fetch_all(disk, MANY)
    assert set(results) == {OK, MISS}
    disk.tier.maintain()
    put_all(disk, range(100, 140))
    assert disk.usage().used_bytes <= SIZE
    assert fetch_all(disk, range(100, 140)) == [OK] * 40
    os.truncate(disk.slabs()[0], 0)
    disk.restart()  # found at start
    assert OK in fetch_all(disk, range(100, 140))


def test_a_smaller_size_is_kept_from_the_start_on(disk: KillableDisk) -> None:
    put_all(disk, range(150))
    disk.close()
    disk.size = SIZE // 2
    disk.open()
    usage = disk.usage()
    assert usage.used_bytes <= SIZE // 2
    assert 0 < usage.keys < 150
    assert OK in fetch_all(disk, range(150))


def test_a_slot_that_cannot_be_read_or_written_is_retired(
    disk: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(disk, MANY)
    preadv, pwritev = os.preadv, os.pwritev

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert disk.fetch([1]) == [Result.ERROR]
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", broken)
    assert disk.put([100]) == [Result.ERROR]
    monkeypatch.setattr(os, "pwritev", pwritev)
    assert disk.usage().retired == 2
    disk.restart()
    assert disk.usage().retired == 2
    assert disk.fetch([1, 100, 2]) == [MISS, MISS, OK]
    assert disk.put([1, 100]) == [OK, OK]


@pytest.mark.parametrize("error", [28, 30])
def test_where_nothing_can_be_written_reads_go_on(
    disk: KillableDisk, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    put_all(disk, MANY)
    pwritev = os.pwritev

    def refused(*_: Any) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "pwritev", refused)
    assert disk.put([100, 101]) == [Result.FULL] * 2
    assert os.strerror(error) in disk.usage().read_only
    assert fetch_all(disk, MANY) == [OK] * len(MANY)
    monkeypatch.setattr(os, "pwritev", pwritev)
    assert disk.put([100, 101]) == [OK] * 2
    assert disk.usage().read_only == ""


def test_a_full_tier_stores_in_place_of_blocks_that_were_read(disk: KillableDisk) -> None:
    for number in range(2 * SIZE // BLOCK):
        assert disk.put([number]) == [OK]
        assert disk.fetch([number]) == [OK]


def test_nothing_is_evicted_while_nothing_can_be_written(
    disk: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = range(400)
    put_all(disk, numbers)  # the tier is full
    before = disk.usage().keys

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(HintFile, "write", refuse)
    for count in (1, 4, 16):
        assert disk.put(range(1000, 1000 + count)) == [Result.FULL] * count
    assert disk.usage().keys == before
    monkeypatch.undo()
    assert disk.put([1000]) == [OK]


def test_blocks_are_found_on_a_full_file_system_without_hints(
    disk: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(disk, MANY)
    disk.lose_hints()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for change in ("write", "resize"):
        monkeypatch.setattr(HintFile, change, refuse)
    disk.open()
    assert "No space" in disk.usage().read_only
    assert fetch_all(disk, MANY) == [OK] * len(MANY)
    monkeypatch.undo()
    disk.restart()
    assert fetch_all(disk, MANY) == [OK] * len(MANY)
    assert disk.put([100]) == [OK]
    assert disk.usage().read_only == ""


def test_the_first_slab_is_as_small_as_the_free_space_needs(
    disk: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not even one block fits, the usage says why."""
    real = os.statvfs(disk.root)
    floor = min(4 << 30, real.f_blocks * real.f_frsize // 50)

    def leave(nbytes: int) -> None:
        free = (floor + nbytes) // real.f_frsize
        left = os.statvfs_result((*real[:4], free, *real[5:10]))
        monkeypatch.setattr(os, "statvfs", lambda _: left)

    leave(60 << 10)
    assert disk.put([1]) == [Result.FULL]
    assert "free disk space" in disk.usage().read_only
    leave(120 << 10)
    assert disk.put([1], "b" * 16) == [OK]
    assert disk.slabs()[-1].stat().st_size < SIZE // 32


def test_no_slab_is_added_below_the_floor_of_free_space(
    disk: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(disk.root)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 10, *real[5:10])))
    assert disk.put([1]) == [Result.FULL]
    monkeypatch.undo()
    put_all(disk, range(8))
    slabs = len(disk.slabs())
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 10, *real[5:10])))
    put_all(disk, range(8, 40))  # old blocks make room
    assert len(disk.slabs()) == slabs


def test_blocks_of_another_size_are_not_stored(disk: KillableDisk) -> None:
    put_all(disk, MANY)
    blocks = disk._blocks(NAMESPACE, [key_of(1)], [0])._replace(nbytes=4096)
    assert list(disk.tier.put(blocks, [0])) == [Result.FULL]
    assert disk.tier.fetch(blocks, 1e18)[0].result is MISS


@pytest.mark.parametrize(("size", "warnings"), [(1 << 50, 1), (SIZE, 0)])
def test_a_size_beyond_the_free_disk_space_is_logged_at_start(
    tmp_path: Path, size: int, warnings: int
) -> None:
    with capture_logs() as records:
        DiskTier(str(tmp_path / "tier"), size).close()
    found = [record for record in records if "less free disk space" in record["event"]]
    assert len(found) == warnings
    for record in found:
        assert record["size"] == size > record["available"] > 0
        assert "reduce tiers.disk.size" in record["change"]
