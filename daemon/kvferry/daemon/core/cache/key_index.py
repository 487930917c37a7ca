"""Which number a key has, and which key a number has.

Numbers are host blocks, or the places of keys that a policy remembers. A dict of a million keys
that is inserted into and deleted from is rebuilt now and then, which takes 100 ms and more. So keys
are spread over many small dicts, by their hash: to rebuild one takes 0.1 ms. Event loop only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

# Keys in one dict, on average, if the index is full.
SHARD_KEYS = 1024
# Entries freed by one call of `free_some`: takes 1 ms.
SOME = 2048


class ShardedDict:
    """A dict of keys to numbers that is never rebuilt at once. size: keys that are expected."""

    def __init__(self, size: int) -> None:
        self.shards: list[dict[bytes, int]] = [{} for _ in range(_shard_count(size))]
        self.mask = len(self.shards) - 1

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def __iter__(self) -> Iterator[bytes]:
        return (key for shard in self.shards for key in shard)

    def shard_of(self, key: bytes) -> dict[bytes, int]:
        """The dict of a key, which the caller may change."""
        return self.shards[hash(key) & self.mask]

    def find_numbers(self, keys: Iterable[bytes]) -> list[int]:
        """The number of each key; -1 if it has none."""
        shards, mask = self.shards, self.mask
        return [shards[hash(key) & mask].get(key, -1) for key in keys]


class KeyIndex:
    """Distinct keys, each with a number below `size` of its own."""

    def __init__(self, size: int) -> None:
        self._numbers = ShardedDict(size)
        self._keys: list[bytes | None] = []  # grows to `size`
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        return key in self._numbers.shard_of(key)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._numbers)

    @property
    def has_repeated(self) -> bool:
        """Whether a key was added again: it has the last number, and the index must not be used."""
        return len(self._numbers) < self._count

    def find_number(self, key: bytes) -> int:
        """The number of a key; -1 if it has none."""
        return self._numbers.shard_of(key).get(key, -1)

    def find_numbers(self, keys: Iterable[bytes]) -> list[int]:
        """The number of each key; -1 if it has none."""
        return self._numbers.find_numbers(keys)

    def keys_of(self, numbers: Iterable[int]) -> list[bytes]:
        """The keys of numbers that have one."""
        keys = self._keys
        return [keys[number] for number in numbers]  # type: ignore[misc]

    def add_keys(self, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Add keys that are not in the index, with numbers that have no key."""
        shards, mask, by_number = self._numbers.shards, self._numbers.mask, self._keys
        by_number.extend([None] * (max(numbers, default=-1) + 1 - len(by_number)))
        for key, number in zip(keys, numbers, strict=True):
            shards[hash(key) & mask][key] = number
            by_number[number] = key
        self._count += len(keys)

    def remove_numbers(self, numbers: Iterable[int]) -> list[bytes]:
        """Remove the keys of these numbers, and return them."""
        shards, mask, by_number = self._numbers.shards, self._numbers.mask, self._keys
        removed = self.keys_of(numbers)
        for key in removed:
            by_number[shards[hash(key) & mask].pop(key)] = None
        self._count -= len(removed)
        return removed

    def free_some(self) -> bool:
        """Free some memory of an index that is no longer used. Return whether any is left."""
        left = SOME
        while self._numbers.shards and left > 0:
            left -= len(self._numbers.shards.pop())
        del self._keys[-SOME:]
        return bool(self._numbers.shards or self._keys)

    def check_integrity(self) -> None:
        found = {number: key for key in self._numbers for number in self.find_numbers([key])}
        by_number = {number: key for number, key in enumerate(self._keys) if key is not None}
        assert found == by_number, "keys and numbers do not match"
        assert len(self._numbers) == self._count == len(found), "the keys are counted wrong"


def _shard_count(size: int) -> int:
    """A power of two."""
    return 1 << max(0, (size // SHARD_KEYS).bit_length())
