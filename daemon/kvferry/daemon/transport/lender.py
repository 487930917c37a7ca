"""Lends the memory of the pool to siblings, which load blocks from it.

Called by the server, on the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.daemon.core.records import RegionOwner
from kvferry.daemon.core.tier_actions import LendMemory
from kvferry.daemon.transport.accept_gate import NONE_LEFT, fds_exhausted
from kvferry.daemon.transport.fd_server import FdServer
from kvferry.proto.errors import Code, Refused
from kvferry.proto.lending import MAX_LENT_CHUNKS, MemoryLent


@dataclass(frozen=True, slots=True)
class LentPool:
    """The host pool: descriptors of its chunks, all but the last of `chunk_bytes`.

    incarnation: descriptor of its incarnation page. is_kept: whether the next daemon gets it.
    page_identity: of the page of epochs. table_of: returns the descriptor of a region's block
    table; None if it is in no file.
    """

    descriptors: Sequence[int]
    chunk_bytes: int
    incarnation: int
    is_kept: bool = False
    page_identity: bytes = b""
    table_of: Callable[[RegionOwner], int | None] = lambda _: None


def lend_memory(pool: LentPool, fd_server: FdServer, action: LendMemory) -> MemoryLent:
    """Describe a region to a sibling, and pass chunks of the pool. Raises Refused.

    The descriptors can only be read; a sibling cannot write into the pool by mistake.
    """
    table = pool.table_of(action.region.owner)
    if table is None:
        return MemoryLent(action.request_id)
    first, end = action.region.start // pool.chunk_bytes, -(-action.region.end // pool.chunk_bytes)
    lent = MemoryLent(
        action.request_id,
        os.fstat(table).st_ino,
        pool.chunk_bytes,
        action.region.start,
        first,
        end,
        keys=action.keys,
        is_kept=pool.is_kept,
        page_identity=pool.page_identity,
    )
    if action.first is None:
        return lent
    if fd_server.holds_any(action.session):
        text = "descriptors of this session are waiting; fetch them before you request more"
        raise Refused(Code.BUSY, text, action.session)
    if fds_exhausted():
        raise Refused(Code.BUSY, NONE_LEFT, action.session)

    def hold(descriptor: int) -> int:
        return fd_server.hold_fd(action.session, _readable(descriptor))

    chunks = pool.descriptors[max(first, action.first) : end][:MAX_LENT_CHUNKS]
    lent = msgspec.structs.replace(lent, handles=tuple(map(hold, chunks)))
    if action.first > first:
        return lent
    return msgspec.structs.replace(lent, table=hold(table), page=hold(pool.incarnation))


def check_sibling(uid: int) -> None:
    """Raise Refused (FORBIDDEN) if user `uid` is not the daemon's.

    The pool may have blocks of any engine.
    """
    if uid != os.geteuid():
        text = f"this daemon lends its pool to siblings of user {os.geteuid()}, not to {uid}"
        raise Refused(Code.FORBIDDEN, f"{text}; run both daemons as one user", uid)


def _readable(descriptor: int) -> int:
    """A new descriptor of a file, which can only be read."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
