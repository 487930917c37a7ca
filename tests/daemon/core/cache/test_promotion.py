"""Promotions: the cache reserves blocks that a tier reads into, and holds them until a release."""

from __future__ import annotations

import numpy as np

from kvferry.daemon.core.cache.cache import Cache
from kvferry.proto.keys import EventKind, Lookup
from support.cached_keys import find_key

A, B, C, D = (bytes([number]) * 4 for number in range(4))


def store(cache: Cache, *keys: bytes) -> None:
    reservation = cache.prepare_store(keys)
    assert reservation is not None
    cache.complete_store(reservation, success=True)


def test_a_promoted_key_is_pending_and_then_loadable_or_absent() -> None:
    cache = Cache(4)
    blocks = cache.tier_access.prepare_promotion([A, B])
    assert cache.lookups([A, B, C]) == [Lookup.HIT_PENDING, Lookup.HIT_PENDING, None]
    stored_keys = cache.tier_access.end_promotion([A, B], blocks, np.array([True, False]), [0])
    assert stored_keys.tolist() == [True, False]
    assert [find_key(cache, key) for key in (A, B)] == [Lookup.HIT, Lookup.MISS]
    kinds = [(event.kind, event.keys) for event in cache.events.take()]
    assert kinds == [
        (EventKind.PENDING, (A, B)),
        (EventKind.STORED, (A,)),
        (EventKind.ABANDONED, (B,)),
    ]
    cache.check_integrity()


def test_a_block_whose_promotion_failed_is_free_only_after_its_release() -> None:
    cache = Cache(1)
    blocks = cache.tier_access.prepare_promotion([A])
    cache.tier_access.end_promotion([A], blocks, np.array([False]), [0])
    assert cache.prepare_store([B]) is None
    cache.tier_access.release_promotion(blocks)
    store(cache, B)
    cache.check_integrity()


def test_a_promotion_is_shorter_if_it_must_keep_keys() -> None:
    cache = Cache(3)
    store(cache, A, B)
    blocks = cache.tier_access.prepare_promotion([C, D], keep=[A, B])
    assert blocks.size == 1
    assert [find_key(cache, key) for key in (A, B, C, D)] == [
        Lookup.HIT,
        Lookup.HIT,
        Lookup.HIT_PENDING,
        Lookup.MISS,
    ]
    cache.check_integrity()
