"""References to the blocks of stores, in vLLM's own block pool."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

BLOCKS = 8


@pytest.fixture
def pool(core: Any) -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)


def hold(held: Any, job_id: int, blocks: list[Any]) -> None:
    ids = np.array([block.block_id for block in blocks])
    held.hold({job_id: SimpleNamespace(src_spec=SimpleNamespace(block_ids=ids))})


def held_blocks(pool: Any, ranks: int = 1, **options: float) -> Any:
    from kvferry.client.vllm.held_blocks import HeldBlocks

    return HeldBlocks(pool, ranks, **options)


def test_blocks_are_allocated_again_when_all_ranks_have_reported_the_store(pool: Any) -> None:
    held = held_blocks(pool, ranks=2)
    blocks = pool.get_new_blocks(2)
    hold(held, 7, blocks)
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == BLOCKS - 3  # without the null block
    held.report({7: 1, 8: 2})
    assert pool.get_num_free_blocks() == BLOCKS - 3
    assert held
    held.report({7: 1})
    assert pool.get_num_free_blocks() == BLOCKS - 1
    hold(held, 9, blocks)
    held.report({9: 2})
    assert pool.get_num_free_blocks() == BLOCKS - 1
    assert not held


def test_free_blocks_can_be_held(pool: Any) -> None:
    """A finished request's last blocks are free when their store is created."""
    held = held_blocks(pool)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    hold(held, 1, blocks)
    assert blocks[0] not in pool.get_new_blocks(BLOCKS - 2)


def test_the_end_of_a_store_frees_only_blocks_without_other_references(pool: Any) -> None:
    held = held_blocks(pool)
    blocks = pool.get_new_blocks(1)
    hold(held, 1, blocks)
    assert not held.will_free_blocks()
    pool.free_blocks(blocks)
    assert held.will_free_blocks()


def test_the_prefix_cache_is_reset_while_blocks_are_held(pool: Any) -> None:
    held = held_blocks(pool)
    blocks = pool.get_new_blocks(2)
    hold(held, 1, blocks)
    hold(held, 2, blocks[:1])
    assert not pool.reset_prefix_cache()  # a request has them
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert [block.ref_cnt for block in blocks] == [2, 1]
    held.report({1: 1, 2: 1})
    assert pool.get_num_free_blocks() == BLOCKS - 1


def test_a_step_waits_for_overdue_stores_only(pool: Any) -> None:
    """And for loads, whose jobs are not held."""
    held = held_blocks(pool, max_hold=60.0)
    hold(held, 1, pool.get_new_blocks(1))
    assert held.jobs_to_wait_for({1, 5}) == {5}
    impatient = held_blocks(pool, max_hold=0.0)
    hold(impatient, 2, pool.get_new_blocks(1))
    created = time.monotonic()
    while time.monotonic() == created:
        pass
    assert impatient.jobs_to_wait_for({5}) == {2, 5}
