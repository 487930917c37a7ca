"""The incarnation of the pool: each daemon that has it has another one."""

from __future__ import annotations

import os

import pytest

from kvferry.daemon.memory.foreign_memory import WORD, ForeignMemory
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, Refused
from kvferry.shm.memfd import sealed_memfd


def test_each_daemon_changes_the_number_that_siblings_read() -> None:
    first = PoolIncarnation()
    word = ForeignMemory(first.descriptor, "the page", PAGE).column(WORD, 0, 1)
    assert word.read() == first.number == 1
    for number in (2, 3):
        assert PoolIncarnation(os.dup(first.descriptor)).number == word.read() == number


def test_a_page_with_any_number_is_used() -> None:
    page = PoolIncarnation().descriptor
    os.pwrite(page, b"\xff" * 8, 0)
    assert [PoolIncarnation(os.dup(page)).number for _ in range(2)] == [0, 1]


def test_a_file_that_is_no_page_is_refused() -> None:
    unsealed = os.memfd_create("kvferry-incarnation", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    wrong = {
        unsealed: Code.NOT_SHAREABLE,
        sealed_memfd("kvferry-incarnation", 2 * PAGE): Code.BAD_LAYOUT,
    }
    for descriptor, code in wrong.items():
        with pytest.raises(Refused) as raised:
            PoolIncarnation(descriptor)
        assert raised.value.code == code
        os.close(descriptor)
