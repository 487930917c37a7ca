"""A sibling's block table: what is found in it.

What is not found, and what a comparison after a copy shows:
tests/property/test_lent_table_against_a_model.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.persistence.table_file import LINES_AT
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


def test_a_damaged_entry_finds_nothing(region: LentRegion) -> None:
    table = region.lent_table()
    region.store(3)
    region.file.buckets[:] |= np.uint64(0xFFFF << 48)
    assert find(table, 3) == [-1]


def test_keys_of_another_length_are_not_found(region: LentRegion) -> None:
    region.store(3)
    assert region.lent_table().find(SoughtKeys.of([b"four"]), 0)[0].tolist() == [-1]


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
        assert all(table.unchanged(*found).all() for _ in range(READS // 20))


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
