"""The pool of an earlier daemon: used, or removed from the descriptor store."""

from __future__ import annotations

import os

import pytest

from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.persistence.recovery import chunks_of, recover_pool
from kvferry.shm.memfd import sealed_memfd

CHUNK_BYTES = 1 << 20


class FakeStartupFdStore:
    """A descriptor store that records the removed names."""

    has_fd_store = True

    def __init__(self, stored: dict[str, int]) -> None:
        self.stored_fds = stored
        self.removed: list[str] = []

    def store_fd(self, name: str, descriptor: int) -> None:
        assert self.stored_fds.get(name) != descriptor, f"{name} is stored already"

    def remove_fd(self, name: str) -> None:
        self.removed.append(name)

    def send_queued(self) -> bool:
        return True


def refuse_new_pool(_: int) -> None:
    raise AssertionError("the stored pool fits")


def stored_pool(page: int | None, **others: int) -> tuple[int, FakeStartupFdStore]:
    """A stored pool of one allocated chunk. page: its incarnation page."""
    chunk = sealed_memfd("chunk", CHUNK_BYTES)
    os.posix_fallocate(chunk, 0, CHUNK_BYTES)
    pages = {} if page is None else {"incarnation": page}
    return chunk, FakeStartupFdStore({"pool-00000": chunk, **pages, **others})


def number_in(page: int) -> int:
    """The incarnation that siblings read."""
    return int.from_bytes(os.pread(page, 8, 0), "little")


def test_unknown_names_are_removed_and_the_pool_is_used() -> None:
    page, unknown = PoolIncarnation().descriptor, sealed_memfd("unknown", CHUNK_BYTES)
    chunk, manager = stored_pool(page, unknown=unknown)
    pool, recovered = recover_pool(
        manager, CHUNK_BYTES, CHUNK_BYTES, keep=True, check_new_pool=refuse_new_pool
    )
    assert manager.removed == []
    # What an earlier daemon has lent of it is void, also if its block table is not stored.
    assert recovered.incarnation.descriptor == page
    assert number_in(page) == recovered.incarnation.number == 2
    recovered.store_new_pool()
    assert manager.removed == ["unknown"]
    assert not os.path.lexists(f"/proc/self/fd/{unknown}")
    assert chunks_of(recovered.fds) == [chunk] == list(pool.descriptors)
    pool.close(ReferenceEngine())
    os.close(page)


@pytest.mark.parametrize("keep", [True, False])
def test_a_dropped_pool_is_freed_after_its_incarnation_has_changed(keep: bool) -> None:
    page = PoolIncarnation().descriptor
    siblings_page = os.dup(page)
    chunk, manager = stored_pool(page)
    siblings_chunk = os.dup(chunk)
    pool, recovered = recover_pool(
        manager, 2 * CHUNK_BYTES, CHUNK_BYTES, keep=keep, check_new_pool=lambda _: None
    )
    assert number_in(siblings_page) == 2
    assert os.fstat(siblings_chunk).st_blocks
    recovered.store_new_pool()
    assert not os.fstat(siblings_chunk).st_blocks
    assert manager.removed == ["pool-00000", "incarnation"]
    assert recovered.incarnation.descriptor not in (page, siblings_page)
    assert number_in(recovered.incarnation.descriptor) == 1
    pool.close(ReferenceEngine())
    for descriptor in (siblings_page, siblings_chunk, recovered.incarnation.descriptor):
        os.close(descriptor)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_pool_without_its_incarnation_is_neither_used_nor_changed(damaged: bool) -> None:
    """Siblings that have mapped it cannot know that its bytes change."""
    chunk, manager = stored_pool(sealed_memfd("page", CHUNK_BYTES) if damaged else None)
    siblings_chunk = os.dup(chunk)
    pool, recovered = recover_pool(
        manager, CHUNK_BYTES, CHUNK_BYTES, keep=True, check_new_pool=lambda _: None
    )
    assert "incarnation" in recovered.stale.reason
    recovered.store_new_pool()
    assert os.fstat(siblings_chunk).st_blocks
    assert "pool-00000" in manager.removed
    pool.close(ReferenceEngine())
    os.close(siblings_chunk)


def test_a_stored_pool_that_is_still_written_is_replaced() -> None:
    """A tier of the earlier daemon may have reads into it in flight."""
    page = PoolIncarnation().descriptor
    chunk, manager = stored_pool(page)
    pool, recovered = recover_pool(
        manager,
        CHUNK_BYTES,
        CHUNK_BYTES,
        keep=True,
        check_new_pool=lambda _: None,
        unusable="still written",
    )
    assert recovered.fds == {}
    assert recovered.stale.fds == {"pool-00000": chunk, "incarnation": page}
    assert recovered.stale.reason == "still written"
    assert recovered.new_pool["pool-00000"] == pool.descriptors[0] != chunk
    assert recovered.new_pool["incarnation"] == recovered.incarnation.descriptor != page
    pool.close(ReferenceEngine())
    for descriptor in (chunk, page):
        os.close(descriptor)
