"""Lends the memory of the pool to siblings, which copy blocks from it.

Called by the server, on the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.daemon.core.records import RegionOwner
from kvferry.daemon.core.tier_actions import LendPool
from kvferry.daemon.memory.incarnation import PoolIncarnation
from kvferry.daemon.transport.accept_gate import NONE_LEFT, fds_exhausted
from kvferry.daemon.transport.fd_server import FdServer
from kvferry.proto.errors import Code, Refused
from kvferry.proto.lending import MAX_LENT_CHUNKS, PoolLent


@dataclass(frozen=True, slots=True)
class LentPool:
    """The host pool: descriptors of its chunks, all but the last of `chunk_bytes`.

    table_of: returns the descriptor of a region's block table; None if it is in no file.
    """

    descriptors: Sequence[int]
    chunk_bytes: int
    incarnation: PoolIncarnation
    table_of: Callable[[RegionOwner], int | None] = lambda _: None


def lend_pool(pool: LentPool, fd_server: FdServer, action: LendPool) -> PoolLent:
    """Pass chunks of the pool to a sibling. Raises Refused.

    The descriptors can only be read; a sibling cannot write into the pool by mistake.
    """
    if fd_server.holds_any(action.session):
        text = "descriptors of this session are waiting; fetch them before you request more"
        raise Refused(Code.BUSY, text, action.session)
    if fds_exhausted():
        raise Refused(Code.BUSY, NONE_LEFT, action.session)
    chunk_bytes = pool.chunk_bytes
    first = max(action.start // chunk_bytes, action.first)
    end = -(-action.end // chunk_bytes)
    handles = tuple(
        fd_server.hold_fd(action.session, _readable(descriptor))
        for descriptor in pool.descriptors[first:end][:MAX_LENT_CHUNKS]
    )
    number, start = action.request_id, action.start
    lent = PoolLent(number, chunk_bytes, min(first, end), end, handles, start)
    table = None if action.first else pool.table_of(action.owner)
    if table is None:
        return lent
    return msgspec.structs.replace(
        lent,
        table=fd_server.hold_fd(action.session, _readable(table)),
        page=fd_server.hold_fd(action.session, _readable(pool.incarnation.descriptor)),
        incarnation=pool.incarnation.number,
    )


def check_sibling(uid: int) -> None:
    """Raise Refused (FORBIDDEN) if user `uid` is not the daemon's.

    The pool may have blocks of any engine, and a sibling chooses the generation of a namespace.
    """
    if uid != os.geteuid():
        text = f"this daemon lends its pool to siblings of user {os.geteuid()}, not to {uid}"
        raise Refused(Code.FORBIDDEN, f"{text}; run both daemons as one user", uid)


def _readable(descriptor: int) -> int:
    """A new descriptor of a file, which can only be read."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
