"""Which keys a cache has, for tests."""

from __future__ import annotations

from kvferry.daemon.core.block_table import WITH_CONTENTS
from kvferry.daemon.core.cache.cache import Cache
from kvferry.proto.keys import Lookup


def find_key(cache: Cache, key: bytes) -> Lookup:
    """As a client's mirror answers."""
    return cache.lookups((key,))[0] or Lookup.MISS


def ready_keys(cache: Cache) -> list[bytes]:
    """Keys that are a HIT."""
    return cache.keys_between(0, cache.usage.capacity)[0]


def pending_keys(cache: Cache) -> list[bytes]:
    """Keys that are a HIT_PENDING."""
    return cache.keys_between(0, cache.usage.capacity)[1]


def entries_of(cache: Cache) -> list[tuple[bytes, int]]:
    """Stored keys and their blocks, least recent first as far as the policy knows."""
    blocks = cache._blocks.policy.blocks()
    stored = blocks[cache.table.among(blocks, *WITH_CONTENTS)].tolist()
    return list(zip(cache._blocks.index.keys_of(stored), stored, strict=True))
