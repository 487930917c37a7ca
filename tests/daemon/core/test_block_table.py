"""The block table: states, transitions, and the lines that the next daemon reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.block_lines import BlockLines, Part, UseClock
from kvferry.daemon.core.block_story import IllegalTransition
from kvferry.daemon.core.block_table import (
    CHECKED,
    COMMITTED,
    COMMITTED_PART,
    FREE,
    OCCUPIED,
    ORPHANED,
    PENDING,
    STORED,
    STORED_PART,
    UNCHECKED,
    UNCOMMITTED,
    UNVERIFIED,
    UNVERIFIED_PART,
    BlockTable,
)
from kvferry.proto.keys import Lookup
from support.committed_blocks import (
    ResidentBlock,
    commit_all,
    next_table,
    residents_of,
    store_blocks,
)

KEY, BLOCKS, FACTOR = 5, 6, 4


def blocks(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def new_table(key_bytes: int = KEY) -> BlockTable:
    return BlockTable(BLOCKS, key_bytes)


def store(table: BlockTable, numbers: list[int], keys: list[bytes], **parts: Part) -> None:
    """Store blocks, and commit them. An argument `b3` is the stored part of block 3."""
    store_blocks(table, numbers, keys, {int(name[1:]): part for name, part in parts.items()})


def residents(table: BlockTable) -> tuple[ResidentBlock, ...]:
    return residents_of(table.lines.memory, table.epoch)


def restored(table: BlockTable) -> BlockTable:
    """The table of the next daemon."""
    restored = next_table(table, KEY)
    restored.restore(FACTOR)
    return restored


STATES = {
    FREE: Lookup.MISS,
    ORPHANED: Lookup.MISS,
    PENDING: Lookup.HIT_PENDING,
    STORED: Lookup.HIT,
    STORED_PART: Lookup.MISS,
    COMMITTED: Lookup.HIT,
    COMMITTED_PART: Lookup.MISS,
    UNVERIFIED: Lookup.HIT_PENDING,
    UNVERIFIED_PART: Lookup.MISS,
}


def in_state(state: int) -> BlockTable:
    """A table whose block 0 is in this state."""
    table, zero = new_table(), blocks(0)
    parts = {0: (0, 1)} if state in (STORED_PART, COMMITTED_PART, UNVERIFIED_PART) else {}
    if state in UNCHECKED:
        store_blocks(table, [0], [], parts)
        return restored(table)
    if state != FREE:
        table.set_pending(zero)
    if state == ORPHANED:
        table.hold(zero)
        table.drop(zero)
    elif state not in (FREE, PENDING):
        table.set_stored(zero, [], parts)
    if state in CHECKED:
        commit_all(table)
    return table


@pytest.mark.parametrize("state", STATES)
def test_each_state_answers_lookups_and_counts_one_block(state: int) -> None:
    table = in_state(state)
    assert (table.state(0), table.lookups([0, -1])) == (state, [STATES[state], None])
    assert [table.count(each) for each in STATES] == [
        (each == state) + (BLOCKS - 1) * (each == FREE) for each in STATES
    ]
    assert table.find(state)[0] == 0
    table.check_integrity()


NEXT = {
    "set_pending": {FREE},
    "set_stored": {PENDING},
    "drop": {*OCCUPIED},
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("step", NEXT)
def test_a_transition_that_the_table_does_not_have_is_refused(step: str, state: int) -> None:
    table = in_state(state)
    if state in NEXT[step]:
        getattr(table, step)(blocks(0))
        table.check_integrity()
        assert table.state(0) != state
    elif (state, step) != (ORPHANED, "drop"):
        with pytest.raises(IllegalTransition):
            getattr(table, step)(blocks(0))
        assert table.state(0) == state


def test_the_next_daemon_finds_committed_blocks_by_recency() -> None:
    table = new_table()
    store(table, [4, 0, 2], [b"bbbbb", b"aa\0\0\0", b"ccccc"], b0=(1, 2))
    assert residents(table) == (
        ResidentBlock(2, b"ccccc"),
        ResidentBlock(0, b"aa\0\0\0", (1, 2)),
        ResidentBlock(4, b"bbbbb"),
    )
    assert table.lines.checksums(blocks(0, 2, 4)).tolist() == [0, 14, 28]
    table.lines.touch(blocks(2))
    assert [resident.block for resident in residents(table)] == [0, 4, 2]


def test_a_block_in_part_becomes_whole_with_the_next_store() -> None:
    table = new_table()
    store(table, [0, 1], [b"aaaaa", b"bbbbb"], b0=(1, 2), b1=(0, 1))
    assert (table.part(0), table.part(2)) == ((1, 2), None)
    store(table, [0], [b"aaaaa"])
    assert (table.part(0), table.part(1)) == (None, (0, 1))
    assert residents(table) == (ResidentBlock(1, b"bbbbb", (0, 1)), ResidentBlock(0, b"aaaaa"))


def test_blocks_of_an_engine_without_namespace_have_no_keys() -> None:
    table = new_table(0)
    store(table, [1, 3], [])
    store(table, [4], [], b4=(0, 1))
    assert table.lines.keys(blocks(3, 1)) == ()
    assert table.find(*CHECKED, begin=2, end=4).tolist() == [3]
    restored = next_table(table, 0)
    found, keys = restored.restore(FACTOR)
    assert (found.tolist(), keys) == ([3, 1, 4], ())
    assert [restored.part(block) for block in (3, 1, 4)] == [None, None, (0, 1)]


def test_restored_blocks_are_unverified_until_compared_or_overwritten() -> None:
    old = new_table()
    store(old, [0, 1, 2, 3], [b"aaaaa", b"bbbbb", b"ccccc", b"ddddd"], b1=(0, 1))
    table = restored(old)
    assert table.find(*UNCHECKED).tolist() == [0, 1, 2, 3]
    table.set_verified(blocks(1, 2, 4))
    assert [table.state(block) for block in (1, 2, 4)] == [COMMITTED_PART, COMMITTED, FREE]
    table.drop(blocks(0))
    assert table.find(*UNCHECKED).tolist() == [3]
    assert {each.block for each in residents(table)} == {1, 2, 3}
    table.check_integrity()


@pytest.mark.parametrize("part", [(2, FACTOR + 1), (2, 2), (3, 2)])
def test_a_damaged_part_is_refused(part: Part) -> None:
    table = new_table()
    store(table, [0, 1], [b"aaaaa", b"bbbbb"], b1=part)
    with pytest.raises(ValueError, match="of host block 1 do not exist"):
        next_table(table, KEY).restore(FACTOR)


def test_blocks_without_a_known_number_of_sub_blocks_are_refused() -> None:
    table = new_table()
    assert next_table(table, KEY).restore(0)[0].size == 0
    store(table, [0], [b"aaaaa"])
    with pytest.raises(ValueError, match="1 blocks are committed, but block_size_factor is 0"):
        next_table(table, KEY).restore(0)


def test_a_block_that_is_dropped_while_its_checksum_is_computed_is_not_committed() -> None:
    table = new_table()
    table.set_pending(blocks(1, 2, 3))
    table.set_stored(blocks(1, 2, 3), [b"aaaaa", b"bbbbb", b"ccccc"], {3: (1, 2)})
    versions = table.lines.versions(blocks(1, 2, 3))
    table.drop(blocks(1, 2))
    table.set_pending(blocks(2))
    table.set_stored(blocks(2), [b"ddddd"])
    table.commit(blocks(1, 2, 3), versions, np.array([7, 8, 9], np.uint64))
    assert residents(table) == (ResidentBlock(3, b"ccccc", (1, 2)),)
    assert table.find(*UNCOMMITTED).tolist() == [2]


def test_a_held_block_that_is_dropped_becomes_free_with_the_last_hold() -> None:
    table, one = new_table(), blocks(1)
    table.set_pending(blocks(0, 1))
    table.hold(blocks(0, 1, 1))
    assert (table.held, table.idle, table.idle_among(blocks(0, 1, 2)).tolist()) == (2, 0, [2])
    assert table.drop(one).size == 0
    assert table.release(one).size == 0
    assert (table.state(1), table.held) == (ORPHANED, 2)
    assert table.release(one).tolist() == [1]
    assert (table.state(1), table.held) == (FREE, 1)
    assert table.release(blocks(0)).size == 0
    assert table.drop(blocks(0)).tolist() == [0]
    table.check_integrity()


def test_a_version_becomes_even_before_the_commit_is_removed() -> None:
    """A daemon may be killed between the two. The next one would write the block, and a sibling
    that reads it meanwhile would find the same version."""
    table, seen = in_state(COMMITTED), list[int]()
    number = table.find(COMMITTED)
    version = int(table.lines.versions(number)[0])

    class Commits:
        def __setitem__(self, *_: object) -> None:
            seen.append(int(table.lines.versions(number)[0]))

    table.lines._committed = Commits()  # type: ignore[assignment]
    table.drop(number)
    assert (version, seen) == (3, [4])


def test_a_version_becomes_odd_after_key_part_and_epoch_are_written() -> None:
    """A reader that finds an odd version finds what belongs to it."""
    table, seen = new_table(), list[Any]()
    table.begin_epoch(7)
    table.set_pending(blocks(1))
    versions = table.lines._versions

    class Versions:
        def __getitem__(self, at: Any) -> Any:
            return versions[at]

        def __setitem__(self, at: Any, value: Any) -> None:
            seen.append((*table.lines.memory[["key", "part", "epoch"]][1].tolist(), value.tolist()))

    table.lines._versions = Versions()  # type: ignore[assignment]
    table.set_stored(blocks(1), [b"aaaaa"], {1: (1, 2)})
    assert [(key, part.tolist(), *rest) for key, part, *rest in seen] == [
        (b"aaaaa", [1, 2], 7, [3])
    ]


def test_a_version_is_odd_while_its_block_has_contents() -> None:
    table, versions = new_table(), list[int]()

    def note() -> None:
        versions.append(int(table.lines.versions(blocks(0))[0]))

    for _ in range(2):
        table.set_pending(blocks(0))
        note()
        table.drop(blocks(0))  # the store failed
        note()
    store(table, [0], [b"aaaaa"])
    note()
    table.begin_epoch(1)
    note()
    store(table, [0], [b"aaaaa"])
    note()
    table = next_table(table, KEY)
    table.restore(FACTOR)
    note()
    table.set_verified(blocks(0))
    note()
    assert versions == [2, 4, 6, 8, 11, 11, 13, 14, 15]


def test_a_new_epoch_drops_all_blocks_and_writes_no_line() -> None:
    table, some = new_table(), blocks(0, 1, 3)
    store(table, [0, 1, 3], [b"aaaaa", b"bbbbb", b"ccccc"])
    table.hold(blocks(0))
    lines, versions = table.lines.memory.copy(), table.lines.versions(some)
    table.begin_epoch(5)
    assert (table.find(ORPHANED).tolist(), table.count(FREE)) == ([0], BLOCKS - 1)
    assert (table.lines.memory == lines).all()
    assert not table.unchanged(some, versions).any()
    assert residents(table) == ()
    assert next_table(table, KEY).restore(FACTOR)[0].size == 0
    table.check_integrity()
    store(table, [1], [b"ddddd"])
    assert residents(table) == (ResidentBlock(1, b"ddddd"),)
    assert residents_of(table.lines.memory, 0) == (
        ResidentBlock(3, b"ccccc"),
        ResidentBlock(0, b"aaaaa"),
    )
    with pytest.raises(AssertionError, match="has begun before"):
        table.begin_epoch(5)


def test_a_block_of_an_earlier_epoch_is_not_committed() -> None:
    table, some = new_table(), blocks(0, 1)
    table.set_pending(some)
    table.set_stored(some, [b"aaaaa", b"bbbbb"])
    versions = table.lines.versions(some)
    table.begin_epoch(5)
    table.commit(some, versions, np.zeros(2, np.uint64))
    assert not table.lines.memory["committed"].any()


def test_a_version_that_a_kill_left_odd_is_even_after_a_restart() -> None:
    table = new_table()
    table.set_pending(blocks(0, 1))
    table.set_stored(blocks(0, 1), [b"aaaaa", b"bbbbb"])  # and not committed
    table.begin_epoch(5)
    table.set_pending(blocks(1))
    table.set_stored(blocks(1), [b"ccccc"])
    assert restored(table).lines.versions(blocks(0, 1, 2)).tolist() == [4, 6, 0]


@pytest.mark.parametrize("stamp", [1 << 62, 1 << 63, (1 << 64) - 1])
def test_a_damaged_stamp_changes_only_the_order_of_its_block(stamp: int) -> None:
    table, clock = new_table(), UseClock()
    store(table, [4, 0, 2], [b"aaaaa", b"bbbbb", b"ccccc"])
    table.lines.memory["stamp"][2] = stamp
    lines = BlockLines(BLOCKS, KEY, table.lines.memory)
    lines.use_clock(clock)
    assert lines.restore(0)[0].tolist() == [0, 4, 2]
    lines.touch(blocks(0, 4))
    assert lines.restore(0)[0].tolist() == [2, 4, 0]


def test_all_tables_share_the_use_clock_also_after_a_restart() -> None:
    clock, tables = UseClock(), [new_table(), new_table(0)]
    for table in tables:
        table.lines.use_clock(clock)
    store(tables[0], [0], [b"aaaaa"])
    store(tables[1], [0, 1], [])
    store(tables[0], [1], [b"bbbbb"])
    stamps = [table.lines.stamps(blocks(0, 1)).tolist() for table in tables]
    assert stamps == [[1, 4], [3, 2]]
    clock = UseClock()
    others = [
        BlockLines(BLOCKS, key, table.lines.memory)
        for key, table in zip((KEY, 0), tables, strict=True)
    ]
    for lines in others:
        lines.use_clock(clock)
    others[1].touch(blocks(1))
    assert others[1].stamps(blocks(0, 1)).tolist() == [3, 5]
