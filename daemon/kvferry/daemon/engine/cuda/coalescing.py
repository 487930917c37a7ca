"""Copies between a staging slot and the host pool, as few as the places in the pool allow.

In the slot block follows block. Many of them follow each other in host memory, too: those of one
host block, and of host blocks that are neighbours. Each such row is one copy.
"""

from __future__ import annotations

import numpy as np

from kvferry.daemon.core.layout import CopyBatch, Int64s


def coalesce(offsets: Int64s, block_bytes: int, slot: int, pool: int) -> CopyBatch:
    """offsets: (n,) bytes from the pool's first byte, of each block of a chunk, n >= 1.

    slot, pool: addresses. A block that does not follow the one before it in the pool starts a copy.
    """
    starts = np.flatnonzero(offsets[1:] - offsets[:-1] != block_bytes) + 1
    bounds = np.concatenate(([0], starts, [offsets.size]))
    first = bounds[:-1]
    return CopyBatch.from_rows(
        first * block_bytes + slot,
        offsets[first] + pool,
        (bounds[1:] - first) * block_bytes,
    )
