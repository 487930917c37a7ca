"""The memory of siblings: which blocks are found in it, and how long it stays mapped."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.daemon.core.layout import Int64s
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.siblings.windows import MAX_NOTED_USES, LentMemory, MappedWindows
from kvferry.proto.errors import Code, Failed, Refused
from kvferry.proto.lending import MAX_USES
from kvferry.shm.memfd import sealed_memfd
from support.descriptors import count_memfds
from support.lent_region import BLOCK, FINGERPRINT, LentRegion, key
from support.time_limits import TIMEOUT

CHUNK, BLOCKS, SIBLING = 1 << 16, 36, "/run/sibling"
# The sibling's namespace begins in its second chunk, which is the first one that is lent.
FIRST, START = 1, CHUNK + 3 * BLOCK


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


def content(offset: int, nbytes: int) -> bytes:
    return bytes((at * 7 + at // 256) % 256 for at in range(offset, offset + nbytes))


class WindowsFixture:
    """A sibling's region in two chunks and a half, and this daemon's windows."""

    def __init__(self, stack: ExitStack) -> None:
        self.registrar, self.pool = Registrar(), HostPool(CHUNK, CHUNK)
        stack.callback(self.pool.close, self.registrar)
        self.pool.ready_bytes = self.pool.nbytes
        stack.callback(setattr, self.pool, "ready_bytes", 0)
        self.windows = MappedWindows(self.registrar, self.pool)
        self.chunks = [sealed_memfd("chunk", size) for size in (CHUNK, CHUNK, CHUNK // 2)]
        for number, chunk in enumerate(self.chunks):
            stack.callback(os.close, chunk)
            os.pwrite(chunk, content(CHUNK * (number + 1), os.fstat(chunk).st_size), 0)
        self.region = LentRegion(START, BLOCKS)
        stack.callback(self.region.close)
        self.contents = NamespaceContents(
            FINGERPRINT.name, self.region.file.record.composition, 0, BLOCK, 1
        )

    def lent(
        self,
        region: int = 1,
        *,
        chunk_bytes: int = CHUNK,
        start: int = START,
        first: int = FIRST,
        directory: str = SIBLING,
    ) -> LentMemory:
        files = *self.chunks, self.region.file.descriptor, self.region.page.descriptor
        *chunks, table, page = map(os.dup, files)
        place = region, chunk_bytes, start, first
        return LentMemory(directory, self.contents, *place, chunks, table, page)

    async def map(self) -> None:
        await self.windows.map(self.lent())

    def find(self, *numbers: int, **contents: Any) -> Int64s:
        wanted = self.contents._replace(**contents)
        return self.windows.find(wanted, [key(number) for number in numbers])

    def bytes_at(self, row: int) -> bytes:
        return ctypes.string_at(self.pool.address + int(row), BLOCK)


@pytest.fixture
async def lent() -> AsyncIterator[WindowsFixture]:
    with ExitStack() as stack:
        fixture = WindowsFixture(stack)
        yield fixture
        for directory in (SIBLING, "/run/other"):
            fixture.windows.close(directory, FINGERPRINT.name)
        await fixture.windows.wait_unmapped()


async def test_blocks_are_addressed_from_the_start_of_the_own_pool(lent: WindowsFixture) -> None:
    await lent.map()
    assert lent.windows.mapped_bytes(SIBLING) == 5 * CHUNK // 2
    assert lent.windows.mapped_bytes("/run/other") == 0
    assert sorted(lent.registrar.pinned.values()) == [CHUNK // 2, CHUNK, CHUNK]
    lent.region.store(*range(BLOCKS))
    rows = lent.find(*range(BLOCKS))
    assert rows[2].tolist() == list(range(BLOCKS))
    for block, row in enumerate(rows[1].tolist()):
        assert lent.bytes_at(row) == content(START + block * BLOCK, BLOCK)
    assert lent.windows.unchanged(rows).all()


async def test_chunks_begin_where_those_of_the_own_pool_do(lent: WindowsFixture) -> None:
    """Engines split copies there."""
    await lent.map()
    assert {(at - lent.pool.address) % CHUNK for at in lent.registrar.pinned} == {0}


async def test_what_is_not_there_is_not_found(lent: WindowsFixture) -> None:
    assert lent.find(3).tolist() == [[-1]] * 4
    await lent.map()
    lent.region.store(3)
    assert lent.find(3, 4)[0].tolist() == [1, -1]
    assert lent.windows.find(lent.contents, []).shape == (4, 0)
    assert lent.find(3, composition=5)[0].tolist() == [-1]
    assert lent.find(3, epoch=5)[0].tolist() == [-1]
    other = lent.contents._replace(namespace="other")
    assert lent.windows.find(other, [key(3)])[0].tolist() == [-1]


async def test_no_block_beyond_the_mapped_chunks_is_found(lent: WindowsFixture) -> None:
    """A sibling may lend fewer chunks than its table needs."""
    memory = lent.lent()
    os.close(memory.chunks[-1])
    del memory.chunks[-1]  # type: ignore[attr-defined]
    await lent.windows.map(memory)
    lent.region.store(BLOCKS - 1, 0)
    end = (3 * CHUNK - START) // BLOCK
    lent.region.store(end - 1, end)
    assert lent.find(0, end - 1, end, BLOCKS - 1)[0].tolist() == [1, 1, -1, -1]


async def test_no_block_spans_chunks_if_no_own_one_does(lent: WindowsFixture) -> None:
    """Engines do not split its copies then."""
    memory = lent.lent(start=START + 100)
    await lent.windows.map(memory)
    spanning = (2 * CHUNK - START) // BLOCK - 1
    lent.region.store(0, spanning)
    assert lent.find(0, spanning, start=BLOCK)[0].tolist() == [1, -1]
    assert lent.find(0, spanning, start=1)[0].tolist() == [1, 1]


async def test_a_key_that_several_have_is_found_at_one(lent: WindowsFixture) -> None:
    await lent.map()
    await lent.windows.map(lent.lent(directory="/run/other"))
    lent.region.store(3)
    rows = lent.find(3)
    assert rows[0].tolist() == [1]
    lent.windows.close(SIBLING, FINGERPRINT.name)
    assert lent.find(3)[0].tolist() == [2]


async def test_another_region_replaces_the_one_before(lent: WindowsFixture) -> None:
    await lent.map()
    has = [lent.windows.has(SIBLING, lent.contents, region) for region in (1, 2)]
    assert has == [True, False]
    await lent.windows.map(lent.lent(2))
    await lent.windows.wait_unmapped()
    has = [lent.windows.has(SIBLING, lent.contents, region) for region in (1, 2)]
    assert has == [False, True]
    assert len(lent.registrar.pinned) == 3
    assert not lent.windows.has(SIBLING, lent.contents._replace(composition=5), 2)


async def test_memory_is_unmapped_after_the_last_load(lent: WindowsFixture) -> None:
    before = open_files()
    await lent.map()
    lent.region.store(3, 4)
    rows = lent.find(3, 4)
    lent.windows.hold(rows)
    lent.windows.close(SIBLING, FINGERPRINT.name)
    await lent.windows.wait_unmapped()
    assert lent.find(3)[0].tolist() == [-1]
    assert lent.bytes_at(rows[1, 0]) == content(START + 3 * BLOCK, BLOCK)
    assert lent.windows.unchanged(rows).all()
    lent.windows.hold(rows)  # by a load whose keys were found before
    lent.windows.release(rows, 0)
    assert lent.windows.mapped_bytes(SIBLING) > 0
    lent.windows.release(rows, BLOCK)
    await lent.windows.wait_unmapped()
    assert lent.registrar.pinned == {}
    assert not lent.windows.unchanged(rows).any()
    numbers = lent.windows.loaded[SIBLING], lent.windows.loaded_bytes[SIBLING]
    assert (numbers, lent.windows.mapped_bytes(SIBLING)) == ((2, 2 * BLOCK), 0)
    assert open_files() == before


def open_files() -> tuple[int, ...]:
    gc.collect()
    return tuple(map(count_memfds, ("chunk", "kvferry-block-table", "kvferry-incarnation")))


async def refusal_of(lent: WindowsFixture, memory: LentMemory) -> str:
    before = open_files()
    with pytest.raises((Refused, Failed)) as raised:
        await lent.windows.map(memory)
    assert lent.registrar.pinned == {}
    assert lent.windows.mapped_bytes(SIBLING) == 0
    raised.value.__traceback__ = None  # it refers to what was mapped
    assert "memfd:chunk" not in Path("/proc/self/maps").read_text()
    assert all(now < then for now, then in zip(open_files(), before, strict=True))
    return str(raised.value)


async def test_memory_that_cannot_be_used_is_refused_and_closed(lent: WindowsFixture) -> None:
    assert "make them equal" in await refusal_of(lent, lent.lent(chunk_bytes=2 * CHUNK))
    assert "outside of its chunks" in await refusal_of(lent, lent.lent(start=CHUNK - 1))
    assert "outside of its chunks" in await refusal_of(lent, lent.lent(first=1 << 47))
    lent.registrar.fails = True
    assert "cannot be pinned" in await refusal_of(lent, lent.lent())
    lent.registrar.fails = False
    os.ftruncate(descriptor := os.memfd_create("chunk", os.MFD_ALLOW_SEALING), CHUNK)
    os.dup2(descriptor, lent.chunks[0])
    os.close(descriptor)
    assert "can be shrunk" in await refusal_of(lent, lent.lent())


@pytest.mark.parametrize("stops", [False, True])
async def test_a_registration_that_is_cancelled_leaves_nothing(
    lent: WindowsFixture, stops: bool
) -> None:
    """stops: because the daemon ends; else because the sibling is gone."""
    before = open_files()
    lent.registrar.may_end.clear()
    mapping = asyncio.create_task(lent.map())
    await asyncio.to_thread(lent.registrar.begun.wait, TIMEOUT)
    if stops:
        lent.windows.stop_mapping()
    mapping.cancel()
    assert not (await asyncio.wait([mapping], timeout=0.05))[0]
    lent.registrar.may_end.set()
    with pytest.raises((asyncio.CancelledError, InterruptedError)):
        await mapping
    assert lent.registrar.pinned == {}
    del mapping
    assert open_files() == before


async def test_uses_are_merged_and_bounded(lent: WindowsFixture) -> None:
    await lent.map()
    lent.region.store(*range(BLOCKS))
    noted = list[int]()
    lent.windows.uses_noted = lambda: noted.append(1)
    for numbers in ((1, 2), (3, 1)):
        names = [key(number) for number in numbers]
        lent.windows.note_uses(lent.contents, lent.find(*numbers), names)
    (uses,) = lent.windows.take_uses(SIBLING)
    assert (uses.namespace, uses.keys) == (FINGERPRINT.name, (key(3), key(1), key(2)))
    assert not list(lent.windows.take_uses(SIBLING))
    row = lent.find(1)
    for number in range(MAX_NOTED_USES + 10):
        lent.windows.note_uses(lent.contents, row, [key(number)])
    parts = [uses.keys for uses in lent.windows.take_uses(SIBLING)]
    assert [len(part) for part in parts] == [MAX_USES] * 4
    assert parts[-1][0] == key(MAX_NOTED_USES + 9)  # the most recent
    assert parts[0][-1] == key(10)
    assert len(noted) == 2 + MAX_NOTED_USES + 10
