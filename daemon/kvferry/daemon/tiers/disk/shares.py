"""How namespaces share the bound of a disk tier: which one gives up a slab for another one.

Each namespace that is in use has an equal share, and all other ones have one together. A namespace
in use that is below its share takes slabs from those that are furthest above theirs. One that is
not in use takes none but its first: others could use up the shares by making namespaces. A
namespace that was not used for long has no share. Called with the tier's lock.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from kvferry.daemon.tiers.disk.namespace_store import NamespaceStore

# Seconds without use after which a namespace gives its slabs to any other, and then its index.
SHARE_SECONDS = 86400.0


class Shares:
    """Which namespace gives up disk space for another. size: the bound in bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Names of the namespaces that are in use; None: not known, all count.
        self.used: Collection[str] | None = None

    def choose_giver(
        self, stores: Sequence[NamespaceStore], name: str, nbytes: int
    ) -> NamespaceStore | None:
        """The store that gives up a slab, so that the namespace `name` gets `nbytes` more."""
        taker = next((each for each in stores if each.name == name), None)
        others = [each for each in stores if each is not taker]
        if not others:
            return None
        coldest = _coldest(others)
        if coldest.last_used < time.monotonic() - SHARE_SECONDS:
            return coldest
        unused = [each for each in others if not self.is_used(each.name)]
        if self.is_used(name):
            groups = [[each] for each in others if self.is_used(each.name)]
            groups += [unused] if unused else []
            share, largest = self._size // (len(groups) + 1), max(groups, key=_total_bytes)
            if nbytes + (0 if taker is None else taker.nbytes) <= share:
                return _coldest(largest) if _total_bytes(largest) > share else None
        # The share may be less than the first slab, without which nothing can be written.
        return _coldest(unused or others) if taker is None or not taker.slabs.end else None

    def is_used(self, name: str) -> bool:
        """Whether a namespace has a share of its own."""
        return self.used is None or name in self.used


def _coldest(stores: Sequence[NamespaceStore]) -> NamespaceStore:
    return min(stores, key=lambda each: each.last_used)


def _total_bytes(stores: Sequence[NamespaceStore]) -> int:
    return sum(each.nbytes for each in stores)
