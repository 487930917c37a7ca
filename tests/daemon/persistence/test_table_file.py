"""Files of block tables: record and lines, which another process with the descriptor reads."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.daemon.core.block_lines import line_type
from kvferry.daemon.core.block_table import BlockTable
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.memory.foreign_memory import SharedWords
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.daemon.persistence.table_file import (
    LINES_AT,
    MAGIC_VALUE,
    RECORD_BYTES,
    TableFile,
    convert_table,
)
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from support.old_table import old_table

KEY = 5
BLOCKS = 6
NAMESPACE = Fingerprint("llama", 4096, key_bytes=KEY)
LAYOUT = LayoutArrays.from_layout(
    KVLayout((TensorLayout(4, 4096, 4096),), ((TensorRef(0, 4096),),))
)
KEYED = RegionRecord(NAMESPACE.name, 8192, BLOCKS * 4096 + 100, fingerprint=NAMESPACE)


@contextmanager
def new_file(record: RegionRecord = KEYED) -> Iterator[TableFile]:
    file = TableFile.create(record)
    yield file
    file.close()


def read_file(file: TableFile) -> tuple[RegionRecord, list[int]]:
    """The record and the committed blocks that another daemon reads."""
    other = TableFile(os.dup(file.descriptor))
    other.close()
    return other.record, np.flatnonzero(other.lines["committed"]).tolist()


def test_a_table_of_many_blocks_takes_memory_only_for_those_that_were_used() -> None:
    """Also if all are dropped: a reset would allocate and clear 100 MB for a million blocks."""
    many = 1 << 20
    with new_file(RegionRecord("engine", 0, many * 4096, layout=LAYOUT)) as file:
        table = BlockTable(many)
        table.lines.use_memory(file.lines)
        first = np.array([0])
        table.set_pending(first)
        table.set_stored(first)
        table.commit(first, table.lines.versions(first), np.array([5], np.uint64))
        table.begin_epoch(1)
        assert os.fstat(file.descriptor).st_blocks * 512 < 64 << 10


def test_the_version_of_a_block_is_at_its_documented_place() -> None:
    """Other daemons of the host read it."""
    with new_file() as file:
        table = BlockTable(BLOCKS, KEY)
        table.lines.use_memory(file.lines)
        block = np.array([2])
        for _ in range(3):
            table.set_pending(block)
            table.drop(block)
        at = LINES_AT + 2 * file.lines.itemsize + 32
        assert int.from_bytes(os.pread(file.descriptor, 4, at), "little") == 12


@pytest.mark.parametrize("words", range(3))
def test_a_daemon_may_be_killed_after_any_word_of_an_update(
    monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    """The next one reads the old record or the new one."""
    write, left = SharedWords.write, words
    old, new = (msgspec.structs.replace(KEYED, epoch=epoch) for epoch in (6, 7))

    class KilledWriter(Exception):
        pass

    def killed_write(head: SharedWords, word: int, value: int) -> None:
        nonlocal left
        if left:
            write(head, word, value)
            left -= 1
        if not left:
            raise KilledWriter

    with new_file() as file:
        file.lines["committed"][1] = True
        file.update(old)
        assert read_file(file) == (old, [1])
        with monkeypatch.context() as patch:
            patch.setattr(SharedWords, "write", killed_write)
            with pytest.raises(KilledWriter):
                file.update(new)
        assert read_file(file) == (new if words else old, [1])


def test_a_table_of_the_format_before_is_converted() -> None:
    """Its epoch is the number of its resets. Committed blocks are kept, with an even version."""
    committed = (9, 77, (0, 2), 5, True, b"aaaaa")
    descriptor = old_table(KEYED, {1: committed, 2: (8, 66, (0, 0), 5, False, b"bbbbb")}, 2)
    converted = convert_table(descriptor)
    assert converted is not None
    file = TableFile(converted)
    assert file.record == msgspec.structs.replace(KEYED, epoch=2)
    expected = np.zeros(BLOCKS, line_type(KEY))
    expected[1] = (9, 77, 2, (0, 2), 0, True, b"aaaaa")
    assert file.lines.tobytes() == expected.tobytes()
    assert convert_table(converted) is None
    os.pwrite(descriptor, b"x", PAGE + 9)
    with pytest.raises(Refused, match="wrong CRC"):
        convert_table(descriptor)
    file.close()
    os.close(descriptor)


def test_a_record_that_is_too_long_is_refused_and_the_old_one_stays() -> None:
    long = RegionRecord("engine", 0, 4096, layout=LAYOUT, pages=((1 << 60,) * (RECORD_BYTES // 8),))
    with new_file() as file:
        with pytest.raises(Refused) as refused:
            file.update(long)
        assert refused.value.code == Code.BAD_LAYOUT
        assert file.record == KEYED
        assert read_file(file) == (KEYED, [])


def words_of(file: TableFile) -> list[int]:
    words: list[int] = np.frombuffer(os.pread(file.descriptor, 32, 0), np.uint64).tolist()
    return words


def test_the_head_names_the_contents_and_the_pool() -> None:
    with new_file() as file:
        assert words_of(file) == [MAGIC_VALUE, 0, 0, 0]
        record = msgspec.structs.replace(KEYED, pages=((4096,),), factor=1)
        file.update(record)
        file.sign(7)
        assert words_of(file) == [MAGIC_VALUE, 1, record.composition, 7]
        assert 0 < record.composition < 1 << 63
        file.mark_void()
        assert words_of(file) == [0, 1, 0, 7]


def test_the_key_table_follows_the_lines() -> None:
    with new_file() as file:
        assert file.buckets.shape == (1, 16)
        file.lines["key"] = b"\xff" * KEY
        assert not file.buckets.any()
        file.buckets[:] = np.uint64(1 << 32)
        other = TableFile(os.dup(file.descriptor))
        other.close()
        assert (other.buckets == 1 << 32).all()
    with new_file(RegionRecord("engine", 0, 4096, layout=LAYOUT)) as file:
        assert file.buckets.size == 0


def test_a_hostile_record_is_refused() -> None:
    nested = msgspec.Raw(b"\x91" * 5000 + b"\xc0")
    record = {"name": "a", "start": 0, "nbytes": 4096, "layout": nested}
    data = msgspec.msgpack.encode(record)
    with new_file() as file:
        head = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little")
        os.pwrite(file.descriptor, head + data, PAGE)
        with pytest.raises(Refused, match="recursion"):
            TableFile(os.dup(file.descriptor))


def test_a_record_with_impossible_numbers_is_refused() -> None:
    """Also if its file has the size that a negative number of lines needs."""
    wrong: list[dict[str, Any]] = [{"nbytes": -blocks * 4096} for blocks in range(17)]
    wrong += [{"start": -4096}, {"epoch": -1}, {"epoch": 1 << 62}, {"threshold": 0}, {"factor": -1}]
    for fields in wrong:
        with pytest.raises(Refused) as refused:
            TableFile.create(msgspec.structs.replace(KEYED, **fields))
        assert refused.value.code == Code.BAD_LAYOUT, fields
