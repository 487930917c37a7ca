"""Keys whose bytes are in a block of the cache, and how much of each can be loaded.

    state         sub-blocks                                            loadable   lookup
    whole         all are stored                                        all        HIT
    in part       some are stored                                       those      MISS
    unverified    stored by an earlier daemon, checksum not compared    none       HIT_PENDING, or
                                                                                   MISS if in part

A store that covers more replaces a key in part, and every store replaces an unverified key. Called
by cache.py.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse
from typing import TypeAlias

from kvferry.proto.keys import Lookup

# Some sub-blocks of a host block: (from, to).
Part: TypeAlias = tuple[int, int]
Parts: TypeAlias = Mapping[bytes, Part]
NO_PARTS: Parts = {}


class ResidentKeys:
    """blocks: the block of each key. parts: the sub-blocks of each key that is stored in part.

    Read-only for callers; the methods change them.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.parts: dict[bytes, Part] = {}
        self.unverified: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def lookup(self, key: bytes) -> Lookup:
        if key not in self.blocks or key in self.parts:
            return Lookup.MISS
        return Lookup.HIT_PENDING if key in self.unverified else Lookup.HIT

    def hits(self) -> Iterator[bytes]:
        """Keys that are a HIT."""
        return outside(self.blocks, self.unverified, self.parts)

    def pending(self) -> Iterator[bytes]:
        """Keys that are a HIT_PENDING."""
        return outside(self.unverified, self.parts)

    def loadable_among(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of these keys that are loadable, in whole or in part."""
        return [key for key in keys if key in self.blocks and key not in self.unverified]

    def first_unverified(self, keys: Iterable[bytes]) -> bytes | None:
        return next(filter(self.unverified.__contains__, keys), None) if self.unverified else None

    def replaceable(
        self, offered: Iterable[bytes], parts: Parts, pinned: Container[bytes]
    ) -> set[bytes]:
        """The resident keys of an offer that must be stored again.

        parts: the sub-blocks of keys that are offered in part.
        """
        if not (self.unverified or self.parts):
            return set()
        return {
            key
            for key in offered
            if (key in self.unverified or self._covers_more(key, parts)) and key not in pinned
        }

    def add_keys(self, keys: Sequence[bytes], blocks: Sequence[int], parts: Parts) -> None:
        self.blocks.update(zip(keys, blocks, strict=True))
        self.parts.update(parts)

    def restore_keys(self, blocks: dict[bytes, int], parts: Parts) -> None:
        """Restore the keys of an earlier daemon; there must be none yet."""
        self.blocks, self.parts = blocks, dict(parts)
        self.unverified = dict.fromkeys(blocks)

    def mark_verified(self, entries: Iterable[tuple[bytes, int]]) -> list[bytes]:
        """Mark keys as verified. Return those that are a HIT now."""
        good = [key for key in self.keys_in_blocks(entries) if key in self.unverified]
        for key in good:
            del self.unverified[key]
        return list(outside(good, self.parts))

    def keys_in_blocks(self, entries: Iterable[tuple[bytes, int]]) -> list[bytes]:
        """Those of these keys that are in these blocks."""
        return [key for key, block in dict(entries).items() if self.blocks.get(key) == block]

    def remove_keys(self, keys: Sequence[bytes]) -> tuple[list[int], list[bytes], list[bytes]]:
        """Remove keys. Return their blocks, and which of them were HIT and HIT_PENDING."""
        blocks = [self.blocks.pop(key) for key in keys]
        if not (self.unverified or self.parts):
            return blocks, list(keys), []
        pending = [key for key in keys if key in self.unverified and key not in self.parts]
        hits = list(outside(keys, self.unverified, self.parts))
        for key in keys:
            self.unverified.pop(key, None)
            self.parts.pop(key, None)
        return blocks, hits, pending

    def check_integrity(self) -> None:
        assert self.unverified.keys() <= self.blocks.keys(), "an unverified key has no block"
        assert self.parts.keys() <= self.blocks.keys(), "a key in part has no block"

    def _covers_more(self, key: bytes, parts: Parts) -> bool:
        stored, part = self.parts.get(key), parts.get(key)
        if stored is None:
            return False
        return part is None or (part[0] <= stored[0] and stored[1] <= part[1] and part != stored)


def outside(keys: Iterable[bytes], *kinds: Collection[bytes]) -> Iterator[bytes]:
    """The keys that are in none of these collections, filtered without Python code per key.

    The collections must not change while the result is iterated.
    """
    for kind in kinds:
        if kind:
            keys = filterfalse(kind.__contains__, keys)
    return iter(keys)
