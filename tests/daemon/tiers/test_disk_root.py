"""The root of a disk tier: which directories it may be, and which of its entries are the tier's."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.persistence.epoch_page import END_OF_EPOCHS
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.disk import command, root_files
from kvferry.daemon.tiers.disk.tier import DiskTier
from kvferry.proto.errors import Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.testing.tier_subjects import NAMESPACE

from .disk_fixtures import SIZE, KillableDisk, put_all

OK, MISS, CORRUPT = Result.OK, Result.MISS, Result.CORRUPT
MANY = range(40)


def test_files_belong_to_the_daemon_alone(disk: KillableDisk) -> None:
    put_all(disk, MANY)
    for path in (disk.root, *disk.root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    with pytest.raises(Refused, match="in use by another process"):
        DiskTier(str(disk.root), SIZE)


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
