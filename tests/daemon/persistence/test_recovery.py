"""The pool of an earlier daemon: used, or removed from the descriptor store."""

from __future__ import annotations

import os

from kvferry.daemon.engine.reference import ReferenceEngine
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
        raise AssertionError(f"{name} is stored already")

    def remove_fd(self, name: str) -> None:
        self.removed.append(name)

    def send_queued(self) -> bool:
        return True


def refuse_new_pool(_: int) -> None:
    raise AssertionError("the stored pool fits")


def test_unknown_names_are_removed_and_the_pool_is_used() -> None:
    chunk, unknown = sealed_memfd("chunk", CHUNK_BYTES), sealed_memfd("unknown", CHUNK_BYTES)
    manager = FakeStartupFdStore({"pool-00000": chunk, "unknown-1": unknown})
    pool, recovered = recover_pool(
        manager, CHUNK_BYTES, CHUNK_BYTES, keep=True, check_new_pool=refuse_new_pool
    )
    assert manager.removed == []
    recovered.store_new_pool()
    assert manager.removed == ["unknown-1"]
    assert not os.path.lexists(f"/proc/self/fd/{unknown}")
    assert chunks_of(recovered.fds) == [chunk] == list(pool.descriptors)
    pool.close(ReferenceEngine())


def test_a_stored_pool_that_is_still_written_is_replaced() -> None:
    """A tier of the earlier daemon may have reads into it in flight."""
    chunk = sealed_memfd("chunk", CHUNK_BYTES)
    manager = FakeStartupFdStore({"pool-00000": chunk})
    pool, recovered = recover_pool(
        manager,
        CHUNK_BYTES,
        CHUNK_BYTES,
        keep=True,
        check_new_pool=lambda _: None,
        unusable="still written",
    )
    assert (recovered.fds, recovered.stale_fds) == ({}, {"pool-00000": chunk})
    assert recovered.reason == "still written"
    assert list(recovered.new_chunks.values()) == list(pool.descriptors)
    assert chunk not in pool.descriptors
    pool.close(ReferenceEngine())
    os.close(chunk)
