"""Admission filter: a key is stored from its n-th offer on (store_threshold n).

A key that is offered once may never be requested again. Counts are kept for a bounded number of
keys; beyond that the key whose last offer is the oldest is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.daemon.core.cache.key_index import KeyIndex
from kvferry.daemon.core.cache.remembered_keys import RememberedKeys


class AdmissionFilter:
    """Counts the offers of keys, and admits those that were offered often enough.

    bound: keys whose offers are counted. Takes no memory for a threshold of 1.
    """

    def __init__(self, threshold: int, bound: int) -> None:
        if threshold < 1:
            raise ValueError(f"store_threshold is {threshold}; give at least 1")
        self._threshold, self._bound = threshold, bound if threshold > 1 else 0
        self._keys = RememberedKeys(self._bound)
        # Offers of each key, by its place.
        self._counts = np.zeros(self._bound, np.int32)

    def __len__(self) -> int:
        return len(self._keys)

    def take_index(self) -> KeyIndex:
        """Return the keys whose offers were counted, to be freed in steps; start again from 0."""
        taken, self._keys = self._keys.index, RememberedKeys(self._bound)
        return taken

    def count_offers(self, keys: Sequence[bytes]) -> list[bytes]:
        """Count an offer of each of these distinct keys; return those offered often enough."""
        if self._threshold == 1:
            return list(keys)
        counts = self._counts
        found = np.array(self._keys.index.find_numbers(keys), np.int64)
        known = found >= 0
        offers = np.ones(len(keys), np.int64)
        offers[known] = counts[found[known]] + 1
        self._keys.forget_keys([keys[place] for place in np.flatnonzero(known).tolist()])
        # The head of an offer is the newest, and is kept if the offer exceeds the bound.
        head = min(len(keys), self._bound)
        places = self._keys.add_keys(keys[:head][::-1])
        counts[places[::-1]] = offers[:head]
        offered = zip(keys, offers.tolist(), strict=True)
        return [key for key, count in offered if count >= self._threshold]
