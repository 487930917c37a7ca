"""Keys of host blocks: an engine's scheduler looks up, stores and loads blocks by key.

An OffloadKey is the hash of a block's tokens and of all tokens before it, followed by the index of
its KV cache group in four bytes, big-endian. The daemon treats it as opaque bytes; all keys of a
namespace have one length.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

OffloadKey: TypeAlias = bytes

MAX_KEY_BYTES = 64


class Lookup(StrEnum):
    """The result of looking up a key."""

    HIT = "hit"
    MISS = "miss"
    # A store of it is pending.
    HIT_PENDING = "hit_pending"
    # Unknown at present: look it up again later.
    RETRY = "retry"


class EventKind(StrEnum):
    """The new state of keys of a namespace."""

    # A store of them is pending.
    PENDING = "pending"
    # Their store completed: they can be loaded.
    STORED = "stored"
    # They were evicted.
    REMOVED = "removed"
    # Their store failed.
    ABANDONED = "abandoned"
    # They can be loaded from the pool of another daemon.
    BORROWED = "borrowed"
    # All keys were removed; the event names none.
    CLEARED = "cleared"


def offload_key(block_hash: bytes, group: int = 0) -> OffloadKey:
    """The key of a block of KV cache group `group`."""
    # The index has 4 bytes, as in vLLM.
    return block_hash + group.to_bytes(4, "big")


def block_hash_of(key: OffloadKey) -> bytes:
    return key[:-4]


def group_of(key: OffloadKey) -> int:
    return int.from_bytes(key[-4:], "big")
