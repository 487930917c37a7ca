"""The key table: what siblings find in it, and which entries are replaced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.key_table import (
    BUCKET,
    WAYS,
    KeyTable,
    bucket_count,
    buckets_of,
    hash_keys,
    split_entries,
    tags_of,
)

BLOCKS = 64


def new_table(live: set[int], buckets: int = 1) -> tuple[Any, KeyTable]:
    rows: Any = np.zeros(buckets, BUCKET)
    return rows, KeyTable(rows, BLOCKS, lambda blocks: np.isin(blocks, list(live)))


def entries_of(rows: Any) -> dict[int, int]:
    """The block of each tag."""
    tags, blocks = split_entries(rows.reshape(-1))
    pairs = zip(tags.tolist(), blocks.tolist(), strict=True)
    return {tag: block for tag, block in pairs if block >= 0}


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in numbers]


def tags(*numbers: int) -> list[int]:
    found: list[int] = tags_of(hash_keys(keys(*numbers))).tolist()
    return found


def add(table: KeyTable, live: set[int], names: list[int], blocks: list[int]) -> None:
    live |= set(blocks)
    table.add(keys(*names), np.array(blocks))


@pytest.mark.parametrize("blocks", [1, 8, 9, 100, 1 << 20, (1 << 20) + 1])
def test_a_bucket_has_at_most_eight_blocks_on_average(blocks: int) -> None:
    count = bucket_count(blocks)
    assert count & (count - 1) == 0
    assert blocks / count <= WAYS / 2
    assert count == 1 or blocks / count > WAYS / 4


def test_each_key_is_in_its_bucket() -> None:
    live = set[int]()
    rows, table = new_table(live, 8)
    names = list(range(40))
    add(table, live, names, names)
    buckets = buckets_of(hash_keys(keys(*names)), 8)
    for name, bucket, tag in zip(names, buckets.tolist(), tags(*names), strict=True):
        assert entries_of(rows[bucket])[tag] == name


def test_a_key_that_is_stored_again_takes_one_entry() -> None:
    live = set[int]()
    rows, table = new_table(live)
    for block in (3, 3, 5):
        live.clear()
        add(table, live, [1], [block])
    assert np.count_nonzero(rows) == 1
    assert entries_of(rows) == {tags(1)[0]: 5}


def test_dead_entries_are_replaced_first() -> None:
    """Those of blocks without contents, and with another key."""
    live = set[int]()
    rows, table = new_table(live)
    add(table, live, list(range(WAYS)), list(range(WAYS)))
    live -= {4}
    add(table, live, [100], [20])
    left = [name for name in range(WAYS) if name != 4]
    assert set(entries_of(rows)) == {*tags(*left), *tags(100)}
    add(table, live, [101], [7])  # block 7 had key 7
    left.remove(7)
    assert set(entries_of(rows)) == {*tags(*left), *tags(100, 101)}


def test_more_keys_of_one_bucket_than_it_has_places() -> None:
    live = set[int]()
    rows, table = new_table(live)
    add(table, live, list(range(3 * WAYS)), list(range(3 * WAYS)))
    assert len(entries_of(rows)) == WAYS


def test_entries_of_blocks_that_do_not_exist_are_dead() -> None:
    """The table of an earlier daemon may be damaged."""
    live = set[int]()
    rows, table = new_table(live)
    rows[:] = np.uint64(0xFFFFFFFF00000001)
    add(table, live, [1], [2])
    assert entries_of(rows)[tags(1)[0]] == 2
