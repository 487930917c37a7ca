"""Block tables: they record the committed blocks, also for a later daemon with the descriptor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.core.records import RegionRecord, ResidentBlock
from kvferry.daemon.persistence.block_table import CLEARED_LINES, RECORD_BYTES, BlockTable, UseClock
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from kvferry.shm.memfd import sealed_memfd

KEY = 5
BLOCKS = 6
NAMESPACE = Fingerprint("llama", 4096, key_bytes=KEY)
LAYOUT = LayoutArrays.from_layout(
    KVLayout((TensorLayout(4, 4096, 4096),), ((TensorRef(0, 4096),),))
)
KEYED = RegionRecord(NAMESPACE.name, 8192, BLOCKS * 4096 + 100, fingerprint=NAMESPACE)
RAW = RegionRecord("engine", 0, BLOCKS * 4096, layout=LAYOUT)


@contextmanager
def new_table(record: RegionRecord = KEYED) -> Iterator[BlockTable]:
    table = BlockTable.create(record)
    yield table
    table.close()


def read_residents(table: BlockTable) -> tuple[ResidentBlock, ...]:
    """The residents that another daemon reads."""
    other = BlockTable(os.dup(table.descriptor))
    assert other.record == table.record
    residents = other.residents()
    other.close()
    return residents


def blocks(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def store(
    table: BlockTable, numbers: list[int], keys: list[bytes], **parts: tuple[int, int]
) -> None:
    part_of = {int(name[1:]): part for name, part in parts.items()}
    commit(table, numbers, table.invalidate(blocks(*numbers)), keys, part_of)


def commit(
    table: BlockTable,
    numbers: list[int],
    versions: Any,
    keys: list[bytes],
    parts: dict[int, tuple[int, int]] | None = None,
) -> list[int]:
    """A store of blocks that had these versions completes. Returns the committed blocks."""
    some = blocks(*numbers)
    table.store(some, table.unchanged(some, versions), keys, parts or {})
    checksums = np.array([7 * n for n in numbers], dtype=np.uint64)
    return list(table.commit(some, versions, checksums).tolist())


def test_blocks_that_were_never_stored_use_no_memory() -> None:
    count = 1 << 20
    with new_table(RegionRecord("engine", 0, count * 4096, layout=LAYOUT)) as table:
        store(table, [count - 1], [])
        assert os.fstat(table.descriptor).st_blocks * 512 < 64 << 10


def test_a_restored_table_has_its_residents_in_order() -> None:
    with new_table() as table:
        store(table, [4, 0, 2], [b"bbbbb", b"aa\0\0\0", b"ccccc"], b0=(1, 2))
        assert read_residents(table) == (
            ResidentBlock(2, b"ccccc"),
            ResidentBlock(0, b"aa\0\0\0", (1, 2)),
            ResidentBlock(4, b"bbbbb"),
        )
        assert table.checksums(blocks(0, 2, 4)).tolist() == [0, 14, 28]
        table.touch(blocks(2))
        assert [resident.block for resident in read_residents(table)] == [0, 4, 2]


def test_a_partial_block_becomes_complete_with_the_next_complete_store() -> None:
    with new_table() as table:
        store(table, [0, 1], [b"aaaaa", b"bbbbb"], b0=(1, 2), b1=(0, 1))
        store(table, [0], [b"aaaaa"])
        assert read_residents(table) == (
            ResidentBlock(1, b"bbbbb", (0, 1)),
            ResidentBlock(0, b"aaaaa"),
        )


def test_blocks_of_an_engine_without_namespace_have_no_keys() -> None:
    with new_table(RAW) as table:
        store(table, [1, 3], [])
        store(table, [4], [], b4=(0, 1))
        assert table.keys(blocks(3, 1)) == ()
        assert table.committed_blocks().tolist() == [1, 3, 4]
        assert table.committed_blocks(2, 4).tolist() == [3]
        assert read_residents(table) == (
            ResidentBlock(3, b""),
            ResidentBlock(1, b""),
            ResidentBlock(4, b"", (0, 1)),
        )


def test_an_update_replaces_the_record_and_clears_the_blocks() -> None:
    with new_table() as table:
        for generation in range(2, 6):
            record = RegionRecord(
                KEYED.name,
                KEYED.start,
                KEYED.nbytes,
                fingerprint=NAMESPACE,
                generation=generation,
                pages=((4096,),) * generation,
            )
            table.update(record)
            assert read_residents(table) == ()
            assert table.record == record


def test_a_record_that_is_too_long_is_refused_and_the_old_one_stays() -> None:
    long = RegionRecord("engine", 0, 4096, layout=LAYOUT, pages=((1 << 60,) * (RECORD_BYTES // 8),))
    with new_table() as table:
        with pytest.raises(Refused) as refused:
            table.update(long)
        assert refused.value.code == Code.BAD_LAYOUT
        assert table.record == KEYED
        assert read_residents(table) == ()


def test_an_invalidated_table_is_refused() -> None:
    with new_table() as table:
        store(table, [1], [b"aaaaa"])
        table.mark_void()
        with pytest.raises(Refused):
            read_residents(table)


@pytest.mark.parametrize("nbytes", [1, 4096, (4 << 20) + 1])
def test_memory_that_is_no_table_is_refused_and_closed(nbytes: int) -> None:
    descriptor = sealed_memfd("other", nbytes)
    with pytest.raises(Refused) as refused:
        BlockTable(descriptor)
    assert refused.value.code == Code.BAD_LAYOUT
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_memory_that_can_shrink_is_refused(tmp_path: Any) -> None:
    for descriptor in (os.memfd_create("open"), os.open(tmp_path, os.O_RDONLY), os.pipe()[0]):
        with pytest.raises(Refused) as refused:
            BlockTable(descriptor)
        assert refused.value.code == Code.NOT_SHAREABLE


@pytest.mark.parametrize("less", [8, 48, -1])
def test_a_table_with_other_slots_than_its_record_states_is_refused(less: int) -> None:
    with new_table() as table:
        data = os.pread(table.descriptor, 1 << 24, 0)
    other = sealed_memfd("other", len(data) - less)
    os.pwrite(other, data[: len(data) - less], 0)
    with pytest.raises(Refused) as refused:
        BlockTable(other)
    assert refused.value.code == Code.BAD_LAYOUT


@pytest.mark.parametrize("stamp", [1 << 62, 1 << 63, (1 << 64) - 1])
def test_a_damaged_stamp_changes_only_the_order_of_its_block(stamp: int) -> None:
    with new_table() as table:
        store(table, [4, 0, 2], [b"aaaaa", b"bbbbb", b"ccccc"])
        table._stamps[2] = stamp
        other = BlockTable(os.dup(table.descriptor))
        assert [resident.block for resident in other.residents()] == [0, 4, 2]
        other.touch(blocks(0, 4))
        assert [resident.block for resident in other.residents()] == [2, 4, 0]
        other.close()


def test_restored_blocks_are_unverified_until_compared_or_overwritten() -> None:
    with new_table() as table:
        store(table, [0, 1, 2, 3], [b"aaaaa", b"bbbbb", b"ccccc", b"ddddd"])
        assert table.unverified_bytes == 0
        table.mark_unverified(blocks(0, 1, 2))
        assert table.committed_blocks().tolist() == [0, 1, 2]  # other blocks are dropped
        assert table.unverified_bytes == 3 * 4096
        assert table.clear_unverified(blocks(2, 1, 4)).tolist() == [2, 1]
        assert table.clear_unverified(blocks(2)).tolist() == []
        assert table.unverified_bytes == 4096
        table.invalidate(blocks(0))
        assert table.unverified_bytes == 0
        table.mark_unverified(blocks(1, 2))
        table.mark_corrupt(blocks(1))
        table.clear_unverified(blocks(2))
        assert table.unverified is None
        assert table.committed_blocks().tolist() == [2]


def test_a_store_of_a_block_that_is_marked_corrupt_is_not_committed() -> None:
    with new_table() as table:
        versions = table.invalidate(blocks(1, 2))
        table.mark_corrupt(blocks(1))
        assert commit(table, [1, 2], versions, [b"aaaaa", b"bbbbb"]) == [2]
        assert read_residents(table) == (ResidentBlock(2, b"bbbbb"),)


def test_a_block_is_stored_from_its_store_until_its_commit() -> None:
    with new_table() as table:
        versions = table.invalidate(blocks(1, 2, 3))
        assert not table.stored.any()
        table.store(blocks(1, 2, 3), np.array([True, True, False]), [b"aaaaa"] * 3, {})
        assert np.flatnonzero(table.stored).tolist() == [1, 2]
        assert read_residents(table) == ()
        table.invalidate(blocks(1))
        assert np.flatnonzero(table.stored).tolist() == [2]
        table.commit(blocks(2), versions[1:2], np.zeros(1, np.uint64))
        assert not table.stored.any()
        table.store(blocks(3), np.array([True]), [b"bbbbb"], {})
        table.clear_commits()
        assert not table.stored.any()


def test_the_more_recent_of_two_blocks_with_one_key_is_found() -> None:
    with new_table() as table:
        store(table, [0, 1], [b"aaaaa", b"bbbbb"])
        store(table, [2], [b"aaaaa"])
        assert read_residents(table) == (ResidentBlock(1, b"bbbbb"), ResidentBlock(2, b"aaaaa"))


def test_all_tables_share_the_use_clock_also_after_a_restart() -> None:
    clock = UseClock()
    keyed, raw = BlockTable.create(KEYED, clock), BlockTable.create(RAW, clock)
    store(keyed, [0], [b"aaaaa"])
    store(raw, [0, 1], [])
    store(keyed, [1], [b"bbbbb"])
    assert keyed.stamps(blocks(0, 1)).tolist() == [1, 4]
    assert raw.stamps(blocks(0, 1)).tolist() == [3, 2]
    clock = UseClock()
    restored = [BlockTable(os.dup(table.descriptor), clock) for table in (keyed, raw)]
    restored[1].touch(blocks(1))
    assert restored[1].stamps(blocks(0, 1)).tolist() == [3, 5]
    for table in (keyed, raw, *restored):
        table.close()


NUMBERS = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["invalidate", "commit", "commit", "wipe", "touch"]),
        NUMBERS,
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(STEPS)
def test_only_the_last_store_of_a_block_commits_it(steps: list[tuple[str, list[int], int]]) -> None:
    """Compared with a dictionary. A store commits no block after a later store of it, or a wipe."""
    keys = (number.to_bytes(KEY, "big") for number in range(1, 1000))
    with new_table() as table:
        in_flight: list[tuple[list[int], Any]] = []
        last: dict[int, object] = {}
        committed: dict[int, bytes] = {}
        for step, numbers, index in steps:
            if step == "invalidate":
                versions = table.invalidate(blocks(*numbers))
                in_flight.append((numbers, versions))
                for number in numbers:
                    last[number] = versions
                    committed.pop(number, None)
            elif step == "commit" and in_flight:
                stored, versions = in_flight.pop(index % len(in_flight))
                names = [next(keys) for _ in stored]
                current = [n for n in stored if last.get(n) is versions]
                assert commit(table, stored, versions, names) == current
                for number in current:
                    committed.pop(number, None)
                committed.update(
                    {n: name for n, name in zip(stored, names, strict=True) if n in current}
                )
            elif step == "wipe":
                table.clear_commits()
                last, committed = {}, {}
            elif step == "touch" and set(numbers) <= committed.keys():
                table.touch(blocks(*numbers))
                for number in reversed(numbers):
                    committed[number] = committed.pop(number)
        assert {r.block: r.key for r in read_residents(table)} == committed


def test_a_wipe_clears_all_blocks() -> None:
    """The number of blocks exceeds the number of lines that are cleared at a time."""
    numbers = [0, CLEARED_LINES - 1, CLEARED_LINES, 2 * CLEARED_LINES, 2 * CLEARED_LINES + 2]
    with new_table(
        RegionRecord("engine", 0, (2 * CLEARED_LINES + 3) * 4096, layout=LAYOUT)
    ) as table:
        store(table, numbers, [])
        versions = table.versions(blocks(*numbers))
        table.clear_commits()
        assert table.committed_blocks().size == 0
        assert not table.unchanged(blocks(*numbers), versions).any()


def test_a_wipe_takes_no_memory_for_blocks_that_were_never_stored() -> None:
    """A reset would allocate and clear 100 MB for a million blocks."""
    many = 1 << 20
    with new_table(RegionRecord(NAMESPACE.name, 0, many * 4096, fingerprint=NAMESPACE)) as table:
        store(table, [0], [b"aaaaa"])
        versions = table.invalidate(blocks(1))
        table.clear_commits()
        assert os.fstat(table.descriptor).st_blocks * 512 < 64 << 10
        assert commit(table, [1], versions, [b"bbbbb"]) == []
        assert read_residents(table) == ()
