"""Blocks that the disk tier finds again after its process, or the system, has ended."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.persistence.epoch_page import END_OF_EPOCHS
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.disk import command, root_files
from kvferry.daemon.tiers.disk.hints import HintFile
from kvferry.daemon.tiers.disk.namespace_store import NamespaceStore
from kvferry.daemon.tiers.disk.slot_table import Entry
from kvferry.daemon.tiers.disk.tier import DiskTier
from kvferry.proto.errors import Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.testing.tier_subjects import NAMESPACE, key_of

from .disk_fixtures import SIZE, KillableDisk, put_all

OK, MISS, CORRUPT = Result.OK, Result.MISS, Result.CORRUPT
MANY = range(40)


def fetch_all(disk: KillableDisk, numbers: range = MANY) -> list[Result]:
    return [disk.fetch([number])[0] for number in numbers]


def test_after_a_clean_end_everything_is_found(disk: KillableDisk) -> None:
    put_all(disk, MANY)
    used = disk.usage().used_bytes
    disk.close()
    disk.open()
    assert disk.usage().keys == len(MANY)
    assert disk.usage().used_bytes == used
    assert fetch_all(disk) == [OK] * len(MANY)
    assert disk.put([100]) == [OK]


def test_after_a_kill_everything_is_found(disk: KillableDisk) -> None:
    put_all(disk, MANY)
    disk.restart()
    assert fetch_all(disk) == [OK] * len(MANY)


def test_without_hints_blocks_are_found_by_their_headers(disk: KillableDisk) -> None:
    put_all(disk, MANY)
    disk.lose_hints()
    disk.open()
    assert disk.usage().keys == len(MANY)
    assert fetch_all(disk) == [OK] * len(MANY)
    assert disk.put([100]) == [OK]


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
    assert fetch_all(disk) == [OK] * len(MANY)
    disk.restart()
    assert fetch_all(disk) == [OK] * len(MANY)


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
    assert fetch_all(disk) == [MISS] * len(MANY)
    put_all(disk, MANY)
    assert fetch_all(disk) == [OK] * len(MANY)


def test_a_dropped_store_stays_dropped(disk: KillableDisk) -> None:
    for end in (disk.kill, disk.lose_hints):
        put_all(disk, MANY)
        disk.drop()
        end()
        disk.open()
        assert disk.usage().keys == 0
        assert fetch_all(disk) == [MISS] * len(MANY)
    assert not list(disk.root.glob("trash-*"))


def test_a_drop_that_an_earlier_build_has_noted_is_done(disk: KillableDisk) -> None:
    """Before anything is found. A drop is of a namespace, and of all of its stores."""
    names = NAMESPACE, str(StoreName(NAMESPACE, "a")), f"{NAMESPACE}2-a", "b" * 16
    for name in names:
        disk.put([1], name)
    disk.kill()
    notes = [disk.root / f"drop-{number}-{NAMESPACE}" for number in (3, 1 << 60)]
    notes.append(disk.root / "drop-4-none")
    for note in notes:
        note.touch(0o600)
    disk.open()
    assert not any(note.exists() for note in notes)
    assert disk.usage().keys == 2
    assert [disk.contains([1], name) for name in names] == [[False], [False], [True], [True]]
    assert disk.put([1]) == [OK]
    disk.restart()
    assert disk.contains([1]) == [True]


@pytest.mark.parametrize("loses_hints", [False, True])
def test_the_longest_name_of_a_store_is_kept(disk: KillableDisk, loses_hints: bool) -> None:
    """Of a store that the daemon names. 64 characters are the limit."""
    last = END_OF_EPOCHS - 1
    named = str(StoreName(Fingerprint("llama", 4096).name, "f" * 16, last))
    for name in (named, named + "-" * (64 - len(named))):
        put_all(disk, range(4))
        assert disk.put([1, 2], name) == [OK, OK]
        assert disk.put([1], name + "-" * (65 - len(name))) == [Result.FULL]
        disk.lose_hints() if loses_hints else disk.kill()
        disk.open()
        assert name in disk.tier.stores()
        assert disk.fetch([1, 2], name) == [OK, OK]
        disk.drop(store=name)
        disk.restart()
        assert name not in disk.tier.stores()
    assert StoreName.parse(named).epoch == last


def test_a_block_whose_hint_was_not_written_is_a_miss(
    disk: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the block and its hint."""
    put_all(disk, MANY)
    store = disk.tier._stores[NAMESPACE]

    def die(_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.catalog, "insert", die)
    with pytest.raises(KeyboardInterrupt):
        disk.put([77])
    disk.restart()
    assert disk.contains([77]) == [False]
    assert fetch_all(disk) == [OK] * len(MANY)
    assert disk.put([77]) == [OK]
    assert disk.fetch([77]) == [OK]


def test_torn_and_stale_slots_are_never_wrong_bytes(disk: KillableDisk) -> None:
    """Half of a slot is that of another block, or its bytes are flipped."""
    random = np.random.default_rng(7)
    put_all(disk, MANY)
    disk.restart()
    slot_bytes = disk.tier._stores[NAMESPACE].meta.slot_bytes
    slabs = disk.slabs()
    damaged = 0
    for path in slabs:
        data = np.fromfile(path, np.uint8).reshape(-1, slot_bytes)
        for slot in range(0, len(data), 2):
            way = random.integers(0, 3)
            at = int(random.integers(0, slot_bytes))
            other = data[(slot + 1) % len(data)]
            if way == 0:
                data[slot, at] ^= 1 << int(random.integers(0, 8))
            elif way == 1:
                data[slot, at:] = other[at:]
            else:
                data[slot, :at] = other[:at]
            damaged += 1
        data.tofile(path)
    results = fetch_all(disk)
    assert set(results) <= {OK, MISS, CORRUPT}
    assert 0 < len(results) - results.count(OK) <= damaged


def test_a_truncated_slab_is_replaced(disk: KillableDisk) -> None:
    put_all(disk, MANY)
    os.truncate(disk.slabs()[0], 1000)
    results = fetch_all(disk)
    assert set(results) == {OK, MISS}
    disk.tier.maintain()
    put_all(disk, range(100, 140))
    assert disk.usage().used_bytes <= SIZE
    assert fetch_all(disk, range(100, 140)) == [OK] * 40
    os.truncate(disk.slabs()[0], 0)
    disk.restart()  # found at start
    assert OK in fetch_all(disk, range(100, 140))


def test_files_belong_to_the_daemon_alone(disk: KillableDisk, tmp_path: Path) -> None:
    put_all(disk, MANY)
    for path in (disk.root, *disk.root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    with pytest.raises(Refused, match="in use by another process"):
        DiskTier(str(disk.root), SIZE)
    disk.kill()
    slab, other = disk.slabs()[0], tmp_path / "other"
    other.write_bytes(slab.read_bytes())
    slab.unlink()
    slab.symlink_to(other)
    before = other.read_bytes()
    disk.open()
    assert 0 < fetch_all(disk).count(OK) < len(MANY)
    put_all(disk, MANY)
    assert fetch_all(disk) == [OK] * len(MANY)
    assert other.read_bytes() == before
    assert slab.is_symlink()


def test_a_root_that_others_may_write_into_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    root.mkdir()
    root.chmod(0o770)
    with pytest.raises(Refused, match=r"mode 0770; give it to user .* alone"):
        DiskTier(str(root), SIZE)
    assert not list(root.iterdir())


def test_a_root_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="file is not a directory; name one"):
        DiskTier(str(tmp_path / "file"), SIZE)
    with pytest.raises(Refused, match=r"cannot be created: .*; create it for user"):
        DiskTier("/proc/none", SIZE)


@pytest.mark.parametrize(
    "files",
    [
        ["letters/index/letter"],
        ["letters/index/letter", "lock"],  # other programs have files of these names, too
        ["letters/index/letter", "format"],
        ["lock/letter"],
        ["trash-letters-1/meta/letter"],
    ],
)
def test_a_directory_that_is_no_tier_is_refused(tmp_path: Path, files: list[str]) -> None:
    """For example a home directory. `kvferry tier clear` does not change it either."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Dear")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Refused, match="and no disk tier; name a directory that is empty"):
        DiskTier(str(tmp_path), SIZE)
    with pytest.raises(Refused, match="no disk tier in"):
        command.clear(tmp_path, None)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "files", [{"format": "kvferry disk tier 1\n"}, {"lock": "", "state": "{}"}], ids=str
)
def test_a_tier_of_another_build_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(Refused, match="of another build of kvferry") as refused:
        DiskTier(str(tmp_path), SIZE)
    assert f"rm -r {tmp_path}" in refused.value.message
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_full_file_system_is_reported_as_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(root_files, "write_file", refuse)
    with pytest.raises(OSError, match="No space left"):
        DiskTier(str(tmp_path / "tier"), SIZE)


def test_an_empty_file_system_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    DiskTier(str(tmp_path), SIZE).close()
    assert (tmp_path / "lost+found").is_dir()


def test_what_others_keep_in_the_root_is_left_alone(disk: KillableDisk) -> None:
    put_all(disk, MANY)
    other = disk.root / "namespace"
    for name in ("namespace", "trash-letters", "trash-letters-1", "site/index", "trash-1-1/meta"):
        (disk.root / name).mkdir(parents=True)
        (disk.root / name / "letter").write_text("Dear")
    (disk.root / "linked").symlink_to(other)
    disk.restart()
    assert disk.put([1], "namespace") == [Result.FULL]
    assert "Directory not empty" in disk.usage().read_only
    disk.drop()
    disk.tier.maintain()
    disk.kill()
    command.clear(disk.root, None)
    disk.open()
    assert [path.read_text() for path in disk.root.rglob("letter")] == ["Dear"] * 5
    assert (disk.root / "linked" / "letter").exists()


def test_a_namespace_that_was_being_created_is_created_again(disk: KillableDisk) -> None:
    (disk.root / NAMESPACE).mkdir()
    disk.restart()
    assert disk.put([1]) == [OK]


def test_a_namespace_that_cannot_be_created_is_tried_again(
    disk: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each block, and the reason is shown."""
    put_all(disk, MANY)
    attempts = list[Path]()

    def refused(path: Path, *_: Any, **__: Any) -> None:
        attempts.append(path)
        raise OSError(30, os.strerror(30))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refused)
        assert disk.put([1, 2], "other") == [Result.FULL] * 2
        assert disk.put([1, 2], "other") == [Result.FULL] * 2
    assert len(attempts) == 1
    assert os.strerror(30) in disk.usage().read_only
    monkeypatch.setattr(disk.tier, "_refused_until", 0.0)
    assert disk.put([1, 2], "other") == [OK] * 2
    assert disk.usage().read_only == ""


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
    assert fetch_all(disk) == [OK] * len(MANY)
    monkeypatch.setattr(os, "pwritev", pwritev)
    assert disk.put([100, 101]) == [OK] * 2
    assert disk.usage().read_only == ""


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
    assert fetch_all(disk) == [OK] * len(MANY)
    monkeypatch.undo()
    disk.restart()
    assert fetch_all(disk) == [OK] * len(MANY)
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
