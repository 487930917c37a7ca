"""Deferred freeing: of the keys of a cache that was reset, and of the pins of an ended session.

Freeing a million keys at once takes 100 ms, which would block the event loop. So the server frees
them in steps.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.daemon.core.cache.key_index import KeyIndex


class FreedInSteps(Protocol):
    def free_some(self) -> bool:
        """Free some entries. Return whether any are left."""


class DeferredFree:
    """Indexes without any other reference. False if none of them has keys."""

    def __init__(self, *indexes: KeyIndex) -> None:
        self._indexes = [index for index in indexes if len(index)]

    def __bool__(self) -> bool:
        return bool(self._indexes)

    def free_some(self) -> bool:
        """Free some keys, which takes 1 ms. Return whether any are left."""
        if self._indexes and not self._indexes[-1].free_some():
            self._indexes.pop()
        return bool(self._indexes)
