"""The disk tier with other things in place of its files: they cost their namespace, no other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.disk import command
from kvferry.daemon.tiers.disk.slab import SlotHeader, decode_header
from kvferry.daemon.tiers.disk.tier import DiskTier
from kvferry.proto.errors import Refused
from kvferry.testing.tier_subjects import NAMESPACE, key_of

from .disk_fixtures import KillableDisk, put_all

OK, MISS = Result.OK, Result.MISS
OTHER = "b" * 16
MANY = range(40)


def fetch_all(disk: KillableDisk, namespace: str = NAMESPACE) -> set[Result]:
    return {disk.fetch([number], namespace)[0] for number in MANY}


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "letter").write_text("Dear")


ENTRIES: list[Callable[[Path], None]] = [link, os.mkfifo, Path.mkdir]


def replace(disk: KillableDisk, path: Path, entry: Callable[[Path], None]) -> None:
    disk.kill()
    path.unlink()
    entry(path)
    disk.open()


@pytest.fixture
def two(disk: KillableDisk) -> KillableDisk:
    """With two namespaces."""
    put_all(disk, MANY)
    for number in MANY:
        assert disk.put([number], OTHER) == [OK]
    return disk


def test_a_header_with_any_damaged_byte_is_none() -> None:
    header = SlotHeader(NAMESPACE, key_of(1), 7, 4096, 1 << 63)
    data = header.encode()
    page = memoryview(bytearray(data.ljust(PAGE, b"\0")))
    assert decode_header(page) == header
    for at in range(len(data)):
        page[at] ^= 1
        assert decode_header(page) is None, at
        page[at] ^= 1


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("file", "found"),
    [("hints", {OK}), ("meta", {MISS}), ("slab-00000", {OK, MISS})],
)
def test_another_entry_in_place_of_a_file_costs_its_namespace(
    two: KillableDisk, file: str, found: set[Result], entry: Callable[[Path], None]
) -> None:
    replace(two, two.root / NAMESPACE / file, entry)
    assert fetch_all(two, OTHER) == {OK}
    assert fetch_all(two) == found
    assert set(two.put(MANY)) <= {OK, Result.PRESENT}
    two.restart()
    assert fetch_all(two, OTHER) == fetch_all(two) == {OK}


@pytest.mark.parametrize("file", ["hints", "meta", "slab-00000"])
def test_a_directory_with_contents_is_left_alone(two: KillableDisk, file: str) -> None:
    path = two.root / NAMESPACE / file
    replace(two, path, full_directory)
    assert fetch_all(two, OTHER) == {OK}
    assert two.put([1]) == [Result.FULL]
    assert "move it away" in two.usage().read_only
    assert two.put([1], "c" * 16) == [OK]  # at once
    assert (path / "letter").read_text() == "Dear"


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("file", ["lock", "format"])
def test_another_entry_in_place_of_a_file_of_the_root_is_replaced(
    two: KillableDisk, file: str, entry: Callable[[Path], None]
) -> None:
    replace(two, two.root / file, entry)
    assert fetch_all(two, OTHER) == fetch_all(two) == {OK}
    assert (two.root / file).is_file()
    assert not (two.root / file).is_symlink()


def test_hints_that_may_not_be_read_are_replaced(
    two: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the system call is replaced."""
    opened, hints = os.open, two.root / NAMESPACE / "hints"
    unreadable = hints.stat().st_ino

    def open_unless_unreadable(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if path == hints and hints.exists() and hints.stat().st_ino == unreadable:
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, mode)

    two.kill()
    monkeypatch.setattr(os, "open", open_unless_unreadable)
    two.open()
    assert fetch_all(two) == fetch_all(two, OTHER) == {OK}


def test_a_namespace_that_cannot_be_opened_now_is_left_alone(
    two: KillableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, meta = os.open, two.root / NAMESPACE / "meta"

    def refuse_meta(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if path == meta:
            raise OSError(24, "Too many open files")
        return opened(path, flags, mode)

    two.kill()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_meta)
        two.open()
        assert fetch_all(two, OTHER) == {OK}
        assert two.put([1]) == [Result.FULL]
    two.restart()
    assert fetch_all(two) == {OK}


@pytest.mark.parametrize(
    "damage",
    [
        {"slots_per_slab": 0},
        {"slots_per_slab": 1 << 60},
        {"block_bytes": -4096},
        {"block_bytes": 1 << 62},
        {"key_bytes": 1 << 40},
        {"slots_per_slab": 1 << 20},  # one slab is larger than the tier
        b"",
        b"{}",
        b"\xff",
        b'{"model":"\xc6"}',
        b"[" * 5000,
    ],
    ids=lambda damage: str(damage)[:30],
)
def test_a_damaged_meta_costs_its_namespace(
    two: KillableDisk, damage: dict[str, int] | bytes
) -> None:
    """One that is no JSON, or has impossible sizes."""
    two.kill()
    meta = two.root / NAMESPACE / "meta"
    if isinstance(damage, dict):
        damage = msgspec.json.encode(msgspec.json.decode(meta.read_bytes()) | damage)
    meta.write_bytes(damage)
    problems = [each.namespace for each in command.list_namespaces(two.root) if each.problem]
    assert problems == [NAMESPACE]
    two.open()
    assert fetch_all(two, OTHER) == {OK}
    assert fetch_all(two) == {MISS}
    assert two.put([1]) == [OK]
    assert fetch_all(two, OTHER) == {OK}


def test_a_huge_file_is_not_read(two: KillableDisk) -> None:
    two.kill()
    for path in (two.root / NAMESPACE / "meta", two.root / "format"):
        os.truncate(path, 1 << 40)
    two.open()
    assert fetch_all(two, OTHER) == {OK}
    assert two.put([1]) == [OK]


@pytest.mark.parametrize("entry", [*ENTRIES, full_directory])
def test_another_entry_in_place_of_a_noted_drop_is_removed_or_none(
    two: KillableDisk, entry: Callable[[Path], None]
) -> None:
    two.kill()
    marker = two.root / f"drop-7-{NAMESPACE}"
    entry(marker)
    two.open()
    is_none = entry is full_directory
    assert (marker.exists(), marker.is_symlink()) == (is_none, False)
    assert fetch_all(two) == {OK if is_none else MISS}
    assert fetch_all(two, OTHER) == {OK}


def test_a_lock_that_was_replaced_excludes_another_tier(two: KillableDisk) -> None:
    replace(two, two.root / "lock", link)
    with pytest.raises(Refused, match="is in use by another process"):
        DiskTier(str(two.root), two.size)
