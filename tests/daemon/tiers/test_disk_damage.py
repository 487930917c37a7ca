"""The disk tier with other things in place of its files: they cost their namespace, no other."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.disk import command
from kvferry.daemon.tiers.disk.hints import HintFile
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


@pytest.mark.parametrize("entry", ENTRIES)
def test_damage_is_listed(two: KillableDisk, entry: Callable[[Path], None]) -> None:
    two.kill()
    for file in ("hints", "slab-00000"):
        (two.root / NAMESPACE / file).unlink()
        entry(two.root / NAMESPACE / file)
    listed = {each.namespace: each for each in command.list_namespaces(two.root)}
    assert listed[OTHER].blocks == len(MANY)
    assert listed[NAMESPACE].blocks == 0
    assert listed[NAMESPACE].problem
    assert {each.namespace for each in command.verify(two.root, lambda _: None)} == set(listed)
    two.open()


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
    "change",
    [
        {"slots_per_slab": 0},
        {"slots_per_slab": 1 << 60},
        {"block_bytes": -4096},
        {"block_bytes": 1 << 62},
        {"key_bytes": 1 << 40},
        {"slots_per_slab": 1 << 20},  # one slab is larger than the tier
    ],
)
def test_impossible_sizes_are_damage(two: KillableDisk, change: dict[str, int]) -> None:
    two.kill()
    change_meta(two, change)
    two.open()
    assert fetch_all(two, OTHER) == {OK}
    assert fetch_all(two) == {MISS}
    assert two.put([1]) == [OK]
    assert fetch_all(two, OTHER) == {OK}


def change_meta(disk: KillableDisk, change: dict[str, int]) -> None:
    meta = disk.root / NAMESPACE / "meta"
    meta.write_bytes(msgspec.json.encode(msgspec.json.decode(meta.read_bytes()) | change))


def test_slots_that_a_slab_file_has_not_are_not_listed(two: KillableDisk) -> None:
    two.kill()
    nbytes = sum(each.stat().st_size for each in (two.root / NAMESPACE).glob("slab-*"))
    slots = nbytes // (2 * 4096)
    change_meta(two, {"slots_per_slab": 1 << 20})
    (listed,) = (each for each in command.list_namespaces(two.root) if each.problem)
    assert 0 < int(listed.problem.partition(" ")[0]) < slots
    two.open()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff", b'{"model":"\xc6"}', b"[" * 5000], ids=lambda data: str(data[:12])
)
def test_a_file_that_is_no_json_is_damage(two: KillableDisk, data: bytes) -> None:
    two.kill()
    (two.root / NAMESPACE / "meta").write_bytes(data)
    assert {each.namespace for each in command.list_namespaces(two.root) if each.problem} == {
        NAMESPACE
    }
    two.open()
    assert fetch_all(two, OTHER) == {OK}
    assert fetch_all(two) == {MISS}


def test_a_huge_file_is_not_read(two: KillableDisk) -> None:
    two.kill()
    for path in (two.root / NAMESPACE / "meta", two.root / "format"):
        os.truncate(path, 1 << 40)
    two.open()
    assert fetch_all(two, OTHER) == {OK}
    assert two.put([1]) == [OK]


@pytest.mark.parametrize("name", ["slab-99999999999999999999", "slab-1000000", "slab-7", "slab-x"])
def test_a_slab_with_a_name_that_no_slab_has_is_not_used(two: KillableDisk, name: str) -> None:
    two.kill()
    slab = two.root / NAMESPACE / "slab-00000"
    slab.rename(slab.with_name(name))
    two.open()
    assert fetch_all(two, OTHER) == {OK}


def test_an_impossible_generation_in_a_hint_is_damage(two: KillableDisk) -> None:
    """Its CRC is right."""
    two.kill()
    hints = HintFile(two.root / NAMESPACE / "hints", len(key_of(0)))
    for slot, generation in enumerate([(1 << 63) - 1, 1 << 62, -3]):
        hints.write(slot, generation, key_of(slot))
    hints.close()
    for _ in range(2):
        two.open()
        assert fetch_all(two) == fetch_all(two, OTHER) == {OK}
        assert two.put([100]) in ([OK], [Result.PRESENT])
        assert two.fetch([100]) == [OK]
        two.kill()
    two.open()


def test_the_last_possible_generation_costs_nothing_but_the_order(two: KillableDisk) -> None:
    two.kill()
    hints = HintFile(two.root / NAMESPACE / "hints", len(key_of(0)))
    hints.write(0, 1 << 48, hints.read(range(1)).keys[0])
    hints.close()
    two.open()
    for _ in range(2):
        put_all(two, range(100, 110))
        two.restart()
        assert two.fetch(range(100, 110)) == [OK] * 10
        assert fetch_all(two) == {OK}


@pytest.mark.parametrize("generation", [1 << 63, (1 << 64) - 1])
def test_an_impossible_generation_in_a_slot_is_damage(two: KillableDisk, generation: int) -> None:
    two.lose_hints()
    header = SlotHeader(NAMESPACE, key_of(1), generation, two.pool.block_bytes, 0)
    with (two.root / NAMESPACE / "slab-00000").open("r+b") as file:
        file.write(header.encode())
    two.open()
    assert fetch_all(two, OTHER) == {OK}
    assert two.put([100]) == [OK]


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


def test_records_have_the_form_that_these_tests_write(tmp_path: Path) -> None:
    file = HintFile(tmp_path / "hints", 4)
    file.write(0, 7, b"keys")
    data = struct.pack("<4sq", b"keys", 7)
    assert (tmp_path / "hints").read_bytes() == data + struct.pack("<I", zlib.crc32(data))
    file.close()


def test_a_lock_that_was_replaced_excludes_another_tier(two: KillableDisk) -> None:
    replace(two, two.root / "lock", link)
    with pytest.raises(Refused, match="is in use by another process"):
        DiskTier(str(two.root), two.size)
