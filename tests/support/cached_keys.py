"""Which keys of a cache are loadable, for tests."""

from __future__ import annotations

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
