"""The key table of a region: which host block has a key, for siblings that search it.

It lies in the memfd of the region's block table (persistence/table_file.py). Siblings map it
read-only (siblings/lent_table.py). A bucket has 16 entries of 8 bytes, each written by one
instruction:

    entry    bits 0 to 31: high half of the key's XXH3 hash; bits 32 to 63: number of the block + 1
    bucket   low bits of the hash

An entry is a hint: the reader compares the line of the block, which has the whole key. So no entry
is removed. Entries whose blocks lost that key are replaced first; in a full bucket any is, and its
key is then not found by siblings. The block table adds entries. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import xxhash

from kvferry.proto.layout import Bools, Int64s

WAYS = 16
BUCKET = np.dtype((np.uint64, (WAYS,)))
Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
_HALF, _LOW_HALF, _LOWEST = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(0xFFFF)
_ANY_WAY = np.uint64(WAYS - 1)
# By how much each kind of entry costs if it is replaced.
_SAME, _DEAD, _LIVE = 0, 1, 2


def bucket_count(num_blocks: int) -> int:
    """A power of two, with four to eight blocks per bucket."""
    return 1 << (-(-num_blocks // (WAYS // 2)) - 1).bit_length()


def hash_keys(keys: Sequence[bytes]) -> Hashes:
    """(n,)"""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))


def buckets_of(hashes: Hashes, count: int) -> Int64s:
    """The number of each hash's bucket. count: of all buckets."""
    return (hashes & np.uint64(count - 1)).astype(np.int64)


def tags_of(hashes: Hashes) -> Hashes:
    return hashes >> _HALF


def split_entries(entries: Hashes) -> tuple[Hashes, Int64s]:
    """The tag and the block of each entry; block -1: it is empty."""
    return entries & _LOW_HALF, (entries >> _HALF).astype(np.int64) - 1


class KeyTable:
    """The writer's end. buckets: (n, WAYS), shared memory. are_live: given blocks of any shape,
    which of them are loadable as a whole."""

    def __init__(
        self, buckets: Hashes, num_blocks: int, are_live: Callable[[Int64s], Bools]
    ) -> None:
        self._buckets, self._num_blocks, self._are_live = buckets, num_blocks, are_live
        # The lowest bits of the tag of each block's key: an entry with others is dead.
        self._tags = np.zeros(num_blocks, np.uint16)

    def add(self, keys: Sequence[bytes], blocks: Int64s) -> None:
        """Blocks have these keys now. Their lines are written already."""
        hashes = hash_keys(keys)
        tags, buckets = tags_of(hashes), buckets_of(hashes, len(self._buckets))
        entries = tags | ((blocks + 1).astype(np.uint64) << _HALF)
        self._tags[blocks] = tags & _LOWEST
        left = np.arange(len(keys))
        # One key per bucket at a time: those of one bucket must not take the same place. Further
        # keys than a bucket has places are left out.
        for _ in range(WAYS):
            _, first = np.unique(buckets[left], return_index=True)
            now = left[first]
            self._insert(buckets[now], entries[now])
            left = np.delete(left, first)
            if not left.size:
                break

    def _insert(self, buckets: Int64s, entries: Hashes) -> None:
        rows = self._buckets[buckets]
        tags, blocks = split_entries(rows)
        blocks[blocks >= self._num_blocks] = -1
        live = (blocks >= 0) & self._are_live(blocks) & (self._tags[blocks] == tags & _LOWEST)
        costs = np.where(rows == entries[:, None], _SAME, np.where(live, _LIVE, _DEAD))
        ways = costs.argmin(axis=1)
        full = costs.min(axis=1) == _LIVE
        ways[full] = (entries & _ANY_WAY).astype(np.int64)[full]
        self._buckets[buckets, ways] = entries
