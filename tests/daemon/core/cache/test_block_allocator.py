"""States of blocks in the allocator: free, with a key, held by jobs, orphaned."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.daemon.core.cache.block_allocator import BlockAllocator


def array(*blocks: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(blocks, np.int64)


def test_blocks_are_allocated_in_ascending_order() -> None:
    allocator = BlockAllocator(6)
    assert allocator.allocate_blocks(4).tolist() == [0, 1, 2, 3]
    allocator.drop_keys(array(3, 1))
    assert (allocator.free, allocator.idle) == (4, 2)
    assert allocator.allocate_blocks(2).tolist() == [1, 3]


def test_a_block_is_held_until_its_last_job_ends() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate_blocks(2)
    allocator.hold_blocks(array(0, 0))
    allocator.hold_blocks(array(0))
    assert (allocator.held, allocator.idle_among(blocks).tolist()) == (1, [1])
    allocator.release_blocks(array(0, 0))
    assert allocator.held == 1
    allocator.release_blocks(array(0))
    assert (allocator.held, allocator.idle) == (0, 2)


def test_a_held_block_that_loses_its_key_is_orphaned() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate_blocks(2)
    allocator.hold_blocks(array(0))
    allocator.drop_keys(blocks)
    assert (allocator.free, allocator.orphaned, allocator.is_orphaned(0)) == (2, 1, True)
    allocator.release_blocks(array(0))
    assert (allocator.free, allocator.orphaned, allocator.held) == (3, 0, 0)
    allocator.check_integrity([])


def test_blocks_of_jobs_from_before_two_resets_stay_orphaned() -> None:
    allocator = BlockAllocator(3)
    for block in (0, 1):
        assert allocator.allocate_blocks(1).tolist() == [block]
        allocator.hold_blocks(array(block))
        allocator.drop_all_keys()
    assert (allocator.free, allocator.orphaned) == (1, 2)
    allocator.release_blocks(array(0))
    assert allocator.allocate_blocks(2).tolist() == [0, 2]
    allocator.check_integrity([0, 2])
