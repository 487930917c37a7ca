"""Deferred freeing of a cache that was reset.

Freeing a million keys at once takes 100 ms, which would block the event loop. So the server frees
them in steps.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TypeAlias

# Entries freed per step: takes 1 ms.
SOME = 2048

KeyTable: TypeAlias = MutableMapping[bytes, Any]


class DeferredFree:
    """Tables without any other reference."""

    def __init__(self, *tables: KeyTable) -> None:
        self._tables = [table for table in tables if table]

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def free_some(self) -> bool:
        """Free up to SOME entries. Return whether any are left."""
        left = SOME
        while left and self._tables:
            table = self._tables[-1]
            taken = min(left, len(table))
            for _ in range(taken):
                table.popitem()
            left -= taken
            if not table:
                self._tables.pop()
        return bool(self._tables)
