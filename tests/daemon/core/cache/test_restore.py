"""Keys that are restored after a restart of the daemon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from kvferry.daemon.core.block_lines import NO_PARTS, Part
from kvferry.daemon.core.block_table import BlockTable
from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.cache_events import CacheEvent
from kvferry.proto.errors import Code, Refused
from kvferry.proto.keys import EventKind, Lookup
from support.cached_keys import entries_of, find_key, pending_keys, ready_keys
from support.committed_blocks import commit_all, next_table, store_blocks
from support.letter_caches import keys, reserve, store

SUB_BLOCKS = 4

HIT, MISS, HIT_PENDING = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING


def restored(
    entries: Sequence[tuple[bytes, int]],
    parts: Mapping[int, Part] = NO_PARTS,
    policy: str = "lru",
) -> Cache:
    """A cache with keys of an earlier daemon. entries: (key, block), the least recent first."""
    table = BlockTable(4, 1)
    for key, block in entries:
        store_blocks(table, [block], [key], {block: parts[block]} if block in parts else {})
    cache = Cache(4, policy, table=next_table(table, 1))
    cache.restore_keys(SUB_BLOCKS)
    return cache


def test_a_restored_cache_has_the_committed_entries(policy: str) -> None:
    old = Cache(6, policy, table=BlockTable(6, 1))
    store(old, "abcd")
    failed = reserve(old, "x")
    old.complete_store(failed, success=False)
    reserve(old, "y")
    commit_all(old.table)
    committed = entries_of(old)
    store(old, "e")
    new = Cache(6, policy, table=next_table(old.table, 1))
    new.restore_keys(SUB_BLOCKS)
    assert sorted(entries_of(new)) == sorted(committed)
    assert new.events.take() == []
    used = {block for _, block in committed}
    assert set(reserve(new, "z").blocks) < set(range(6)) - used
    new.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_recency_survives_a_restart(policy: str) -> None:
    cache = restored([(b"a", 3), (b"b", 0), (b"c", 2), (b"d", 1)], policy=policy)
    assert reserve(cache, "123").evicted == (b"a", b"b", b"c")


def test_the_more_recent_of_two_blocks_with_one_key_is_restored(policy: str) -> None:
    """A table that was damaged."""
    cache = restored([(b"a", 0), (b"b", 1), (b"a", 2)], policy=policy)
    assert entries_of(cache) == [(b"b", 1), (b"a", 2)]
    cache.check_integrity()
    assert entries_of(restored(entries_of(cache), policy=policy)) == entries_of(cache)
    assert next_table(cache.table, 1).restore(SUB_BLOCKS)[0].tolist() == [1, 2]


def test_a_restored_key_is_pending_until_it_is_verified() -> None:
    cache = restored([(b"a", 0), (b"b", 1), (b"c", 2)], {2: (0, 1)})
    assert (ready_keys(cache), pending_keys(cache)) == ([], [b"a", b"b"])
    assert (cache.usage.unverified, cache.usage.ready) == (3, 0)
    assert [find_key(cache, key) for key in keys("abc")] == [HIT_PENDING, HIT_PENDING, MISS]
    with pytest.raises(Refused, match="unverified") as caught:
        cache.prepare_load(keys("a"))
    assert (caught.value.code, caught.value.value) == (Code.KEY_ABSENT, b"a".hex())
    cache.mark_verified(np.array([0, 3, 2]))
    assert cache.events.take() == [CacheEvent(EventKind.STORED, (b"a",))]
    assert (cache.usage.unverified, cache.usage.ready) == (1, 2)
    assert [find_key(cache, key) for key in keys("abc")] == [HIT, HIT_PENDING, MISS]
    cache.check_integrity()
