"""Invariants of a daemon: its counters are consistent, and ended sessions hold nothing."""

from __future__ import annotations

from pathlib import Path

from kvferry.client import OffloadClient
from kvferry.testing.engine import until
from support.time_limits import TIMEOUT


def broken_invariants(observer: OffloadClient) -> list[str]:
    """Describe violated invariants. Jobs may be in flight."""
    faults: list[str] = []
    pool = observer.status().pool
    if pool.reserved_bytes > pool.size_bytes:
        faults.append(f"{pool.reserved_bytes} bytes reserved in a pool of {pool.size_bytes}")
    for space in observer.namespaces():
        kinds = space.free, space.pending, space.ready, space.unverified, space.orphaned
        if sum(kinds) != space.blocks:
            faults.append(f"blocks are counted twice or not at all: {space}")
        if space.pinned > space.ready:
            faults.append(f"more keys pinned than ready: {space}")
    return faults


def held_after_disconnect(observer: OffloadClient) -> list[str]:
    """Describe what the daemon holds for engines that have disconnected."""
    status = observer.status()
    left = [f"{status.sessions} sessions"] if status.sessions > 1 else []
    left += [f"{engine}" for engine in status.engines if engine.present or engine.jobs]
    left += [f"{s}" for s in observer.namespaces() if s.pending or s.pinned or s.orphaned]
    return left


def check_released(directory: Path, timeout: float = TIMEOUT) -> None:
    """Raise AssertionError if an invariant is violated, or something is held after `timeout`."""
    with OffloadClient(directory, engine="observer") as observer:
        try:
            until(lambda: not held_after_disconnect(observer), timeout)
        except TimeoutError:
            raise AssertionError(f"still held: {held_after_disconnect(observer)}") from None
        assert not broken_invariants(observer), broken_invariants(observer)
