"""Eviction policies by name."""

from __future__ import annotations

from typing import Protocol

from kvferry.daemon.core.cache.arc import ARC
from kvferry.daemon.core.cache.key_index import KeyIndex
from kvferry.daemon.core.cache.lru import LRU
from kvferry.daemon.core.cache.policy import Policy
from kvferry.daemon.core.cache.s3fifo import S3FIFO
from kvferry.proto.layout import Int64s


class PolicyFactory(Protocol):
    def __call__(self, capacity: int, index: KeyIndex, blocks: Int64s) -> Policy:
        """Create a policy for a cache of this many blocks.

        index: the keys of the blocks. blocks: those that have a key, least recently used first.
        """


POLICIES: dict[str, PolicyFactory] = {"lru": LRU, "arc": ARC, "s3fifo": S3FIFO}
