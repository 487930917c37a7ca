"""The hits that a pool of another size would have: reuse distances of a sample of the keys.

An LRU cache of n blocks has a key that is used again if fewer than n other keys were used since.
Keys are sampled by their hash, so a key is always in the sample or never. A distance in the sample,
divided by the share of the sample, estimates the distance among all keys (SHARDS; Waldspurger et
al., FAST 2015). The sample has the last SAMPLED_KEYS keys, whether the pool has their blocks or
not. Event loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvferry.proto.layout import Int64s

# Multiples of the pool's size, by the fields of NamespaceStatus.
SIZES = {"hit_rate_half": 0.5, "hit_rate": 1.0, "hit_rate_double": 2.0, "hit_rate_quadruple": 4.0}
_LARGEST = 4.0
# More take more memory (200 bytes each) and time; with these a rate is within two hundredths of the
# exact one (tests/daemon/core/test_reuse_curve.py).
SAMPLED_KEYS = 8192
# Counters of distances, per size of the pool.
STEPS = 64
# Uses after which older ones count half, in sizes of the pool: the work of a daemon changes.
HALF_LIFE = 32
# Keys looked up before which a rate says nothing, also as a part of the pool's size.
LEAST_ASKED, LEAST_PART = 256, 0.1
# Bits of a hash that are compared.
_BITS = 32
_MASK = (1 << _BITS) - 1


class ReuseCurve:
    """The curve of a pool of `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._share = min(1.0, SAMPLED_KEYS / (_LARGEST * capacity))
        self._bound = int(self._share * (1 << _BITS))
        # When each sampled key was used last, the longest ago first; and these times.
        self._last_use: dict[bytes, int] = {}
        self._times = np.zeros(0, np.int64)
        self._clock = 1
        # Sampled uses again, by the size of the smallest pool that has the key then.
        self._again = np.zeros(int(_LARGEST * STEPS))
        self._uses = self._sampled = self._asked = 0.0

    def use(self, keys: Sequence[bytes], new: int = 0) -> None:
        """A prompt has used keys, the last one most recently. new: see Touch.

        Whether a pool has them is judged before: their lookups come before their stores.
        """
        bound = self._bound
        sample = dict.fromkeys(key for key in keys if hash(key) & _MASK < bound)
        if sample:
            before = np.array([self._last_use.pop(key, 0) for key in sample], np.int64)
            self._use_again(before[before > 0])
            times = range(self._clock, self._clock + len(sample))
            self._last_use.update(zip(sample, times, strict=True))
            self._times = np.concatenate((self._times, times))[-SAMPLED_KEYS:]
            self._clock = times.stop
            for key in list(islice(self._last_use, len(self._last_use) - len(self._times))):
                del self._last_use[key]
        self._uses += len(keys)
        self._sampled += len(sample)
        self._asked += len(keys) - new
        if self._uses > HALF_LIFE * self._capacity:
            self._again /= 2
            self._uses, self._sampled, self._asked = (
                each / 2 for each in (self._uses, self._sampled, self._asked)
            )

    def forget_keys(self) -> None:
        """Forget all keys, because a reset has removed them. The counters keep their values."""
        self._last_use.clear()
        self._times = self._times[:0]

    def hit_rates(self) -> dict[str, float]:
        """The share of the keys looked up that a pool of each of SIZES has. Empty if not known."""
        if self._asked < max(LEAST_ASKED, LEAST_PART * self._capacity):
            return {}
        hits = self._again.cumsum() / self._share
        # A few keys are used very often, and the sample may contain them or not. Then it has too
        # many or too few uses. The difference is uses of such keys, and each pool has these.
        hits += self._uses - self._sampled / self._share
        rates = np.clip(hits / self._asked, 0.0, 1.0)
        return {name: float(rates[int(size * STEPS) - 1]) for name, size in SIZES.items()}

    def _use_again(self, before: Int64s) -> None:
        """before: when these keys were used last."""
        places = np.searchsorted(self._times, before)
        # Other keys that were used since.
        others = (len(self._times) - places - 1) / self._share
        steps = (others * STEPS / self._capacity).astype(np.int64)
        np.add.at(self._again, steps[steps < self._again.size], 1)
        self._times = np.delete(self._times, places)
