"""DeferredFree is freed some at a time, until nothing is left."""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import pairwise

import pytest

from kvferry.daemon.core.cache.block_allocator import BlockAllocator
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.deferred_free import SOME, DeferredFree


def heap(count: int) -> OrderedDict[bytes, int]:
    return OrderedDict((number.to_bytes(4, "big"), number) for number in range(count))


def test_some_are_freed_at_a_time() -> None:
    heaps = heap(2 * SOME + 1), dict(heap(SOME)), Counter(heap(3))
    rubble = DeferredFree(*heaps)
    steps = [len(rubble)]
    while rubble.free_some():
        steps.append(len(rubble))
    assert max(before - after for before, after in pairwise(steps)) == SOME
    assert (len(rubble), *map(len, heaps)) == (0, 0, 0, 0)
    assert not rubble.free_some()


def test_of_nothing_there_is_no_rubble() -> None:
    rubble = DeferredFree({}, OrderedDict())
    assert not rubble
    assert not rubble.free_some()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_cache_forgets_nothing_of_today_with_what_it_was(policy: str) -> None:
    """And all that it had goes with the rubble: keys, ghosts, pins and offers."""
    cache = Cache(4, policy, store_threshold=2)
    keys = [bytes([number]) for number in range(8)]
    for key in keys:
        cache.prepare_store([key])
        reservation = cache.prepare_store([key])
        assert reservation is not None
        cache.complete_store(reservation, True)
        cache.touch(keys[:2])  # to ARC they are frequent, and others leave ghosts
    cache.prepare_load(keys[-1:])
    ghosts = 2 if policy == "arc" else 0
    rubble = cache.reset()
    assert len(rubble) == 4 + 4 + ghosts + 1 + len(keys)
    cache.prepare_store(keys[:2])
    reservation = cache.prepare_store(keys[:2])
    assert reservation is not None
    cache.complete_store(reservation, True)
    while rubble.free_some():
        cache.check_integrity()
    assert cache.ready_keys() == keys[:2]
    cache.check_integrity()


def test_blocks_that_jobs_still_use_are_passed_over_once() -> None:
    blocks = BlockAllocator(6)
    held = blocks.allocate_blocks(5)
    blocks.reset_blocks([held[:1], held[2:4], held[2:3]])
    assert (blocks.free, blocks.orphaned) == (3, 3)
    assert blocks.allocate_blocks(1) == (1,)
    blocks.release_orphaned([0])
    blocks.release_orphaned([2])  # another job uses it
    assert blocks.free == 3
    assert sorted(blocks.allocate_blocks(3)) == [0, 4, 5]
    assert blocks.free == 0
    blocks.release_orphaned([2, 3])
    assert sorted(blocks.allocate_blocks(2)) == [2, 3]


def test_all_go_twice_while_a_job_of_the_first_time_is_under_way() -> None:
    blocks = BlockAllocator(3)
    blocks.reset_blocks([blocks.allocate_blocks(1)])
    blocks.allocate_blocks(1)
    blocks.reset_blocks([])
    assert (blocks.free, blocks.orphaned) == (2, 1)
    assert blocks.allocate_blocks(2) == (1, 2)
    blocks.release_orphaned([0])
    assert blocks.allocate_blocks(1) == (0,)
