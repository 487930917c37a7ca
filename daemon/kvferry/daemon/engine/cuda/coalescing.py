"""Coalescing: the smallest number of copies between a staging slot and the host pool.

In the slot the blocks of a chunk are contiguous. Many of them are also contiguous in host memory:
those of one host block, and of adjacent host blocks. Each such run is one copy. Called by the
device worker.
"""

from __future__ import annotations

import numpy as np

from kvferry.daemon.core.layout import CopyBatch, Int64s


def coalesce(offsets: Int64s, block_bytes: int, slot: int, pool: int) -> CopyBatch:
    """The copies of a chunk: one per run of blocks that are contiguous in the pool.

    offsets: (n,) byte offset of each block from the start of the pool, n >= 1. block_bytes: of each
    block. slot, pool: addresses of the first bytes.
    """
    starts = np.flatnonzero(offsets[1:] - offsets[:-1] != block_bytes) + 1
    bounds = np.concatenate(([0], starts, [offsets.size]))
    first = bounds[:-1]
    return CopyBatch.from_rows(
        first * block_bytes + slot,
        offsets[first] + pool,
        (bounds[1:] - first) * block_bytes,
    )
