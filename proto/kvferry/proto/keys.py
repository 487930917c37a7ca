"""Keys of host blocks, by which an engine's scheduler looks up, stores and loads.

An OffloadKey is the hash of a block's tokens and of all tokens before it, followed by the index of
its KV cache group in four bytes, big-endian. For the daemon it is opaque; all keys of a namespace
have one length.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

OffloadKey: TypeAlias = bytes

MAX_KEY_BYTES = 64


class Lookup(StrEnum):
    """What is known of a key."""

    HIT = "hit"
    MISS = "miss"
    # A store of it is pending.
    HIT_PENDING = "hit_pending"
    # Unknown at present: ask again later.
    RETRY = "retry"


class EventKind(StrEnum):
    """What happened to keys of a namespace."""

    # A store of them is pending.
    PENDING = "pending"
    # Their store completed: they can be loaded.
    STORED = "stored"
    # They were evicted.
    REMOVED = "removed"
    # Their store failed.
    ABANDONED = "abandoned"
    # All keys were removed; the event names none.
    CLEARED = "cleared"


def offload_key(block_hash: bytes, group: int = 0) -> OffloadKey:
    """The key of a block of KV cache group `group`."""
    return block_hash + group.to_bytes(4, "big")


def block_hash_of(key: OffloadKey) -> bytes:
    return key[:-4]


def group_of(key: OffloadKey) -> int:
    return int.from_bytes(key[-4:], "big")
