"""The memory of siblings: which blocks can be loaded from it, and how long it stays mapped."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from kvferry.daemon.tiers.siblings.lent_memory import MappedWindows
from structlog.testing import capture_logs

from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.core.records import RegionRecord
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.persistence.table_file import LentTable, TableFile, mark_void
from kvferry.daemon.tiers.messages import FileOf, LentFiles
from kvferry.proto.errors import Code, Failed
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import MAX_COUNT
from kvferry.proto.status import SiblingStatus
from kvferry.shm.memfd import sealed_memfd
from support.descriptors import count_memfds
from support.time_limits import TIMEOUT

CHUNK, BLOCK = 1 << 16, 12 << 10
# The sibling's namespace begins in its second chunk, which is the first one that is lent.
START, BLOCKS = CHUNK + BLOCK, 12
FINGERPRINT = Fingerprint("model", BLOCK)
RECORD = RegionRecord("name", START, BLOCKS * BLOCK, fingerprint=FINGERPRINT, factor=1)


class Registrar:
    numa_node: int | None = None

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.fails = False
        # Set when a chunk is registered, and when that may end.
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def pin(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        self.begun.set()
        self.may_end.wait(TIMEOUT)
        if self.fails:
            raise Failed(Code.POOL_TOO_LARGE, "cannot be pinned", nbytes)
        assert not writable
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


class LentMemoryFixture:
    """A sibling's namespace in two chunks and a half, and this daemon's windows."""

    def __init__(self, stack: ExitStack) -> None:
        self.registrar, self.pool = Registrar(), HostPool(CHUNK, CHUNK)
        stack.callback(self.pool.close, self.registrar)
        self.pool.ready_bytes = self.pool.nbytes
        stack.callback(setattr, self.pool, "ready_bytes", 0)
        self.windows = MappedWindows(self.registrar, self.pool, LentTable)
        self.chunks = [sealed_memfd("chunk", size) for size in (CHUNK, CHUNK, CHUNK // 2)]
        for number, chunk in enumerate(self.chunks):
            stack.callback(os.close, chunk)
            at = CHUNK * (number + 1)
            os.pwrite(chunk, content(at, os.fstat(chunk).st_size), 0)
        self.table = TableFile.create(RECORD)
        stack.callback(self.table.close)
        self.incarnation = PoolIncarnation()
        stack.callback(os.close, self.incarnation.descriptor)
        self.files = self.lent(1)
        stack.callback(self.update)

    def lent(self, window: int, chunk_bytes: int = CHUNK, start: int = START) -> LentFiles:
        chunks, table = tuple(map(file_of, self.chunks)), file_of(self.table.descriptor)
        page, number = file_of(self.incarnation.descriptor), self.incarnation.number
        return LentFiles(window, "/run/sibling", chunk_bytes, start, chunks, table, page, number)

    def update(self, *files: LentFiles) -> None:
        asyncio.run(self.windows.update(files, os.getpid()))

    def resolve(self, *offsets: int, window: int = 1, start: int = BLOCK) -> Int64s:
        places = [(window, offset, 0) for offset in offsets]
        return self.windows.resolve(np.array(places), BLOCK, start)

    def bytes_at(self, row: int) -> bytes:
        return ctypes.string_at(self.pool.address + int(row), BLOCK)

    @property
    def status(self) -> SiblingStatus:
        return self.windows.count_in(SiblingStatus("/run/sibling", "on"))


def file_of(descriptor: int) -> FileOf:
    return FileOf(descriptor, os.fstat(descriptor).st_ino)


def content(offset: int, nbytes: int) -> bytes:
    return bytes((at * 7 + at // 256) % 256 for at in range(offset, offset + nbytes))


@pytest.fixture
def lent() -> Iterator[LentMemoryFixture]:
    with ExitStack() as stack:
        yield LentMemoryFixture(stack)


def test_blocks_are_addressed_from_the_start_of_the_own_pool(lent: LentMemoryFixture) -> None:
    for _ in range(2):
        lent.update(lent.files)
    assert (lent.windows.numbers, lent.status.mapped_bytes) == ((1,), 5 * CHUNK // 2)
    assert lent.windows.count_in(SiblingStatus("/run/other", "on")).mapped_bytes == 0
    assert sorted(lent.registrar.pinned.values()) == [CHUNK // 2, CHUNK, CHUNK]
    offsets = [START + number * BLOCK for number in range(BLOCKS)]
    rows = lent.resolve(*offsets)
    assert rows[0].tolist() == [1] * BLOCKS
    assert rows[2].tolist() == list(range(BLOCKS))
    for offset, row in zip(offsets, rows[1].tolist(), strict=True):
        assert lent.bytes_at(row) == content(offset, BLOCK)


def test_chunks_begin_where_those_of_the_own_pool_do(lent: LentMemoryFixture) -> None:
    """Engines split copies there."""
    lent.update(lent.files)
    assert {(at - lent.pool.address) % CHUNK for at in lent.registrar.pinned} == {0}


@pytest.mark.parametrize("offset", [0, START - 1, START - BLOCK, START + BLOCKS * BLOCK, 1 << 50])
def test_nothing_else_is_read(lent: LentMemoryFixture, offset: int) -> None:
    lent.update(lent.files)
    assert lent.resolve(offset).tolist() == [[-1]] * 4


@pytest.mark.parametrize("start", [0, MAX_COUNT - 1])
def test_nothing_beyond_the_mapped_chunks_is_read(lent: LentMemoryFixture, start: int) -> None:
    """For each start that a hostile sibling may send."""
    lent.update(lent.lent(1, start=start))
    end = start // CHUNK * CHUNK + 5 * CHUNK // 2
    outside = [start - 1, end - BLOCK + 1, end]
    assert lent.resolve(*outside).tolist() == [[-1] * 3] * 4


def test_a_block_that_the_block_table_does_not_have_is_not_read(lent: LentMemoryFixture) -> None:
    lent.update(lent.files)
    places = np.array([(1, START + (BLOCKS - 1) * 4096, 0), (1, START + BLOCKS * 4096, 0)])
    assert lent.windows.resolve(places, 4096, 0)[0].tolist() == [1, -1]


def test_all_of_a_window_is_closed(lent: LentMemoryFixture) -> None:
    before = open_files()
    lent.update(lent.files)
    assert open_files() != before
    lent.update()
    assert open_files() == before


def open_files() -> tuple[int, ...]:
    names = "chunk", "kvferry-block-table", "kvferry-incarnation"
    return tuple(map(count_memfds, names))


def test_a_window_that_is_not_mapped_has_no_blocks(lent: LentMemoryFixture) -> None:
    assert lent.resolve(START).tolist() == [[-1]] * 4
    lent.update(lent.files)
    assert lent.resolve(START, window=2).tolist() == [[-1]] * 4


def test_no_block_spans_chunks_if_no_own_one_does(lent: LentMemoryFixture) -> None:
    """Engines do not split its copies then."""
    places = np.array([(1, START, 0), (1, 2 * CHUNK - 4096, 0)])
    lent.update(lent.files)
    assert lent.windows.resolve(places, 1 << 13, start=1 << 13)[0].tolist() == [1, -1]
    assert lent.windows.resolve(places, 1 << 13, start=4096)[0].tolist() == [1, 1]


def test_a_block_whose_version_has_grown_has_changed(lent: LentMemoryFixture) -> None:
    lent.update(lent.files)
    rows = lent.resolve(START, START + BLOCK)
    assert lent.windows.unchanged(rows).tolist() == [True, True]
    lent.table.lines["version"][1] += 1
    assert lent.windows.unchanged(rows).tolist() == [True, False]


def test_in_a_void_block_table_all_have_changed(lent: LentMemoryFixture) -> None:
    lent.update(lent.files)
    rows = lent.resolve(START)
    mark_void(lent.table.descriptor)
    assert lent.windows.unchanged(rows).tolist() == [False]


def test_if_another_daemon_has_the_pool_all_have_changed(lent: LentMemoryFixture) -> None:
    """It may not have got this block table, whose versions then do not grow."""
    lent.update(lent.files)
    rows = lent.resolve(START)
    PoolIncarnation(lent.incarnation.descriptor)
    assert lent.windows.unchanged(rows).tolist() == [False]


def test_memory_of_an_earlier_daemon_stays_void_if_it_is_mapped_later(
    lent: LentMemoryFixture,
) -> None:
    """The tier's process has got its descriptors before the daemon ended."""
    PoolIncarnation(lent.incarnation.descriptor)
    lent.update(lent.files)
    assert lent.windows.unchanged(lent.resolve(START)).tolist() == [False]


def test_memory_that_is_no_longer_lent_is_unmapped_after_the_last_load(
    lent: LentMemoryFixture,
) -> None:
    lent.update(lent.files)
    rows = lent.resolve(START, START + BLOCK)
    lent.windows.hold(rows)
    lent.update()
    assert lent.windows.numbers == ()
    assert lent.resolve(START)[0].tolist() == [-1]
    assert lent.bytes_at(rows[1, 0]) == content(START, BLOCK)
    assert lent.windows.unchanged(rows).all()
    lent.windows.hold(rows)  # by a load whose keys were found before
    lent.windows.release(rows, 0)
    lent.update()
    assert lent.status.mapped_bytes > 0
    lent.windows.release(rows, BLOCK)
    lent.update()
    assert lent.registrar.pinned == {}
    assert not lent.windows.unchanged(rows).any()
    assert (lent.status.loaded, lent.status.loaded_bytes) == (2, 2 * BLOCK)
    assert lent.status.mapped_bytes == 0


def test_memory_that_cannot_be_registered_is_tried_once(lent: LentMemoryFixture) -> None:
    lent.registrar.fails = True
    with capture_logs() as logs:
        for _ in range(3):
            lent.update(lent.files)
    (line,) = logs
    assert (line["sibling"], "cannot be pinned" in line["reason"]) == ("/run/sibling", True)
    assert lent.windows.numbers == ()
    assert "memfd:chunk" not in Path("/proc/self/maps").read_text()
    lent.update()
    assert not lent.windows._refused


def test_chunks_of_another_size_are_not_mapped(lent: LentMemoryFixture) -> None:
    with capture_logs() as logs:
        lent.update(lent.lent(1, 2 * CHUNK))
    assert "make them equal" in logs[0]["reason"]
    assert lent.windows.numbers == ()


def test_a_descriptor_that_now_has_another_file_is_refused(lent: LentMemoryFixture) -> None:
    """The tier's process may have closed it, and opened something else."""
    os.dup2(lent.chunks[1], lent.chunks[0])
    with capture_logs() as logs:
        lent.update(lent.files)
    assert "has closed it" in logs[0]["reason"]
    assert lent.windows.numbers == ()


def test_memory_that_its_owner_can_shrink_is_refused_and_closed(lent: LentMemoryFixture) -> None:
    descriptor = os.memfd_create("chunk", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, CHUNK)
    os.dup2(descriptor, lent.chunks[0])
    os.close(descriptor)
    before = open_files()
    with capture_logs() as logs:
        lent.update(lent.lent(1))
    assert "can be shrunk" in logs[0]["reason"]
    assert lent.windows.numbers == ()
    assert open_files() == before


async def test_a_registration_ends_with_the_daemon(lent: LentMemoryFixture) -> None:
    lent.registrar.may_end.clear()
    update = asyncio.create_task(lent.windows.update([lent.files], os.getpid()))
    await asyncio.to_thread(lent.registrar.begun.wait, TIMEOUT)
    update.cancel()
    assert not (await asyncio.wait([update], timeout=0.05))[0]
    lent.registrar.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert lent.registrar.pinned == {}


def test_nothing_is_mapped_before_the_own_pool_is_registered(lent: LentMemoryFixture) -> None:
    lent.pool.ready_bytes = 0
    lent.update(lent.files)
    assert lent.windows.numbers == ()
