"""The file with the epochs of all namespaces."""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvferry.daemon.core.tier_actions import EpochsSynced
from kvferry.daemon.memory.foreign_memory import SharedWords
from kvferry.daemon.persistence import epoch_page
from kvferry.daemon.persistence.epoch_page import (
    MAX_SLOTS,
    NAME,
    NBYTES,
    EpochPage,
    EpochSync,
    is_plausible,
    next_epoch,
    open_epoch_page,
)
from kvferry.proto.errors import Code, Refused
from support.time_limits import TIMEOUT

A, B = "0011223344556677", "8899aabbccddeeff"


@pytest.fixture
def page(tmp_path: Path) -> EpochPage:
    return EpochPage(tmp_path)


def test_epochs_are_ordered_and_plausible(page: EpochPage) -> None:
    drawn = [page.draw(A) for _ in range(100)]
    assert drawn == sorted(set(drawn))
    assert all(map(is_plausible, drawn))
    assert page.current(A) == drawn[-1]
    assert page.current(B) == 0
    assert page.draw(A, above=drawn[-1] + (1 << 30)) > drawn[-1] + (1 << 30)


def test_all_who_have_mapped_the_file_see_a_reset_at_once(page: EpochPage, tmp_path: Path) -> None:
    other, before = EpochPage(tmp_path), page.changes
    epoch = other.draw(A)
    assert (page.current(A), other.identity) == (epoch, page.identity)
    assert EpochPage(tmp_path / "other").identity != page.identity
    assert page.changes != before
    assert EpochPage(tmp_path).current(A) == epoch


def test_a_reset_with_the_last_label_is_that_reset(page: EpochPage) -> None:
    first = page.draw(A, "weights 2")
    assert page.draw(A, "weights 2") == first
    assert page.draw(B, "weights 2") != first
    second = page.draw(A, "weights 3")
    assert second > first
    assert page.draw(A, "weights 2") > second
    third = page.draw(A)
    assert page.draw(A) > third
    page.raise_to(B, later := page.current(B) + (1 << 10))  # a reset of another host
    assert page.draw(B, "weights 2") > later


def test_the_epoch_of_a_copy_is_adopted_if_it_is_larger(page: EpochPage) -> None:
    epoch = page.draw(A)
    page.raise_to(A, epoch - 1)
    assert page.current(A) == epoch
    page.raise_to(A, epoch + 1)
    page.raise_to(B, epoch)
    assert (page.current(A), page.current(B)) == (epoch + 1, epoch)
    assert not page.is_unpublished(A)
    far_ahead = next_epoch(0) + (2 * 24 * 3600 * 1_000_000 << epoch_page.RANDOM_BITS)
    page.raise_to(A, far_ahead)  # a damaged one
    assert page.current(A) == epoch + 1


def test_an_epoch_is_unpublished_until_a_store_has_it(page: EpochPage, tmp_path: Path) -> None:
    first = page.draw(A)
    second = page.draw(A)
    page.mark_published(A, first)
    assert EpochPage(tmp_path).is_unpublished(A)
    page.mark_published(A, second)
    assert not EpochPage(tmp_path).is_unpublished(A)
    page.raise_to(A, second + 1)
    assert not page.is_unpublished(A)


def test_without_a_free_slot_other_namespaces_lose_their_blocks(page: EpochPage) -> None:
    for number in range(MAX_SLOTS):
        page.raise_to(f"namespace {number}", 1)
    assert page.current(A) == 0
    epoch = page.draw(A)
    assert (page.current(A), page.current(B)) == (epoch, epoch)
    assert page.current("namespace 7") == 1
    # Otherwise two hosts draw above each other for ever.
    assert not page.is_unpublished(A)
    page.raise_to(A, epoch + 1)
    assert (page.current(A), page.current(B)) == (epoch + 1, epoch + 1)


def test_a_writer_waits_for_another_one(page: EpochPage, tmp_path: Path) -> None:
    """Both have opened the file, as two processes have. Otherwise they could use one slot."""
    other = EpochPage(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        with other._locked():
            drawing = threads.submit(page.draw, A)
            assert wait([drawing], 0.1).not_done
        assert drawing.result(TIMEOUT) == other.current(A)


@pytest.mark.parametrize("stores", range(10))
def test_a_writer_may_be_killed_between_any_two_stores(
    page: EpochPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores: int
) -> None:
    """Readers see the old epoch or the new one; the next reset works."""
    before = page.draw(A)
    left = stores
    write = SharedWords.write

    class Killed(Exception):
        pass

    def killed_write(words: Any, row: int, value: int) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        write(words, row, value)

    for namespace in (A, B):
        left = stores
        with monkeypatch.context() as patch:
            patch.setattr(SharedWords, "write", killed_write)
            # A draw for A, which has a slot, takes five stores.
            with pytest.raises(Killed) if namespace == B or stores < 5 else nullcontext():
                page.draw(namespace, "a label")
    other = EpochPage(tmp_path)
    assert other.current(A) >= before
    # Nobody may take it for an epoch that shared stores have.
    assert other.current(A) == before or other.is_unpublished(A)
    for each in (page, other):
        epochs = each.draw(A), each.draw(B)
        assert (page.current(A), page.current(B)) == epochs
        assert (other.current(A), other.current(B)) == epochs


def test_damaged_epochs_are_replaced_at_start(page: EpochPage, tmp_path: Path) -> None:
    epoch = page.draw(A)
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(mmap.PAGESIZE + 8)
        file.write(struct.pack("<Q", 1 << 63))
    changes = page.changes
    assert epoch < EpochPage(tmp_path).current(A) < 1 << 62
    assert page.changes != changes  # daemons that run read it, too


def test_a_file_with_any_number_of_changes_is_used(page: EpochPage, tmp_path: Path) -> None:
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(24)
        file.write(b"\xff" * 8)
        file.seek(40)
        file.write(struct.pack("<Q", 1 << 63))  # a damaged epoch
    other = EpochPage(tmp_path)
    assert page.changes == other.changes == 0
    assert page.draw(A) == other.current(A)
    assert other.changes == 1


def test_a_file_that_is_replaced_is_noticed(page: EpochPage, tmp_path: Path) -> None:
    assert page.find_problem() is None
    (tmp_path / NAME).unlink()
    assert "restart all daemons" in (page.find_problem() or "")
    EpochPage(tmp_path)
    assert "was replaced; restart all daemons" in (page.find_problem() or "")


@pytest.mark.parametrize(
    "kind",
    ["link", "directory", "fifo", "file above", b"x", b"other" * 40_000, b"x" * NBYTES, "writable"],
    ids=lambda kind: str(kind)[:12],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, kind: str | bytes) -> None:
    path, message = tmp_path / NAME, "."
    if kind == "link":
        (tmp_path / "target").touch()
        path.symlink_to(tmp_path / "target")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "file above":
        path.touch()
        tmp_path = path
    elif kind == "writable":
        EpochPage(tmp_path).close()
        path.chmod(0o660)
        message = "chmod 600"
    else:
        assert isinstance(kind, bytes)
        path.write_bytes(kind)
        path.chmod(0o600)
        message = "no file of this build"
    with pytest.raises(Refused, match=message) as refused:
        open_epoch_page(tmp_path)
    assert refused.value.code == Code.BAD_CONFIG


def test_a_sync_is_reported(
    page: EpochPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the file is on the device."""
    synced = list[int]()
    monkeypatch.setattr(os, "fdatasync", lambda number: synced.append(os.fstat(number).st_ino))

    async def sync() -> list[Any]:
        reports = list[Any]()
        begun = time.monotonic()
        EpochSync(page, reports.extend).start()
        while not reports:
            await asyncio.sleep(0.001)
        assert reports[0].now >= begun
        assert synced == [(tmp_path / NAME).stat().st_ino]
        return reports

    assert isinstance(asyncio.run(sync())[0], EpochsSynced)
