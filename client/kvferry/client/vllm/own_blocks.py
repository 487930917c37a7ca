"""The blocks that a rank stores, if all ranks hold the same bytes (kvferry.client.writers).

vLLM's scheduler gives the same store to all workers. Called in the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvferry.client.writers import writer_of
from kvferry.proto.keys import OffloadKey
from kvferry.proto.specs import GPULoadStoreSpec


def own_blocks(
    gpu: GPULoadStoreSpec, keys: Sequence[OffloadKey], factor: int, rank: int, writers: int
) -> tuple[GPULoadStoreSpec, tuple[OffloadKey, ...]]:
    """The part of a store that this rank writes: its GPU blocks, and its keys.

    factor: GPU blocks per key; the first and the last key of a group may have fewer.
    """
    names, first = iter(keys), 0
    own_keys, own_ids = list[OffloadKey](), [gpu.block_ids[:0]]
    sizes, indices = list[int](), list[int]()
    for size, index in zip(gpu.group_sizes or (), gpu.block_indices or (), strict=True):
        end = index + size
        edges = [index, *range((index // factor + 1) * factor, end, factor), end]
        chunks = zip(pairwise(edges) if size else (), names, strict=False)
        own = [(chunk, key) for chunk, key in chunks if writer_of(key, writers) == rank]
        own_keys += [key for _, key in own]
        own_ids += [gpu.block_ids[first + a - index : first + b - index] for (a, b), _ in own]
        sizes.append(sum(b - a for (a, b), _ in own))
        indices.append(own[0][0][0] if own else 0)
        first += size
    spec = GPULoadStoreSpec(np.concatenate(own_ids), tuple(sizes), tuple(indices))
    return spec, tuple(own_keys)
