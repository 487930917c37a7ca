"""A daemon's own books: what it owns adds up, and whoever went left nothing behind."""

from __future__ import annotations

from pathlib import Path

from kvferry.client import OffloadClient
from kvferry.testing.engine import until


def broken_invariants(observer: OffloadClient) -> list[str]:
    """What does not add up now, while anything may be under way."""
    faults: list[str] = []
    pool = observer.status().pool
    if pool.reserved_bytes > pool.size_bytes:
        faults.append(f"of {pool.size_bytes} bytes {pool.reserved_bytes} are given out")
    for space in observer.namespaces():
        kinds = space.free, space.pending, space.ready, space.unverified, space.orphaned
        if sum(kinds) != space.blocks:
            faults.append(f"a block in two places, or in none: {space}")
        if space.pinned > space.ready:
            faults.append(f"more pinned than there are: {space}")
    return faults


def left_behind(observer: OffloadClient) -> list[str]:
    """What is still held for engines of which none is there any more."""
    status = observer.status()
    left = [f"{status.sessions} sessions"] if status.sessions > 1 else []
    left += [f"{engine}" for engine in status.engines if engine.present or engine.jobs]
    left += [f"{s}" for s in observer.namespaces() if s.pending or s.pinned or s.orphaned]
    return left


def check_all_gone(directory: Path, timeout: float = 10.0) -> None:
    """Raise AssertionError unless the books are in order, and soon nothing is held for anybody."""
    with OffloadClient(directory, engine="observer") as observer:
        try:
            until(lambda: not left_behind(observer), timeout)
        except TimeoutError:
            raise AssertionError(f"left behind: {left_behind(observer)}") from None
        assert not broken_invariants(observer), broken_invariants(observer)
