"""A sibling's block table: what is found in it, and what a comparison after a copy shows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.daemon.core.block_table import BlockTable
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.persistence.table_file import LINES_AT, TableFile
from kvferry.daemon.siblings.lent_table import LentTable, SoughtKeys
from kvferry.proto.errors import Code, Refused
from kvferry.shm.memfd import sealed_memfd
from support.lent_region import BLOCKS, LentRegion, key
from support.writing_process import READS, writing_process


@pytest.fixture
def region() -> Iterator[LentRegion]:
    region = LentRegion()
    yield region
    region.close()


def find(table: LentTable, *numbers: int, epoch: int = 0) -> list[int]:
    """The blocks of keys."""
    blocks = table.find(SoughtKeys.of([key(number) for number in numbers]), epoch)[0]
    found: list[int] = blocks.tolist()
    return found


def unchanged(table: LentTable, *numbers: int) -> list[bool]:
    """Search for keys, which must be there, and compare them."""
    blocks, versions = table.find(SoughtKeys.of([key(number) for number in numbers]), 0)
    assert (blocks >= 0).all()
    same: list[bool] = table.unchanged(blocks, versions).tolist()
    return same


def test_keys_are_found_in_their_blocks(region: LentRegion) -> None:
    table = region.lent_table()
    assert find(table, 3) == [-1]
    region.store(3, 1)
    assert find(table, 1, 2, 3, 3) == [1, -1, 3, 3]
    blocks, versions = table.find(SoughtKeys.of([key(3)]), 0)
    assert versions.tolist() == region.table.lines.versions(blocks).tolist()
    assert unchanged(table, 3, 1) == [True, True]


def test_a_stored_block_is_found_before_it_is_committed(region: LentRegion) -> None:
    region.store(3)
    assert not region.table.lines.memory["committed"].any()
    assert find(region.lent_table(), 3) == [3]


LOSSES: dict[str, Callable[[LentRegion], object]] = {
    "parity: dropped": lambda region: region.table.drop(np.array([3])),
    "epoch: reset": lambda region: region.table.begin_epoch(1),
    "key: of another one": lambda region: region.store(3, keys=[key(7)]),
    "part": lambda region: region.store(3, b3=(0, 1)),
    "head: freed": lambda region: region.file.mark_void(),
    "head: other composition": lambda region: region.file.update(
        msgspec.structs.replace(region.file.record, pages=((2048, 2048),), factor=1)
    ),
    "incarnation: another daemon": lambda region: PoolIncarnation(region.page.descriptor),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_block_that_is_lost_is_not_found(region: LentRegion, loss: str) -> None:
    table = region.lent_table()
    region.store(3)
    assert find(table, 3) == [3]
    LOSSES[loss](region)
    assert find(table, 3, epoch=region.table.epoch) == [-1]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_block_that_is_lost_after_the_search_has_changed(region: LentRegion, loss: str) -> None:
    """A reset alone changes no line: who resets compares the epoch."""
    table = region.lent_table()
    region.store(3, 4)
    blocks, versions = table.find(SoughtKeys.of([key(3)]), 0)
    LOSSES[loss](region)
    assert table.unchanged(blocks, versions).tolist() == [loss == "epoch: reset"]
    region.store(3)
    assert table.unchanged(blocks, versions).tolist() == [False]


def test_the_epoch_is_that_of_the_search(region: LentRegion) -> None:
    table = region.lent_table()
    region.store(3)
    region.table.begin_epoch(5)
    assert (find(table, 3, epoch=0), find(table, 3, epoch=5)) == ([3], [-1])
    region.store(3)
    assert (find(table, 3, epoch=0), find(table, 3, epoch=5)) == ([-1], [3])


def test_a_damaged_entry_finds_nothing(region: LentRegion) -> None:
    table = region.lent_table()
    region.store(3)
    region.file.buckets[:] |= np.uint64(0xFFFF << 48)
    assert find(table, 3) == [-1]


def test_keys_of_another_length_are_not_found(region: LentRegion) -> None:
    region.store(3)
    assert region.lent_table().find(SoughtKeys.of([b"four"]), 0)[0].tolist() == [-1]


def test_the_next_daemon_shows_blocks_once_they_are_verified(region: LentRegion) -> None:
    table, some = region.lent_table(), np.array([1, 3])
    region.store(1, 3)
    region.table.commit(some, region.table.lines.versions(some), np.zeros(2, np.uint64))
    found = table.find(SoughtKeys.of([key(1)]), 0)
    page = PoolIncarnation(os.dup(region.page.descriptor))
    file = TableFile(os.dup(region.file.descriptor))
    later = BlockTable(BLOCKS, 8, file.lines)
    later.restore(2)
    later.share_keys(file.buckets)
    assert find(table, 1, 3) == [-1, -1]
    file.sign(page.number)
    assert find(table, 1, 3) == [-1, -1]
    later.set_verified(np.array([1]))
    assert find(table, 1, 3) == [1, -1]
    assert table.unchanged(*found).tolist() == [False]
    file.close()


def test_a_restart_between_the_comparisons_shows(
    region: LentRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory may be corrupt since; the next daemon has not verified the block yet."""
    table, some = region.lent_table(), np.array([3])
    region.store(3)
    region.table.commit(some, region.table.lines.versions(some), np.zeros(1, np.uint64))
    found = table.find(SoughtKeys.of([key(3)]), 0)
    page = PoolIncarnation(region.page.descriptor)
    is_valid = LentTable._is_valid

    def adopt_first(self: LentTable) -> bool:
        BlockTable(BLOCKS, 8, region.file.lines).restore(2)
        region.file.sign(page.number)
        return is_valid(self)

    monkeypatch.setattr(LentTable, "_is_valid", adopt_first)
    assert table.unchanged(*found).tolist() == [False]


def test_memory_that_is_no_table_is_refused(region: LentRegion) -> None:
    for nbytes in (1, 4096, LINES_AT + 1):
        other = sealed_memfd("other", nbytes)
        with pytest.raises(Refused) as refused:
            LentTable(other, region.page.descriptor, 1)
        assert refused.value.code == Code.BAD_LAYOUT
        os.close(other)
    shrinkable = os.memfd_create("open")
    with pytest.raises(Refused) as refused:
        LentTable(region.file.descriptor, shrinkable, 1)
    assert refused.value.code == Code.NOT_SHAREABLE
    os.close(shrinkable)


def test_a_table_whose_record_is_replaced_is_not_void_meanwhile(region: LentRegion) -> None:
    """For other daemons, and if the daemon is killed."""
    prepare = "\n".join(
        (
            "from kvferry.daemon.persistence.table_file import TableFile",
            "file = TableFile(descriptor)",
        )
    )
    region.store(3)
    table = region.lent_table()
    found: Any = table.find(SoughtKeys.of([key(3)]), 0)
    with writing_process(region.file.descriptor, prepare, "file.update(file.record)"):
        assert all(table.unchanged(*found).all() for _ in range(READS // 4))


def test_a_key_that_is_stored_again_and_again_is_found_with_its_version(
    region: LentRegion,
) -> None:
    """Another process stores keys 1 and 2 in block 0 in turn: the line is one of them, or none."""
    prepare = "\n".join(
        (
            "import os",
            "from kvferry.daemon.core.block_table import BlockTable",
            "from kvferry.daemon.persistence.table_file import TableFile",
            "file = TableFile(descriptor)",
            f"table = BlockTable({BLOCKS}, 8)",
            "table.lines.use_memory(file.lines); table.share_keys(file.buckets)",
            "zero, keys = np.array([0]), [bytes(7) + bytes([n]) for n in (1, 2)]",
            "def store(key): table.set_pending(zero); table.set_stored(zero, [key])",
            "def drop(): table.drop(zero)",
        )
    )
    table, both = region.lent_table(), SoughtKeys.of([key(1), key(2)])
    line = region.file.lines
    with writing_process(
        region.file.descriptor, prepare, "store(keys[0]); drop(); store(keys[1]); drop()"
    ):
        found = 0
        for _ in range(READS // 10):
            blocks, versions = table.find(both, 0)
            for place in np.flatnonzero(blocks >= 0).tolist():
                stored = line["key"][0].tobytes()  # read between search and comparison
                if table.unchanged(blocks[[place]], versions[[place]])[0]:
                    found += 1
                    assert stored == key(place + 1)
        assert found
