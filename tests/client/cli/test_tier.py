"""`kvferry tier`: listing, verifying and deleting the blocks on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from daemon.tiers.disk_fixtures import KillableDisk
from kvferry.testing.tier_subjects import NAMESPACE, PoolMemory
from support.command_line import kvferry

BLOCK = 4096
# A namespace as `kvferry status` shows it, and as the tier names it.
OTHER = "b" * 16
OTHER_PART = f"{OTHER}-{'c' * 16}"
Captured: TypeAlias = pytest.CaptureFixture[str]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[KillableDisk]:
    """A tier in use, with 40 blocks of one namespace and 10 of another."""
    pool = PoolMemory(BLOCK)
    disk = KillableDisk(pool, tmp_path / "tier")
    for first in range(0, 40, 10):
        disk.put(range(first, first + 10))
    disk.put(range(10), OTHER_PART)
    yield disk
    pool.files.close()


@pytest.mark.parametrize("columns", ["80", "40"])
def test_list_shows_namespaces_while_the_tier_is_in_use(
    columns: str, disk: KillableDisk, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert kvferry("tier", "list", disk.root) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(f"    namespace {NAMESPACE}")
    assert lines[at - 1] == "unknown model"
    assert lines[at + 1] == "    40 blocks of 4 KiB"
    assert " on disk, last written " in lines[at + 2]
    assert f"    namespace {OTHER_PART}" in lines
    assert kvferry("tier", "list", disk.root, "--json") == 0
    found = {each["namespace"]: each for each in json.loads(capsys.readouterr().out)}
    assert (found[NAMESPACE]["blocks"], found[OTHER_PART]["blocks"]) == (40, 10)
    allocated = sum(each["allocated_bytes"] for each in found.values())
    assert 50 * BLOCK < allocated <= disk.size
    disk.close()


@pytest.mark.parametrize("command", [("verify",), ("clear",), ("clear", "--yes")])
def test_a_tier_in_use_is_neither_verified_nor_cleared(
    disk: KillableDisk, command: tuple[str, ...], capsys: Captured
) -> None:
    assert kvferry("tier", *command, disk.root) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert "stop that daemon first" in error
    assert disk.fetch([1]) == [0]
    disk.close()


def test_verify_counts_bad_blocks_and_changes_nothing(disk: KillableDisk, capsys: Captured) -> None:
    disk.close()
    assert kvferry("tier", "verify", disk.root) == 0
    assert f"{NAMESPACE}: 40 blocks good, 0 bad" in capsys.readouterr().out
    for path in (disk.root / NAMESPACE).glob("slab-*"):
        slots = np.memmap(path, np.uint8, "r+").reshape(-1, 2 * BLOCK)
        slots[:2, BLOCK + 5] ^= 1  # in the block
        slots[2, 20] ^= 1  # in the header
    before = {path: path.read_bytes() for path in disk.root.rglob("slab-*")}
    assert kvferry("tier", "verify", disk.root, "--json") == 1
    found = {each["namespace"]: each for each in json.loads(capsys.readouterr().out)}
    bad = found[NAMESPACE]["bad"]
    assert 3 <= bad <= 3 * len(before)
    assert found[NAMESPACE]["good"] == 40 - bad
    assert found[OTHER_PART]["bad"] == 0
    assert before == {path: path.read_bytes() for path in disk.root.rglob("slab-*")}


def test_clear_deletes_one_namespace_or_all(disk: KillableDisk, capsys: Captured) -> None:
    disk.close()
    assert kvferry("tier", "clear", disk.root, "--yes", "--namespace", "unknown") == 1
    assert "no namespace 'unknown'" in capsys.readouterr().err
    assert kvferry("tier", "clear", disk.root, "--namespace", "unknown") == 1
    assert "Delete" not in capsys.readouterr().err  # it does not ask
    assert kvferry("tier", "clear", disk.root, "--yes", "--namespace", NAMESPACE) == 0
    assert "deleted 40 blocks of 1 namespaces" in capsys.readouterr().out
    disk.open()
    assert (disk.contains([1]), disk.contains([1], OTHER_PART)) == ([False], [True])
    disk.put([1])
    disk.close()
    assert kvferry("tier", "clear", disk.root, "--yes", "--namespace", OTHER) == 0
    disk.open()
    assert (disk.contains([1]), disk.contains([1], OTHER_PART)) == ([True], [False])
    disk.close()
    assert kvferry("tier", "clear", disk.root, "--yes") == 0
    for command in ("list", "verify"):
        capsys.readouterr()
        assert kvferry("tier", command, disk.root) == 0
        assert capsys.readouterr().out == f"no namespace in {disk.root}\n"
    disk.open()
    assert disk.usage().keys == 0
    disk.close()


def test_unreadable_directories_and_namespaces_are_reported(
    disk: KillableDisk, tmp_path: Path, capsys: Captured
) -> None:
    assert kvferry("tier", "list", tmp_path) == 1
    assert f"no disk tier in {tmp_path}" in capsys.readouterr().err
    disk.close()
    hints = disk.root / NAMESPACE / "hints"
    data = hints.read_bytes()
    hints.write_bytes(b"\xa5" * (len(data) // 2) + data[len(data) // 2 :])
    assert kvferry("tier", "list", disk.root) == 0
    assert "slots are counted after the next start" in capsys.readouterr().out
    hints.unlink()  # blocks are verified without it
    assert kvferry("tier", "verify", disk.root) == 0
    assert f"{NAMESPACE}: 40 blocks good, 0 bad" in capsys.readouterr().out
    (disk.root / NAMESPACE / "meta").write_bytes(b"{")
    assert kvferry("tier", "list", disk.root, "--json") == 0
    found = {each["namespace"]: each for each in json.loads(capsys.readouterr().out)}
    assert found[NAMESPACE]["blocks"] is None
    assert "truncated" in found[NAMESPACE]["problem"]
    assert kvferry("tier", "verify", disk.root) == 1
