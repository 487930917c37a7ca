"""Siblings of the daemon's user get descriptors of the pool that can only be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.daemon.core.records import RegionOwner, namespace_owner
from kvferry.daemon.core.region import Region
from kvferry.daemon.core.tier_actions import LendMemory
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.transport import lender as lender_module
from kvferry.daemon.transport.lender import LentPool, check_sibling, lend_memory
from kvferry.proto.errors import Code, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.lending import MAX_LENT_CHUNKS, MemoryLent
from kvferry.shm.memfd import sealed_memfd

CHUNK, UID, KEYS = 4096, os.geteuid(), 7
FINGERPRINT = Fingerprint("llama", CHUNK, key_bytes=8)
OWNER = namespace_owner(FINGERPRINT.name)


class HeldFds:
    """As FdServer."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.held: list[int] = []

    def holds_any(self, session: str) -> bool:
        return bool(self.held)

    def hold_fd(self, session: str, descriptor: int) -> int:
        self._stack.callback(os.close, descriptor)
        self.held.append(descriptor)
        return descriptor


@pytest.fixture
def fds() -> Iterator[HeldFds]:
    with ExitStack() as stack:
        yield HeldFds(stack)


@pytest.fixture
def pool() -> Iterator[LentPool]:
    """A pool of 100 chunks, with a block table."""
    files = [sealed_memfd("chunk", CHUNK) for _ in range(101)]
    files.append(PoolIncarnation().descriptor)

    def table_of(owner: RegionOwner) -> int | None:
        return files[100] if owner == OWNER else None

    yield LentPool(files[:100], CHUNK, files[101], True, b"page", table_of)
    for file in files:
        os.close(file)


def lend(pool: LentPool, fds: Any, start: int, end: int, first: int | None = None) -> MemoryLent:
    region = Region(OWNER, FINGERPRINT, start * CHUNK, (end - start) * CHUNK)
    return lend_memory(pool, fds, LendMemory("s", 1, region, first, KEYS))


def inode_of(descriptor: int | None) -> int:
    return os.fstat(-1 if descriptor is None else descriptor).st_ino


def test_a_region_is_described_without_descriptors(pool: LentPool, fds: HeldFds) -> None:
    region = Region(OWNER, FINGERPRINT, 2 * CHUNK + 1, 3 * CHUNK)
    held: Any = fds
    lent = lend_memory(pool, held, LendMemory("s", 7, region, None, KEYS))
    table = pool.table_of(OWNER)
    assert lent == MemoryLent(
        7,
        inode_of(table),
        CHUNK,
        2 * CHUNK + 1,
        2,
        6,
        keys=KEYS,
        is_kept=True,
        page_identity=b"page",
    )
    assert not fds.held


def test_the_first_chunks_come_with_table_and_page(pool: LentPool, fds: HeldFds) -> None:
    lent = lend(pool, fds, 2, 5, 2)
    assert lent.handles == tuple(fds.held[:3])
    assert [inode_of(each) for each in lent.handles] == [
        inode_of(each) for each in pool.descriptors[2:5]
    ]
    assert (inode_of(lent.table), inode_of(lent.page)) == (lent.region, inode_of(pool.incarnation))
    for held in fds.held:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(held, b"x")
    fds.held.clear()
    later = lend(pool, fds, 2, 5, 3)
    assert (len(later.handles), later.table, later.page) == (2, None, None)


def test_many_chunks_are_lent_in_parts(pool: LentPool, fds: HeldFds) -> None:
    lent = lend(pool, fds, 0, 100, 0)
    assert (lent.first, lent.end, len(lent.handles)) == (0, 100, MAX_LENT_CHUNKS)
    with pytest.raises(Refused, match="fetch them before") as raised:
        lend(pool, fds, 0, 100, MAX_LENT_CHUNKS)
    assert raised.value.code == Code.BUSY
    fds.held.clear()
    assert len(lend(pool, fds, 0, 100, MAX_LENT_CHUNKS).handles) == 100 - MAX_LENT_CHUNKS


def test_a_region_whose_table_is_in_no_file_is_not_lent(pool: LentPool, fds: HeldFds) -> None:
    other = Region(namespace_owner("other"), FINGERPRINT, 0, CHUNK)
    held: Any = fds
    assert lend_memory(pool, held, LendMemory("s", 1, other, 0, KEYS)) == MemoryLent(1)


def test_nothing_is_lent_if_the_daemon_needs_its_descriptors(
    pool: LentPool, fds: HeldFds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender_module, "fds_exhausted", lambda: True)
    with pytest.raises(Refused, match="no file descriptors left"):
        lend(pool, fds, 0, 1, 0)


@pytest.mark.parametrize("first", [5, 1 << 40])
def test_no_chunk_beyond_the_region_is_lent(pool: LentPool, fds: HeldFds, first: int) -> None:
    assert lend(pool, fds, 2, 5, first).handles == ()
    assert not fds.held


def test_only_the_daemons_own_user_has_siblings() -> None:
    check_sibling(UID)
    with pytest.raises(Refused, match=f"not to {UID + 1}; run both daemons as one") as raised:
        check_sibling(UID + 1)
    assert raised.value.code == Code.FORBIDDEN
