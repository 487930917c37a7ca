"""The expected bytes of a block, computed by a formula.

An engine's kernels fill a block with noise. The noise depends only on the block's id, the number of
the tensor, the offset in the block, and a seed. Kernels and checks use the same formula, so a check
needs no copy of the written bytes. numpy and torch have all its operators, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
# The parts of one block of a group: (tensor number, bytes) for each of its tensors.
Parts: TypeAlias = tuple[tuple[int, int], ...]

_MASK = 0xFFFFFFFF


def noise(offset: Any, block: Any, tensor: int, seed: int) -> Any:
    """Values 0 to 255 for int64 arrays or tensors that broadcast. No step exceeds 63 bits."""
    x = offset * 0x01000193 + block * 0x2545F491 + (tensor * 0x3C6EF372 + seed * 0x1B873593)
    x = x & _MASK
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _MASK
    x = ((x ^ (x >> 12)) * 0x297A2D39) & _MASK
    return (x ^ (x >> 15)) & 0xFF


def expected(parts: Parts, block_ids: Sequence[int], seed: int) -> Bytes:
    """The bytes of blocks that were written with `seed`: (blocks, bytes of a block), uint8."""
    ids = np.asarray(block_ids, dtype=np.int64)[:, None]
    pages = [noise(np.arange(size)[None, :], ids, tensor, seed) for tensor, size in parts]
    return np.concatenate(pages, axis=1).astype(np.uint8)
