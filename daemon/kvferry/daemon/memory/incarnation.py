"""The incarnation of the host pool: a number in a memfd, which siblings map beside the pool.

Each daemon that starts with a stored pool first changes the number, before anything writes to the
pool. A sibling that loads from the pool compares the number after the copy with that of the daemon
which lent the pool. So everything that an earlier daemon lent is void: also a block table that the
daemon does not get back, whose versions no longer grow. Main thread, at start.
"""

from __future__ import annotations

import mmap
import os

from kvferry.daemon.memory.foreign_memory import SharedWords
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, Refused
from kvferry.shm.memfd import check_sealed, sealed_memfd


class PoolIncarnation:
    """The page with the number, which is one higher from now on.

    kept: the descriptor of a stored pool's page; None for a new pool, which has number 1. The
    caller owns both. Raises Refused (NOT_SHAREABLE, BAD_LAYOUT) if `kept` is no such page.
    """

    def __init__(self, kept: int | None = None) -> None:
        if kept is not None:
            check_sealed(kept, "the incarnation page of the pool")
            if (nbytes := os.fstat(kept).st_size) != PAGE:
                message = f"the incarnation page of the pool has {nbytes} bytes, not {PAGE}"
                raise Refused(Code.BAD_LAYOUT, message, nbytes)
        self.descriptor = sealed_memfd("kvferry-incarnation", PAGE) if kept is None else kept
        self.number = SharedWords(mmap.mmap(self.descriptor, PAGE), 0, 1).count_up(0)
