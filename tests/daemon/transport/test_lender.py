"""Siblings of the daemon's user get descriptors of the pool that can only be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.daemon.core.records import namespace_owner
from kvferry.daemon.core.tier_actions import LendPool
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.transport import lender as lender_module
from kvferry.daemon.transport.lender import LentPool, check_sibling, lend_pool
from kvferry.proto.errors import Code, Refused
from kvferry.proto.lending import MAX_LENT_CHUNKS, PoolLent
from kvferry.shm.memfd import sealed_memfd

CHUNK, UID = 4096, os.geteuid()
OWNER = namespace_owner("namespace")
INCARNATION = PoolIncarnation()


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
    """A pool of 100 chunks."""
    chunks = [sealed_memfd("chunk", CHUNK) for _ in range(100)]
    yield LentPool(chunks, CHUNK, INCARNATION)
    for chunk in chunks:
        os.close(chunk)


def lend(pool: LentPool, fds: Any, start: int, end: int, first: int = 0) -> PoolLent:
    return lend_pool(pool, fds, LendPool("s", 1, start * CHUNK, end * CHUNK, first, OWNER))


def test_the_chunks_of_the_region_are_lent_to_be_read(pool: LentPool, fds: HeldFds) -> None:
    action = LendPool("s", 7, 2 * CHUNK + 1, 5 * CHUNK + 1, 0, OWNER)
    held: Any = fds
    lent = lend_pool(pool, held, action)
    assert lent == PoolLent(7, CHUNK, 2, 6, tuple(fds.held), action.start)
    assert len(fds.held) == 4
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fds.held[0], b"x")


def test_many_chunks_are_lent_in_parts(pool: LentPool, fds: HeldFds) -> None:
    lent = lend(pool, fds, 0, 100)
    assert (lent.first, lent.end, len(lent.handles)) == (0, 100, MAX_LENT_CHUNKS)
    with pytest.raises(Refused, match="fetch them before") as raised:
        lend(pool, fds, 0, 100, MAX_LENT_CHUNKS)
    assert raised.value.code == Code.BUSY
    fds.held.clear()
    lent = lend(pool, fds, 0, 100, MAX_LENT_CHUNKS)
    assert (lent.first, len(lent.handles)) == (MAX_LENT_CHUNKS, 100 - MAX_LENT_CHUNKS)


def test_the_block_table_and_the_incarnation_are_lent_with_the_first_chunks(fds: HeldFds) -> None:
    chunks = [sealed_memfd("chunk", CHUNK) for _ in range(2)]
    pool = LentPool(chunks, CHUNK, INCARNATION, lambda owner: chunks[1] * (owner == OWNER))
    lent = lend(pool, fds, 0, 2)
    assert lent.table == fds.held[2]
    assert os.fstat(fds.held[2]).st_ino == os.fstat(chunks[1]).st_ino
    assert (lent.page, lent.incarnation) == (fds.held[3], 1)
    assert os.fstat(fds.held[3]).st_ino == os.fstat(INCARNATION.descriptor).st_ino
    for held in fds.held[2:]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(held, b"x")
    fds.held.clear()
    later = lend(pool, fds, 0, 2, 1)
    assert (later.table, later.page) == (None, None)
    for chunk in chunks:
        os.close(chunk)


def test_nothing_is_lent_if_the_daemon_needs_its_descriptors(
    pool: LentPool, fds: HeldFds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender_module, "fds_exhausted", lambda: True)
    with pytest.raises(Refused, match="no file descriptors left"):
        lend(pool, fds, 0, 1)


@pytest.mark.parametrize("first", [5, 1 << 40])
def test_no_chunk_beyond_the_region_is_lent(pool: LentPool, fds: HeldFds, first: int) -> None:
    assert lend(pool, fds, 2, 5, first) == PoolLent(1, CHUNK, 5, 5, (), 2 * CHUNK)
    assert not fds.held


def test_only_the_daemons_own_user_has_siblings() -> None:
    check_sibling(UID)
    with pytest.raises(Refused, match=f"not to {UID + 1}; run both daemons as one") as raised:
        check_sibling(UID + 1)
    assert raised.value.code == Code.FORBIDDEN
