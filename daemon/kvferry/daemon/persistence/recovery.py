"""The host pool at start: the pool of an earlier daemon, or a new one.

The descriptor store of the service manager passes the pool, the block tables and the kept tensors
of an earlier daemon to the next one. The pool is used again if its size and chunks are the
configured ones, and if its incarnation page is there: siblings may have mapped a block table that
the store does not have, and only the page shows them that it is void. Unusable descriptors stay
stored until the daemon is certain to start, and are then removed from the store with a log line.
Called by app.py at start, on the main thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.memory.pool import HostPool, free_chunks, used_bytes
from kvferry.daemon.persistence.kept_tensor_store import TENSORS
from kvferry.daemon.persistence.region_store import TABLE, FdStore, NullFdStore
from kvferry.proto.errors import Code, KVFerryError, Refused

# Prefix of the names of the pool's descriptors in the descriptor store.
CHUNK = "pool-"
# Name of the descriptor of its incarnation page.
INCARNATION = "incarnation"
# Prefixes of all names that this version stores.
PREFIXES = CHUNK, INCARNATION, TABLE, TENSORS

log = structlog.get_logger()


class StartupFdStore(FdStore, Protocol):
    """A descriptor store, and the descriptors that it returned at start."""

    @property
    def has_fd_store(self) -> bool:
        """Whether stored descriptors outlive this process."""

    @property
    def stored_fds(self) -> Mapping[str, int]:
        """The descriptors that an earlier daemon stored, by name."""

    def send_queued(self) -> bool:
        """Send all queued messages."""


@dataclass(frozen=True, slots=True)
class StaleFds:
    """Stored descriptors that cannot be used, by name.

    reason: why the pool among them cannot be used; empty if there is none. is_void: whether
    siblings see that the bytes of that pool may change.
    """

    fds: Mapping[str, int]
    reason: str = ""
    is_void: bool = False


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """The stored descriptors of an earlier daemon, and where the next daemon finds new ones.

    fds: descriptors to be restored (pool, block tables, tensors), by name. stale: the others, which
    are still stored. new_pool: the descriptors of a new pool, not stored yet. incarnation: of the
    pool that is used.
    """

    manager: StartupFdStore
    fd_store: FdStore
    fds: Mapping[str, int]
    stale: StaleFds
    new_pool: Mapping[str, int]
    incarnation: PoolIncarnation

    @property
    def is_kept(self) -> bool:
        """Whether the next daemon gets the pool."""
        return not isinstance(self.fd_store, NullFdStore)

    def store_new_pool(self) -> None:
        """Remove and close the stale descriptors, free the stale pool, and store the new one.

        Called when the start can no longer fail, and before the new pool takes memory: it may need
        the memory of the old one.
        """
        stale = self.stale
        if stale.reason:
            log.warning("kept pool dropped; the new pool is empty", reason=stale.reason)
        unknown = [name for name in stale.fds if not name.startswith(PREFIXES)]
        if unknown:
            log.warning("stored descriptors dropped: unknown names", names=sorted(unknown))
        # Otherwise the memory stays in use until systemd closes its descriptors, and siblings that
        # have mapped it have noticed that the earlier daemon has ended.
        if stale.is_void:
            free_chunks(chunks_of(stale.fds))
        for name, descriptor in stale.fds.items():
            self.manager.remove_fd(name)
            os.close(descriptor)
        for name, descriptor in self.new_pool.items():
            self.fd_store.store_fd(name, descriptor)
        self.manager.send_queued()


def chunks_of(fds: Mapping[str, int]) -> list[int]:
    """The descriptors of a pool, in order."""
    return [fds[name] for name in sorted(fds) if name.startswith(CHUNK)]


def recover_pool(
    manager: StartupFdStore,
    pool_bytes: int,
    chunk_bytes: int,
    *,
    keep: bool,
    check_new_pool: Callable[[int], None],
    unusable: str = "",
) -> tuple[HostPool, RecoveredState]:
    """The pool of an earlier daemon with its block tables, or a new pool. Raises Refused.

    keep: use a stored pool, and store a new one. check_new_pool: raises Refused if a new pool does
    not fit; its argument is the memory in bytes that the stored pool will free.
    unusable: why a stored pool must not be used, if that is so.
    Stored descriptors stay stored until `RecoveredState.store_new_pool`, also if the start fails.
    """
    fd_store = manager if keep and manager.has_fd_store else NullFdStore()
    stored = manager.stored_fds
    chunks, reason, incarnation = chunks_of(stored), unusable, None
    if chunks:
        try:
            # From here on everything that the earlier daemon lent is void.
            incarnation = _next_incarnation(stored.get(INCARNATION))
        except KVFerryError as error:
            reason = reason or str(error)
    if incarnation is not None and keep and not reason:
        try:
            pool = HostPool(pool_bytes, chunk_bytes, chunks)
        except KVFerryError as error:
            if error.code == Code.POOL_TOO_LARGE:  # it has the configured size: keep it for later
                raise
            reason = str(error)
        else:
            known = {name: fd for name, fd in stored.items() if name.startswith(PREFIXES)}
            unknown = StaleFds({name: fd for name, fd in stored.items() if name not in known})
            return pool, RecoveredState(manager, fd_store, known, unknown, {}, incarnation)
    check_new_pool(sum(map(used_bytes, chunks)))
    pool, new = HostPool(pool_bytes, chunk_bytes), PoolIncarnation()
    names = {f"{CHUNK}{number:05}": made for number, made in enumerate(pool.descriptors)}
    names[INCARNATION] = new.descriptor
    stale = StaleFds(stored, reason, is_void=incarnation is not None)
    return pool, RecoveredState(manager, fd_store, {}, stale, names, new)


def _next_incarnation(page: int | None) -> PoolIncarnation:
    """The incarnation of a stored pool from now on. Raises Refused."""
    if page is None:
        message = f"the descriptor store has its chunks, but not descriptor {INCARNATION!r}"
        raise Refused(Code.BAD_LAYOUT, message, INCARNATION)
    return PoolIncarnation(page)
