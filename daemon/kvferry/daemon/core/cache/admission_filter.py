"""Admission filter: a key is stored from its n-th offer on (store_threshold n).

A key that is offered once may never be requested again. Counts are kept for a bounded number of
keys; beyond that the key whose last offer is the oldest is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

Counts: TypeAlias = "OrderedDict[bytes, int]"


class AdmissionFilter:
    def __init__(self, threshold: int, bound: int) -> None:
        if threshold < 1:
            raise ValueError(f"store_threshold is {threshold}; give at least 1")
        self._threshold = threshold
        self._max_keys = bound
        # Number of offers of each key, up to the threshold; the oldest offer first.
        self._counts: Counts = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def count_offers(self, keys: Sequence[bytes]) -> list[bytes]:
        """Count an offer of each of these keys. Returns those that were offered often enough."""
        if self._threshold == 1:
            return list(keys)
        counts, threshold, wanted = self._counts, self._threshold, []
        for key in reversed(keys):
            count = counts.pop(key, 0) + 1
            counts[key] = min(count, threshold)
            if count >= threshold:
                wanted.append(key)
        while len(counts) > self._max_keys:
            counts.popitem(last=False)
        wanted.reverse()
        return wanted

    def take_counts(self) -> Counts:
        """Return the counts, to be freed in steps, and start again from 0."""
        counts, self._counts = self._counts, OrderedDict()
        return counts
