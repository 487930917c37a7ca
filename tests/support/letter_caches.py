"""Short functions for a cache whose keys are single letters."""

from __future__ import annotations

from kvferry.daemon.core.cache.cache import Cache
from kvferry.daemon.core.cache.jobs import Reservation
from support.cached_keys import ready_keys


def keys(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def reserve(cache: Cache, letters: str) -> Reservation:
    reservation = cache.prepare_store(keys(letters))
    assert reservation is not None
    return reservation


def store(cache: Cache, letters: str) -> Reservation:
    reservation = reserve(cache, letters)
    cache.complete_store(reservation, success=True)
    return reservation


def evicted(reservation: Reservation) -> str:
    return b"".join(reservation.evicted).decode()


def ready(cache: Cache) -> str:
    """The keys that are a HIT, sorted."""
    cache.check_integrity()
    return b"".join(sorted(ready_keys(cache))).decode()
