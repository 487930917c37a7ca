"""Memory that another process writes: each value is read once, and as it was written."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.memory.foreign_memory import WORD, ForeignMemory, SharedWords
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, Refused
from kvferry.shm.memfd import sealed_memfd
from support.writing_process import READS, writing_process

LINE = np.dtype([("flag", "?"), ("number", "<u4"), ("key", "V5")], align=True)
PACKED = np.dtype([("flag", "?"), ("number", "<u4")])


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = sealed_memfd("kvferry-test-foreign", PAGE)
    yield descriptor
    os.close(descriptor)


def test_a_column_is_copied(descriptor: int) -> None:
    lines = np.frombuffer(mmap.mmap(descriptor, PAGE), LINE, 10)
    lines["number"] = np.arange(10)
    memory = ForeignMemory(descriptor, "lines")
    numbers = memory.column(LINE, 0, 10, "number")
    copied = numbers.copy(np.array([7, 2, 2]))
    lines["number"] = 0
    assert copied.tolist() == [7, 2, 2]
    assert numbers.copy(np.arange(10)).tolist() == [0] * 10
    copied[0] = 5  # it is the caller's
    assert (numbers.read(7), memory.copy_bytes(0, 4)) == (0, bytes(4))


def test_rows_of_any_kind_are_copied(descriptor: int) -> None:
    """numpy has views for a slice and for one number."""
    written = np.frombuffer(mmap.mmap(descriptor, PAGE), WORD)
    column = ForeignMemory(descriptor, "pairs").column(np.dtype((np.uint64, (2,))), 0, 4)
    rows: list[Any] = [range(4), 3, np.int64(3), np.array(3), np.array([[0, 1], [2, 3]])]
    copies = [column.copy(each) for each in rows]
    written[:] = 1
    assert [copied.tolist() for copied in copies] == [[[0, 0]] * count for count in (4, 1, 1, 1, 4)]
    with pytest.raises(TypeError):
        column.copy(slice(0, 4))  # type: ignore[arg-type]


def test_a_word_is_never_seen_half_written(descriptor: int) -> None:
    """struct.pack_into, for example, clears it first."""
    column = ForeignMemory(descriptor, "a word").column(WORD, 8, 1)
    first, second = 0x1111111111111111, 0xEEEEEEEEEEEEEEEE
    SharedWords(mmap.mmap(descriptor, PAGE), 8, 1).write(0, first)
    prepare = "\n".join(
        (
            "from kvferry.daemon.memory.foreign_memory import SharedWords",
            f"words = SharedWords(mmap.mmap(descriptor, {PAGE}), 8, 1)",
        )
    )
    rows = np.zeros(1, np.int64)
    with writing_process(descriptor, prepare, f"words.write(0, {first}); words.write(0, {second})"):
        seen = {column.read() for _ in range(READS)}
        seen |= {int(column.copy(rows)[0]) for _ in range(READS)}
    assert seen <= {first, second}


def test_a_word_with_any_value_is_counted_up(descriptor: int) -> None:
    words = SharedWords(mmap.mmap(descriptor, PAGE), 0, 2)
    words.write(1, (1 << 64) - 2)
    assert [words.count_up(1) for _ in range(3)] == [(1 << 64) - 1, 0, 1]
    assert (words.read(0), words.read(1)) == (0, 1)


@pytest.mark.parametrize(("kind", "at", "field"), [(WORD, 4, None), (PACKED, 0, "number")])
def test_values_that_are_not_aligned_are_refused(
    descriptor: int, kind: np.dtype[np.void], at: int, field: str | None
) -> None:
    memory = ForeignMemory(descriptor, "a page")
    with pytest.raises(ValueError, match="aligned"):
        memory.column(kind, at, 1, field)
    with pytest.raises(ValueError, match="aligned"):
        SharedWords(mmap.mmap(descriptor, PAGE), 4, 1)


def test_memory_that_its_writer_can_shrink_is_refused() -> None:
    descriptor = os.memfd_create("kvferry-test-foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE)
    with pytest.raises(Refused, match="can be shrunk") as raised:
        ForeignMemory(descriptor, "the page")
    assert raised.value.code == Code.NOT_SHAREABLE
    os.close(descriptor)


def test_memory_that_is_too_small_is_refused(descriptor: int) -> None:
    with pytest.raises(Refused, match="has 4096 bytes; create it with 4097 or more") as raised:
        ForeignMemory(descriptor, "the page", PAGE + 1)
    assert raised.value.code == Code.BAD_LAYOUT
    empty = sealed_memfd("kvferry-test-foreign", 0)
    with pytest.raises(Refused, match="has 0 bytes; create it with 1 or more"):
        ForeignMemory(empty, "the page")
    os.close(empty)


def test_memory_is_unmapped_with_its_last_column(descriptor: int) -> None:
    """It may be that of a sibling that has died."""
    columns = [ForeignMemory(descriptor, "the page").column(WORD, at, 1) for at in (0, 8)]
    while columns:
        assert is_mapped()
        columns.pop()
    assert not is_mapped()


def is_mapped() -> bool:
    return "memfd:kvferry-test-foreign" in Path("/proc/self/maps").read_text()
