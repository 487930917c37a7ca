"""Keys that are remembered without a block: the newest ones, up to a bound. Event loop only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.daemon.core.cache.free_blocks import FreeBlocks
from kvferry.daemon.core.cache.key_index import KeyIndex
from kvferry.daemon.core.cache.use_order import UseOrder
from kvferry.proto.layout import Int64s


class RememberedKeys:
    """Each key has a place below `bound`, where callers may keep something about it."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.index = KeyIndex(bound)
        self._order = UseOrder(bound)
        self._free_places = FreeBlocks(bound)

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, key: bytes) -> bool:
        return key in self.index

    def add_keys(self, keys: Sequence[bytes]) -> Int64s:
        """Add distinct new keys, the last one as the newest, and forget the oldest ones.

        Returns their places. There must be at most `bound` of them.
        """
        self.forget_oldest(len(self) + len(keys) - self._bound)
        places = self._free_places.pop_blocks(len(keys))
        self.index.add_keys(keys, places.tolist())
        self._order.append(places)
        return places

    def forget_keys(self, keys: Sequence[bytes]) -> None:
        """Forget distinct keys; those that are not remembered are ignored."""
        found = [place for place in self.index.find_numbers(keys) if place >= 0]
        if found:
            self._forget_places(np.array(found, np.int64))

    def forget_oldest(self, count: int) -> None:
        for places in self._order.oldest() if count > 0 else ():
            self._forget_places(places[:count])
            count -= places.size
            if count <= 0:
                break

    def keys(self) -> list[bytes]:
        """The oldest first."""
        return self.index.keys_of(self._order.numbers().tolist())

    def check_integrity(self) -> None:
        self.index.check_integrity()
        self._order.check_integrity()
        assert len(self.index) == len(self._order) <= self._bound, "too many keys are remembered"

    def _forget_places(self, places: Int64s) -> None:
        self._order.remove(places)
        self.index.remove_numbers(places.tolist())
        self._free_places.push_blocks(places)
